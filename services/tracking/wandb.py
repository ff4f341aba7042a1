"""Weights & Biases. WANDB_API_KEY, WANDB_MODE and its other variables apply; files are in runs/NAME/wandb."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields

import wandb

from atoll.tracking.tracker import SampleRow, TrackedRun


class WandbTracker:
    def start(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            config=dict(run.config),
            dir=run.folder,
            resume="allow",
            # otherwise it would record the output and the load of this process
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        # wandb's own step only ascends, and would drop steps that a resumed run repeats
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, "_timestamp": time, **metrics})

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        columns = [field.name for field in fields(SampleRow)]
        table = wandb.Table(columns=columns, data=[list(astuple(row)) for row in rows])
        self._run.log({"step": step, "samples": table})

    def finish(self) -> None:
        self._run.finish()
