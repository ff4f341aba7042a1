"""`atoll status`: shows what a run is doing, or how it ended."""

import argparse
import asyncio
from contextlib import suppress
from pathlib import Path

from atoll.cli.display import progress
from atoll.cli.display.summary import describe_summary, read_summary
from atoll.cli.launch import active_runs
from atoll.cli.launch.launcher import ADDRESS_FILE
from atoll.runtime.errors import ServiceUnavailableError
from atoll.wire.info import RunStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    active_runs.add_run(which, optional=True)
    which.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of a run on another machine; its token is in ATOLL_OPERATOR_TOKEN or ATOLL_TOKEN",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.coordinator:
        print(describe(asyncio.run(ask(active_runs.run_at(arguments.coordinator)))))
        return 0
    folder: Path = arguments.run or active_runs.find_only_run(active_runs.RUNS)
    active_runs.check_is_run(folder)
    if (folder / ADDRESS_FILE).exists():
        with suppress(ServiceUnavailableError):  # left by a killed launcher
            print(describe(asyncio.run(ask(active_runs.run_in(folder)))))
            return 0
    if summary := read_summary(folder):
        print(describe_summary(summary, folder))
    else:
        print(
            f"{folder} was not started by `atoll run`, or was cut off: if its services run elsewhere, give "
            f"--coordinator HOST:PORT; otherwise see their logs, and continue with --resume"
        )
    return 0


async def ask(run: active_runs.RunAddress) -> RunStatus:
    async with active_runs.connect_to(run) as client:
        return await client.status()


def describe(status: RunStatus) -> str:
    services = [f"  {entry.name:12} {entry.address:21} {entry.incarnation}" for entry in status.services]
    reason = (
        [f"  {status.error}"] if status.error else []
    )  # reason for waiting, pausing, recovering or failing
    servers = [
        f"  {health.server.kind:12} {health.server.name:21} {health.server.url}  "
        + ("healthy" if health.healthy else f"unhealthy: {health.cause}")
        for health in status.servers
    ]
    return "\n".join([f"{status.run}: {progress.line(status)}", *reason, *services, *servers])
