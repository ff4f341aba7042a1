"""The coordinator of the run that a command speaks to."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.cli.launcher import ADDRESS_FILE
from services.config.load import access_token
from services.config.schema import RunSection
from services.runtime.clients import Caller, CoordinatorClient
from services.runtime.errors import UserError

RUNS = RunSection.model_fields["dir"].default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--run", type=Path, metavar="FOLDER", help="a run's folder; none: the only run that goes on in runs/"
    )
    which.add_argument("--coordinator", metavar="HOST:PORT", help="of a run on another machine")


@asynccontextmanager
async def coordinator(arguments: argparse.Namespace) -> AsyncIterator[CoordinatorClient]:
    """Raises UserError where the folder's run is not running, or none or several are."""
    async with connected(arguments.coordinator or address(arguments.run or only_run(RUNS))) as client:
        yield client


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(address, Caller(token=access_token()))
    try:
        yield client
    finally:
        await client.close()


def only_run(runs: Path) -> Path:
    folders = sorted(file.parent for file in runs.glob(f"*/{ADDRESS_FILE}"))
    if len(folders) != 1:
        there = (
            f"several runs go on ({', '.join(map(str, folders))})" if folders else f"no run goes on in {runs}"
        )
        raise UserError(f"{there}: say which one with --run FOLDER or --coordinator HOST:PORT")
    return folders[0]


def address(folder: Path) -> str:
    file = folder / ADDRESS_FILE
    if not file.exists():
        raise UserError(f"{folder} is not running (there is no {file}): start it, or give --coordinator")
    return file.read_text()
