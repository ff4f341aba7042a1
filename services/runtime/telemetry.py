"""Logs, step timings and the metrics file, with standard names."""

import contextlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from atoll.runtime.errors import UserError

_log = logging.getLogger(__name__)

METRICS_FILE: Final = "metrics.jsonl"  # in a run's folder
ROW_KEYS: Final = ("step", "time")  # of a row; everything else is a metric


def configure_logging(service: str, level: int = logging.INFO) -> None:
    """One line per record on stderr: time, level, service, module, message. Call once per process."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format=f"%(asctime)s.%(msecs)03d %(levelname)s {service} %(name)s: %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
        force=True,
    )
    # a line for each request, with its URL; settings and parameter names of each gradient buffer
    for library in ("httpx2", "mcp", "megatron.core.distributed"):
        logging.getLogger(library).setLevel(logging.WARNING)


class StepTimer:
    """Seconds of one step's phases: "gen", "reward", "old_log_prob", "adv", "update_actor",
    "sync_weights", "save_checkpoint", "step". Phases may overlap; one that runs twice adds up."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": seconds for name, seconds in self._seconds.items()}


class MetricsFile:
    """A JSON object per step and line, on disk when `write` returns, so that a reader can follow: "step",
    "time" in Unix seconds, and the step's metrics.

    Rows after `last_step`, the step that a run resumes from, belong to steps that it repeats: they go.
    A run that starts at its beginning (None) starts with an empty file. What cannot be cut so stays whole.
    """

    def __init__(
        self, path: Path, last_step: int | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` counts Unix seconds."""
        self._clock = clock
        rows = path.read_text().splitlines(keepends=True) if path.exists() and last_step is not None else []
        cut = path.with_name(path.name + ".partial")
        cut.write_text("".join(r for r in rows if r.endswith("\n") and json.loads(r)["step"] <= last_step))
        cut.replace(path)
        self._file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers that JSON lacks (NaN, infinities) become null, with a warning."""
        row: dict[str, float | None] = {"step": step, "time": self._clock()}
        for name, value in metrics.items():
            row[name] = float(value) if math.isfinite(value) else None
            if row[name] is None:
                _log.warning("step %d: %s is %s; written as null", step, name, value)
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def load_metrics(folder: str | Path) -> list[dict[str, float]]:
    """The rows of the run in `folder`, in the order of their steps: "step", "time" (Unix seconds) and the
    step's metrics by name. Values that were not finite are left out.

    Works while the run is running. Raises UserError if the folder has no metrics.
    """
    path = Path(folder) / METRICS_FILE
    if not path.exists():
        raise UserError(f"{folder} has no {METRICS_FILE}: give the folder of a run that has recorded a step")
    lines = path.read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def metrics_of(row: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a row that `load_metrics` returns."""
    return {name: value for name, value in row.items() if name not in ROW_KEYS}


def rows_before(folder: str | Path) -> dict[int, dict[str, float]]:
    """The metrics of each step in a run's folder, by step. Raises as `load_metrics` does."""
    return {int(row["step"]): metrics_of(row) for row in load_metrics(folder)}
