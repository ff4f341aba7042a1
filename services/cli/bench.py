"""`atoll bench WHAT`: runs a benchmark of the checkout and prints the results."""

import argparse
import importlib
import json
import sys
from pathlib import Path

from atoll.config.load import flatten
from atoll.runtime.errors import UserError

CHECKOUT = Path(__file__).parents[2]


WHAT = ("coordinator", "gateway", "loop", "reward", "rollout", "routing", "trainer", "weights")
SESSIONS = (  # of the gateway
    ("sessions", 2000, "of one instance; then twice as many of two"),
    ("tokens", 128_000, "of a long history"),
)
LOAD = (  # of the coordinator
    ("replicas", 256, "rollout replicas"),
    ("reward-workers", 64, "reward services"),
    ("rate", 5000.0, "samples per second"),
    ("seconds", 20.0, "seconds, after the first steps"),
    ("in-flight", 100_000, "samples between issue and publish; then a tenth as many"),
    ("tokens", 512, "of a response"),
    ("group-size", 8, "samples of a prompt"),
    ("memory-rate", 1000.0, "samples per second while memory is watched"),
    ("memory-seconds", 120.0, "seconds; 0: skip"),
)
OPTIONS = {"coordinator": LOAD, "gateway": SESSIONS}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for what in WHAT:
        benchmark = benchmarks.add_parser(what)
        benchmark.add_argument("--json", action="store_true", help="print JSON")
        for name, default, meaning in OPTIONS.get(what, ()):
            benchmark.add_argument(
                f"--{name}", type=type(default), default=default, help=f"{meaning} (default: {default:g})"
            )


def run(arguments: argparse.Namespace) -> int:
    if not (CHECKOUT / "benchmarks").is_dir():
        raise UserError("the benchmarks are not part of an installed package: run this from a checkout")
    sys.path.insert(0, str(CHECKOUT))
    names = [name.replace("-", "_") for name, _, _ in OPTIONS.get(arguments.what, ())]
    options = {name: getattr(arguments, name) for name in names}
    result = importlib.import_module(f"benchmarks.{arguments.what}").run(**options)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in flatten(result):
            print(f"{name:48} {value}")
    return 0
