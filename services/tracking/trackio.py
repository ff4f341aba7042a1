"""Trackio: local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL says otherwise; files are in TRACKIO_DIR."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import trackio

from atoll.tracking.tracker import SampleRow, TrackedRun

ID_LENGTH = 8  # of the part of a run's id in its name


class TrackioTracker:
    def start(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:ID_LENGTH]}",  # runs of one name are the same run
            config=dict(run.config),
            resume="allow",
            auto_log_gpu=False,  # of this process's machine
            auto_log_cpu=False,
        )

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._run.log({"samples": trackio.Table(data=[asdict(row) for row in rows])}, step=step)

    def finish(self) -> None:
        self._run.finish()
