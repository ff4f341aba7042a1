"""Logs how far a run is: where services are started by hand, nobody else shows it."""

import asyncio
import logging
import math
from typing import Final

from atoll.coordinator.algorithm.metrics import SCORE
from atoll.coordinator.control import RunControl, RunProgress

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
METRICS: Final = (SCORE, "actor/nll_loss", "timing_s/step")


async def log_progress(control: RunControl) -> None:
    """A line for each state, and one every EVERY_S for its steps.

    Consumes the run's progress; waits for its next change; ends when cancelled.
    """
    clock = asyncio.get_running_loop().time
    state, logged_at = None, -math.inf
    async for progress in control.changes():
        if progress.state is not state or clock() >= logged_at + EVERY_S:
            log.info("%s", describe(progress))
            state, logged_at = progress.state, clock()


def describe(progress: RunProgress) -> str:
    """training, step 120 of 1500: critic/score/mean 0.342, timing_s/step 0.25"""
    values = {name: progress.metrics[name] for name in METRICS if name in progress.metrics}
    step = f", step {progress.step} of {progress.num_steps}" if progress.num_steps else ""
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    return f"{progress.state.value}{step}" + (f": {metrics}" if metrics else "")
