"""`atoll serve ROLE ...`: runs a single service in this process, for manual placement."""

import argparse
import os
import sys
from typing import NoReturn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=["agents", "coordinator", "gateway", "reward", "rollout", "trainer"])
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="service options: --config runs/NAME/config.json --name NAME --coordinator HOST:PORT ...",
    )


def run(arguments: argparse.Namespace) -> NoReturn:
    command = [sys.executable, "-m", f"atoll.{arguments.role}", *arguments.arguments]
    os.execv(sys.executable, command)
