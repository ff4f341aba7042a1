"""`atoll rm`: deletes the folders of runs that are not running."""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.launch import active_runs
from atoll.cli.runs import is_running, read_size, show_bytes
from atoll.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_run(parser, several=True)
    parser.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    folders: list[Path] = arguments.run
    check_removable(folders)
    size = show_bytes(sum(map(read_size, folders)))
    question = f"delete {', '.join(map(str, folders))} ({size}) with all checkpoints? [y/N] "
    if not arguments.yes and input(question).strip().lower() not in ("y", "yes"):
        print("nothing was deleted")
        return 1
    for folder in folders:
        shutil.rmtree(folder)
    print(f"deleted {size}")
    return 0


def check_removable(folders: Sequence[Path]) -> None:
    """Raises UserError for what is not a run's folder, and for a run that is running."""
    for folder in folders:
        active_runs.check_is_run(folder)
        if is_running(folder):
            raise UserError(f"{folder} is running: stop it first (atoll stop {folder})")
