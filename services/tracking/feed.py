"""Brings a tracker what it has not had yet of a run's files."""

import fcntl
import logging
from pathlib import Path

from atoll.config.load import read_json
from atoll.config.schema import RunConfig, TrackerName
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.samples import read_samples
from atoll.runtime.telemetry import load_metrics, metrics_of
from atoll.tracking.tracker import SampleRow, TrackedRun, Tracker

_log = logging.getLogger(__name__)

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
        self._seen = (0, 0)  # the metrics file's time of change and size when it was last read
        self._bookmark = Bookmark(config.folder / BOOKMARKS / name)

    def start(self) -> None:
        self._tracker.start(
            TrackedRun(
                project=self._section.project,
                name=self._folder.name,
                id=(self._folder / "run.id").read_text(),
                config=read_json(self._folder / "config.json"),
                folder=self._folder.absolute(),
            )
        )

    def send(self) -> None:
        """Sends rows that are new; of a step whose samples are due, its samples, too."""
        path = self._folder / "metrics.jsonl"
        if not path.exists():
            return
        now = path.stat()
        if (seen := (now.st_mtime_ns, now.st_size)) == self._seen:
            return  # most changes of a run's status add no row
        self._seen = seen
        for row in load_metrics(self._folder):
            if row["time"] > self._bookmark.time:
                step = int(row["step"])
                self._tracker.log(step, row["time"], metrics_of(row))
                if self._section.samples and step and step % self._section.every == 0:
                    self._send_samples(step)
                self._bookmark.move(row["time"])

    def finish(self) -> None:
        self.send()
        self._tracker.finish()

    def close(self) -> None:
        """Lets another process feed the tracker."""
        self._bookmark.close()

    def _send_samples(self, step: int) -> None:
        try:
            samples = read_samples(self._folder, step)
        except (AtollError, OSError) as error:  # this tracker is late, and the run keeps recent ones alone
            _log.warning("no samples of step %d: %s", step, error)
            return
        samples.sort(key=lambda sample: sample.index)  # one of each group, then another of each
        chosen = samples[: self._section.samples]
        rows = [SampleRow(s.id, s.prompt, s.response, s.ground_truth, s.score) for s in chosen]
        self._tracker.log_samples(step, rows)
