"""The coordinator of the run that a command speaks to."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.launcher import ADDRESS_FILE
from atoll.cli.tokens import OPERATOR_TOKEN_FILE, TOKEN_FILE
from atoll.config.load import OPERATOR_TOKEN, TOKEN, access_token, given_token
from atoll.config.schema import RunSection
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import UserError

RUNS = RunSection.model_fields["dir"].default


@dataclass(frozen=True, slots=True)
class Run:
    """Where a run's coordinator is, and the token to call it with."""

    address: str
    caller: Caller


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--run", type=Path, metavar="FOLDER", help="a run's folder; none: the only run that goes on in runs/"
    )
    which.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help=f"of a run on another machine, whose token is in {OPERATOR_TOKEN} or {TOKEN}",
    )


@asynccontextmanager
async def coordinator(arguments: argparse.Namespace) -> AsyncIterator[CoordinatorClient]:
    """Raises UserError where the folder's run is not running, or none or several are."""
    async with connected(found(arguments)) as client:
        yield client


@asynccontextmanager
async def connected(run: Run) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(run.address, run.caller)
    try:
        yield client
    finally:
        await client.close()


def found(arguments: argparse.Namespace, *, in_full: bool = False) -> Run:
    """`in_full`: with the run's own token, since the command calls its services, too."""
    if arguments.coordinator:
        return at(arguments.coordinator, in_full=in_full)
    return of(arguments.run or only_run(RUNS), in_full=in_full)


def at(address: str, *, in_full: bool = False) -> Run:
    operators = None if in_full else given_token(OPERATOR_TOKEN)
    return Run(address, Caller(token=operators or access_token()))


def of(folder: Path, *, in_full: bool = False) -> Run:
    try:
        token = (folder / (TOKEN_FILE if in_full else OPERATOR_TOKEN_FILE)).read_text()
        return Run((folder / ADDRESS_FILE).read_text(), Caller(token=token))
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is not running (there is no {error.filename}): start it, or give --coordinator"
        ) from None
    except PermissionError as error:
        raise UserError(
            f"{error.filename} belongs to another user: ask them for the coordinator's address and for the "
            f"token in {OPERATOR_TOKEN_FILE}, set {OPERATOR_TOKEN} to that, and give --coordinator HOST:PORT"
        ) from None


def only_run(runs: Path) -> Path:
    folders = sorted(file.parent for file in runs.glob(f"*/{ADDRESS_FILE}"))
    if len(folders) != 1:
        there = (
            f"several runs go on ({', '.join(map(str, folders))})" if folders else f"no run goes on in {runs}"
        )
        raise UserError(f"{there}: say which one with --run FOLDER or --coordinator HOST:PORT")
    return folders[0]
