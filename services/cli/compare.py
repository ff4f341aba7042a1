"""`atoll compare`: compares the settings and results of two runs."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from atoll.cli.display.charts import sparkline
from atoll.cli.display.summary import VALIDATION, clock, is_result, read_summary
from atoll.cli.launch import active_runs
from atoll.config.load import flatten, read_json
from atoll.coordinator.algorithm.metrics import SCORE
from atoll.coordinator.summary import first_and_last
from atoll.runtime.telemetry import load_metrics

CURVE_WIDTH = 24  # characters


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting with another value; None: it is not set, or its config has no such setting."""

    setting: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.setting}: {json.dumps(self.old)} -> {json.dumps(self.new)}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, type=active_runs.run_folder, metavar="RUN", help="a run's name or folder")


def run(arguments: argparse.Namespace) -> int:
    folders: list[Path] = [arguments.a, arguments.b]
    for folder in folders:
        active_runs.check_is_run(folder)
    console = Console()
    console.print(settings_table(folders))
    console.print(results_table(folders))
    return 0


def read_settings(folder: Path) -> dict[str, Any]:
    """config.json as a tree: one of another version of Atoll can be compared, too."""
    return read_json(folder / "config.json")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """Settings whose values differ, by their dotted names in alphabetical order; lists count as one value."""
    flat_old, flat_new = dict(flatten(old)), dict(flatten(new))
    names = sorted(flat_old.keys() | flat_new.keys())
    pairs = ((name, flat_old.get(name), flat_new.get(name)) for name in names)
    return [Difference(*pair) for pair in pairs if pair[1] != pair[2]]


def settings_table(folders: Sequence[Path]) -> Table | str:
    found = differences(*map(read_settings, folders))
    found = [each for each in found if each.setting != "run.name"]
    if not found:
        return "no setting differs"
    table = _table("setting", folders)
    for each in found:
        table.add_row(each.setting, json.dumps(each.old), json.dumps(each.new))
    return table


def results_table(folders: Sequence[Path]) -> Table:
    """First and last values are means over windows of equal size in both runs."""
    rows = [load_metrics(folder) for folder in folders]
    window = min(read_settings(folder)["run"]["target_window"] for folder in folders)
    table = _table("result", folders)
    table.add_row("steps", *(str(int(run[-1]["step"])) if run else "-" for run in rows))
    summaries = [read_summary(folder) or {"outcome": "-", "seconds": None} for folder in folders]
    table.add_row("outcome", *(str(summary["outcome"]) for summary in summaries))
    table.add_row("time", *("-" if each["seconds"] is None else clock(each["seconds"]) for each in summaries))
    for name in [SCORE, *sorted({name for run in rows for row in run for name in row if is_result(name)})]:
        curves = [[row[name] for row in run if name in row] for run in rows]
        label = "reward" if name == SCORE else name.removeprefix(VALIDATION)
        if not any(curves):
            continue
        best = min if name.endswith("/nll") else max
        smooth = window if name == SCORE else 1  # a validation's samples are many already
        firsts, lasts = zip(*(first_and_last(curve, smooth)[1:] for curve in curves), strict=True)
        table.add_row(f"{label}, first", *map(_number, firsts))
        table.add_row(f"{label}, last", *map(_number, lasts))
        table.add_row(f"{label}, best", *(_number(best(curve)) if curve else "-" for curve in curves))
        table.add_row(label, *(sparkline(curve, CURVE_WIDTH) for curve in curves))
    return table


def _table(what: str, folders: Sequence[Path]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in (what, *map(str, folders)):
        table.add_column(title, overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
