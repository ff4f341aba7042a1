"""`atoll drain NAME`: has a service finish its work and leave the run."""

import argparse
import asyncio
import sys

from atoll.cli.launch import active_runs
from atoll.runtime.clients.coordinator import CoordinatorClient, statuses
from atoll.wire.types import ServiceEntry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the service's name, such as rollout-1; `atoll status` lists them")
    active_runs.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    print(asyncio.run(drain(arguments)))
    return 0


async def drain(arguments: argparse.Namespace) -> str:
    """What happened, once the service has left. Raises UserError if there is none of that name."""
    async with active_runs.connect_coordinator(arguments) as client:
        entry, warning = await client.drain_service(arguments.name)
        if warning:
            print(f"warning: {warning}", file=sys.stderr)
        print(f"{entry.name} gets no new work and leaves once it has finished what it has", flush=True)
        return await wait_until_left(client, entry)


async def wait_until_left(client: CoordinatorClient, entry: ServiceEntry) -> str:
    async for status in statuses(client):
        if entry not in status.services:
            return f"{entry.name} has left" + (f"; {status.error}" if status.error else "")
    raise AssertionError("statuses do not end")
