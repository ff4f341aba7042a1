"""The coordinator's log says how far the run is, on a virtual clock."""

import asyncio
import logging

import pytest

from atoll.coordinator.control import RunControl, RunState
from atoll.coordinator.progress_log import log_progress
from tests.virtual_clock import run


def test_each_state_is_logged_and_its_steps_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:  # its seconds are the virtual clock's: they pass at once
        control = RunControl(trains=True)
        telling = asyncio.create_task(log_progress(control))
        await asyncio.sleep(100.0)  # nothing changes
        await control.report(state=RunState.TRAINING, num_steps=25)
        for step in range(1, 26):
            await asyncio.sleep(1.0)
            metrics = {"critic/score/mean": step / 100, "timing_s/step": 1.0, "actor/entropy": 2.0}
            await control.report(step=step, metrics=metrics)
        await control.report(state=RunState.FINISHED)
        await asyncio.sleep(1.0)
        telling.cancel()

    caplog.set_level(logging.INFO)
    run(scene())
    assert caplog.messages == [
        "starting",
        "training, step 0 of 25",
        "training, step 10 of 25: critic/score/mean 0.1, timing_s/step 1",
        "training, step 20 of 25: critic/score/mean 0.2, timing_s/step 1",
        "finished, step 25 of 25: critic/score/mean 0.25, timing_s/step 1",
    ]
