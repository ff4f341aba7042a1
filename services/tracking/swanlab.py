"""SwanLab. SWANLAB_API_KEY, SWANLAB_MODE and its other variables apply; files are in runs/NAME/swanlab."""

from collections.abc import Mapping, Sequence

import swanlab

from atoll.tracking.tracker import SampleRow, TrackedRun


class SwanLabTracker:
    def start(self, run: TrackedRun) -> None:
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            id=run.id,
            config=dict(run.config),
            log_dir=str(run.folder / "swanlab"),
            resume="allow",
        )

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        texts = [
            swanlab.Text(
                f"{row.prompt}\n\n{row.response}",
                caption=f"{row.id}: score {row.score:g}, truth {row.ground_truth}",
            )
            for row in rows
        ]
        self._run.log({"samples": texts}, step=step)

    def finish(self) -> None:
        self._run.finish()
