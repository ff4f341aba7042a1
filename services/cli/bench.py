"""`atoll bench WHAT`: runs one of the checkout's benchmarks and prints what it measured."""

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from services.runtime.errors import UserError

CHECKOUT = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["loop", "reward", "rollout", "routing", "trainer", "weights"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if not (CHECKOUT / "benchmarks").is_dir():
        raise UserError("the benchmarks are not part of an installed package: run this from a checkout")
    sys.path.insert(0, str(CHECKOUT))
    result = importlib.import_module(f"benchmarks.{arguments.what}").run()
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in flatten(result):
            print(f"{name:48} {value}")
    return 0


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
