"""Brings a tracker what it has not had yet of a run's files."""

import fcntl
import json
from pathlib import Path

from atoll.config.schema import RunConfig, TrackerName
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import load_metrics, metrics_of
from atoll.tracking.samples import sample_rows
from atoll.tracking.tracker import TrackedRun, Tracker

BOOKMARKS = "tracking"  # folder in the run's


class Bookmark:
    """The time of the last row that a tracker has had, in runs/NAME/tracking/TRACKER. Rows of steps that a
    resumed run repeats have later times than those that they replace, so each row is sent once."""

    def __init__(self, path: Path) -> None:
        """Raises UserError if another process holds it."""
        path.parent.mkdir(exist_ok=True)
        path.touch()
        self._file = path.open("r+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"another process is sending this run to {path.name}: try again once the run has ended"
            ) from None
        self.time = float(self._file.read() or 0)

    def move(self, time: float) -> None:
        self.time = time
        self._file.seek(0)
        self._file.write(f"{time!r:32}".encode())  # at once, and always as long: it is never half written

    def close(self) -> None:
        self._file.close()


class Feed:
    def __init__(self, config: RunConfig, name: TrackerName, tracker: Tracker) -> None:
        """Raises UserError if another process feeds this tracker."""
        self._folder = config.folder
        self._section = config.tracking
        self._tracker = tracker
        self._bookmark = Bookmark(config.folder / BOOKMARKS / name)

    def start(self) -> None:
        self._tracker.start(
            TrackedRun(
                project=self._section.project,
                name=self._folder.name,
                id=(self._folder / "run.id").read_text(),
                config=json.loads((self._folder / "config.json").read_text()),
                folder=self._folder.absolute(),
            )
        )

    def send(self) -> None:
        """Sends rows that are new; of a step whose samples are due, its samples, too."""
        if not (self._folder / "metrics.jsonl").exists():
            return
        for row in load_metrics(self._folder):
            if row["time"] > self._bookmark.time:
                step = int(row["step"])
                self._tracker.log(step, row["time"], metrics_of(row))
                if self._samples_are_due(step) and (
                    rows := sample_rows(self._folder, step, self._section.samples)
                ):
                    self._tracker.log_samples(step, rows)
                self._bookmark.move(row["time"])

    def finish(self) -> None:
        self.send()
        self._tracker.finish()

    def close(self) -> None:
        """Lets another process feed the tracker."""
        self._bookmark.close()

    def _samples_are_due(self, step: int) -> bool:
        return self._section.samples > 0 and step % self._section.samples_every == 0
