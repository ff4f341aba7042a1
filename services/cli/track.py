"""`atoll track RUN`: sends a run to experiment trackers, or what a failed tracker missed."""

import argparse
import subprocess
import typing

from atoll.cli.launch import active_runs
from atoll.cli.launch.preflight import check_trackers
from atoll.cli.launch.trackers import tracker_command
from atoll.config.load import read_resolved
from atoll.config.schema import TrackerName
from atoll.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_run(parser)
    parser.add_argument(
        "--to",
        action="append",
        choices=typing.get_args(TrackerName),
        help="tracker; repeatable; default: those of the run's config",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a tracker failed."""
    config = arguments.run / "config.json"
    if not config.exists():
        raise UserError(f"{arguments.run} contains no run: give a run's folder, such as runs/NAME")
    section = read_resolved(config).tracking
    names = tuple(arguments.to or section.to)
    if not names:
        raise UserError(f"{config} names no tracker in tracking.to: choose one with --to")
    check_trackers(names, section.python)
    codes = [subprocess.call(tracker_command(config, name, section.python)) for name in names]
    return 1 if any(codes) else 0
