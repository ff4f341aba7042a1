"""`atoll examples`: copies the package's example configs, data and functions."""

import argparse
import shutil
from pathlib import Path

from atoll.runtime.errors import UserError

EXAMPLES = Path(__file__).parents[1] / "examples"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("examples"), metavar="DIR", help="new folder (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises UserError if the folder exists."""
    out: Path = arguments.out
    if out.exists():
        raise UserError(f"{out} exists: give a new folder with --out, or delete it")
    shutil.copytree(EXAMPLES, out, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(out.glob("*.toml")):
        print(path)
    return 0
