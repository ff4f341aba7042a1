"""`atoll quickstart`: builds the arithmetic task, then trains on it."""

import argparse
import time
from pathlib import Path

from atoll.cli.examples import EXAMPLES
from atoll.cli.run import follow_to_end
from atoll.cli.tasks.arithmetic import build_arithmetic
from atoll.config.load import load

ASSETS = Path("runs/data/arithmetic")  # path that the example expects
DIGITS = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data order and sampling")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override one setting")


def run(arguments: argparse.Namespace) -> int:
    seed, now = arguments.seed, time.strftime("%Y%m%d-%H%M%S")
    name = f"arithmetic-seed{seed}-{now}"  # a new folder each time, so nothing is overwritten
    config = load(EXAMPLES / "arithmetic.toml", [f"run.seed={seed}", f"run.name={name}", *arguments.set])
    build_arithmetic(ASSETS, seed, DIGITS)
    return follow_to_end(config, resume=False)
