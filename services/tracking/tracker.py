"""What an experiment tracker does with a run. Each package has a file of its own beside this one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TrackedRun:
    project: str
    name: str
    id: str  # the same after every restart
    config: Mapping[str, Any]  # as in config.json
    folder: Path  # of the run: packages that write files put them here


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A sample as a row of a table."""

    id: str
    prompt: str
    response: str  # that was graded
    ground_truth: str
    score: float


class Tracker(Protocol):
    """Calls may block: a tracker has a process of its own, which its errors end."""

    def start(self, run: TrackedRun) -> None:
        """Opens the run in the tracker, or continues it if it exists."""
        ...

    def log(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step, which ended at `time` (Unix seconds). Steps ascend, except that a run
        that was resumed from a checkpoint repeats those after it."""
        ...

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None: ...

    def finish(self) -> None:
        """Delivers what is still held back."""
        ...
