"""`atoll plot`: metrics of runs over their steps, in the terminal or as an SVG file."""

import argparse
import difflib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.cli.display.charts import Curve, terminal_chart
from atoll.cli.display.svg import svg
from atoll.cli.launch import active_runs
from atoll.coordinator.algorithm.metrics import SCORE
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import load_metrics, metrics_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_run(parser, several=True)
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help=f"a metric of metrics.jsonl; repeatable; default: {SCORE}, the reward",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="write a picture; default: show a chart")


def run(arguments: argparse.Namespace) -> int:
    out: Path | None = arguments.out
    if out and out.suffix != ".svg":
        raise UserError(f"--out {out}: expected a name that ends with .svg")
    rows = {str(folder): load_metrics(folder) for folder in arguments.run}
    charts = {name: curves_of(name, rows) for name in arguments.metric or [SCORE]}
    if out:
        out.write_text(svg(charts))
        print(out)
    else:
        width = shutil.get_terminal_size().columns
        print("\n\n".join(terminal_chart(name, curves, width) for name, curves in charts.items()))
    return 0


def curves_of(name: str, runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Curve]:
    """The curve of metric `name` in each run that has it. Raises UserError if none has."""
    curves = {run: [(row["step"], row[name]) for row in rows if name in row] for run, rows in runs.items()}
    if any(curves.values()):
        return {run: curve for run, curve in curves.items() if curve}
    known = sorted({metric for rows in runs.values() for row in rows for metric in metrics_of(row)})
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    raise UserError(f"no run has the metric {name}; choose another with --metric, such as {', '.join(near)}")
