"""`atoll runs`: lists the runs of a folder."""

import argparse
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from atoll.cli.display.summary import read_summary
from atoll.cli.launch import active_runs
from atoll.cli.launch.launcher import ADDRESS_FILE
from atoll.config.load import read_json
from atoll.coordinator.algorithm.metrics import SCORE
from atoll.coordinator.summary import Outcome
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import METRICS_FILE, load_metrics

CONNECT_TIMEOUT_S = 1.0
STATES = {  # of runs that have left a summary
    Outcome.FINISHED: "finished",
    Outcome.TARGET_REACHED: "finished",
    Outcome.INTERRUPTED: "interrupted",
    Outcome.STOPPED_BY_GUARD: "failed",
    Outcome.FAILED: "failed",
}


@dataclass(frozen=True, slots=True)
class RunOverview:
    folder: Path
    state: str  # "running", "crashed" (ended without a summary), or one of STATES
    step: int
    num_steps: int
    reward: float | None  # of the last step
    best: float | None  # validation, by the run's validation.best
    changed: float  # Unix seconds of the last step; of the start, if there is none
    num_bytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", type=Path, nargs="?", default=active_runs.RUNS, help="folder of runs; default: %(default)s"
    )


def run(arguments: argparse.Namespace) -> int:
    folders = [path.parent for path in arguments.dir.glob("*/config.json")]
    if not folders:
        raise UserError(f"{arguments.dir} contains no runs: give the folder that run.dir names")
    Console().print(as_table(sorted(map(overview, folders), key=lambda run: run.changed), time.time()))
    return 0


def overview(folder: Path) -> RunOverview:
    config = read_json(folder / "config.json")  # as a tree: any version's can be listed
    has_rows = (folder / METRICS_FILE).exists()
    rows = load_metrics(folder) if has_rows else []
    rewards = [row[SCORE] for row in rows if SCORE in row]
    return RunOverview(
        folder,
        read_state(folder),
        step=int(rows[-1]["step"]) if rows else 0,
        num_steps=config["run"]["steps"],
        reward=rewards[-1] if rewards else None,
        best=best_validation(config, rows),
        changed=(folder / (METRICS_FILE if has_rows else "config.json")).stat().st_mtime,
        num_bytes=read_size(folder),
    )


def read_state(folder: Path) -> str:
    if is_running(folder):
        return "running"
    summary = read_summary(folder)
    return STATES[summary["outcome"]] if summary else "crashed"


def is_running(folder: Path) -> bool:
    """Whether the run's coordinator answers; a launcher that was killed leaves its address behind."""
    try:
        host, _, port = (folder / ADDRESS_FILE).read_text().rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False


def best_validation(config: dict[str, Any], rows: Iterable[dict[str, float]]) -> float | None:
    """The best value of the metric that validation.best names; of a loss (nll), the lowest."""
    name = config["validation"]["best"]
    values = [row[f"val/{name}"] for row in rows if f"val/{name}" in row]
    if not values:
        return None
    return min(values) if name.endswith("/nll") else max(values)


def read_size(folder: Path) -> int:
    """Bytes of all files; a file that a running run removes at this moment does not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def show_bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def as_table(runs: Iterable[RunOverview], now: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("run", "state", "step", "reward", "best", "changed", "size"):
        table.add_column(title, overflow="fold", no_wrap=title != "run")
    for run in runs:
        table.add_row(
            run.folder.name,
            run.state,
            f"{run.step}/{run.num_steps}",
            *("-" if value is None else f"{value:.3f}" for value in (run.reward, run.best)),
            show_age(now - run.changed),
            show_bytes(run.num_bytes),
        )
    return table


def show_age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return "now"
