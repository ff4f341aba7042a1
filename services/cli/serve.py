"""`atoll serve ROLE ...`: runs a single service in this process, for manual placement."""

import argparse
import os
import sys
from typing import NoReturn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    roles = ["agents", "coordinator", "gateway", "reward", "rollout", "store", "trainer"]
    parser.add_argument("role", choices=roles)
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help="service options: --config runs/NAME/config.json --name NAME --coordinator HOST:PORT ...",
    )


def run(arguments: argparse.Namespace) -> NoReturn:
    module = "atoll.cli.store" if arguments.role == "store" else f"atoll.{arguments.role}"
    command = [sys.executable, "-m", module, *arguments.arguments]
    os.execv(sys.executable, command)
