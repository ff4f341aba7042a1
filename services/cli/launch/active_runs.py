"""Finds the coordinator of the run that a command addresses."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.launch.launcher import ADDRESS_FILE
from atoll.cli.launch.tokens import OPERATOR_TOKEN_FILE, TOKEN_FILE
from atoll.config.load import OPERATOR_TOKEN, TOKEN, access_token, optional_token
from atoll.config.schema import RunSection
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import UserError

RUNS = RunSection.model_fields["dir"].default


@dataclass(frozen=True, slots=True)
class RunAddress:
    """A coordinator's address, and the token to call it with."""

    address: str
    caller: Caller


def run_folder(text: str) -> Path:
    """The folder that RUN stands for: itself, or the run of that name in runs/."""
    path, named = Path(text), RUNS / text
    return named if is_run(named) and not is_run(path) else path


def is_run(folder: Path) -> bool:
    return (folder / "config.json").exists()


def check_is_run(folder: Path) -> None:
    if not is_run(folder):
        raise UserError(f"{folder} contains no run: give a run's name or folder; `atoll runs` lists them")


def add_run(parser: argparse._ActionsContainer, *, optional: bool = False, several: bool = False) -> None:
    """RUN, a name or a folder; `optional`: None stands for the only active run; `several`: a list."""
    parser.add_argument(
        "run",
        type=run_folder,
        nargs="?" if optional else "+" if several else None,
        metavar="RUN",
        help="a run's name or folder" + ("; default: the only active run in runs/" if optional else ""),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--run", type=run_folder, help="a run's name or folder; default: the only active run in runs/"
    )
    which.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help=f"address of a run on another machine; its token is in {OPERATOR_TOKEN} or {TOKEN}",
    )


@asynccontextmanager
async def connect_coordinator(arguments: argparse.Namespace) -> AsyncIterator[CoordinatorClient]:
    """Raises UserError if the folder's run is not running, or if there is not exactly one active run."""
    async with connect_to(find_run(arguments)) as client:
        yield client


@asynccontextmanager
async def connect_to(run: RunAddress) -> AsyncIterator[CoordinatorClient]:
    client = CoordinatorClient(run.address, run.caller)
    try:
        yield client
    finally:
        await client.close()


def find_run(arguments: argparse.Namespace, *, in_full: bool = False) -> RunAddress:
    """`in_full`: use the run's own token, since the command also calls its services."""
    if arguments.coordinator:
        return run_at(arguments.coordinator, in_full=in_full)
    return run_in(arguments.run or find_only_run(RUNS), in_full=in_full)


def run_at(address: str, *, in_full: bool = False) -> RunAddress:
    operators = None if in_full else optional_token(OPERATOR_TOKEN)
    return RunAddress(address, Caller(token=operators or access_token()))


def run_in(folder: Path, *, in_full: bool = False) -> RunAddress:
    try:
        token = (folder / (TOKEN_FILE if in_full else OPERATOR_TOKEN_FILE)).read_text()
        return RunAddress((folder / ADDRESS_FILE).read_text(), Caller(token=token))
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is not running (there is no {error.filename}): start it, or give --coordinator"
        ) from None
    except PermissionError as error:
        raise UserError(
            f"{error.filename} belongs to another user: ask them for the coordinator's address and for the "
            f"token in {OPERATOR_TOKEN_FILE}, set {OPERATOR_TOKEN} to that, and give --coordinator HOST:PORT"
        ) from None


def find_only_run(runs: Path) -> Path:
    folders = sorted(file.parent for file in runs.glob(f"*/{ADDRESS_FILE}"))
    if len(folders) != 1:
        there = (
            f"multiple runs are active ({', '.join(map(str, folders))})"
            if folders
            else f"no active run in {runs}"
        )
        raise UserError(f"{there}: name the run, or give --coordinator HOST:PORT")
    return folders[0]
