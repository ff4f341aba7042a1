"""`atoll deregister KIND NAME [URL]`: removes a registered server once its calls have finished."""

import argparse
import asyncio

from atoll.cli.launch import active_runs
from atoll.cli.server_arguments import KINDS
from atoll.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name")
    parser.add_argument("url", nargs="?", default="", help="default: all servers of that name")
    active_runs.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    print(f"{asyncio.run(_remove(arguments))} removed")
    return 0


async def _remove(arguments: argparse.Namespace) -> int:
    kind, name, url = arguments.kind, arguments.name, arguments.url
    async with active_runs.connect_coordinator(arguments) as client:
        removed = await client.remove_server(kind, name, url)
        if removed:
            return removed
        servers = (health.server for health in (await client.status()).servers)
        there = ", ".join(f"{server.kind} {server.name} {server.url}" for server in servers)
    raise UserError(f"there is no {kind} server {name} {url}, only {there or 'none at all'}")
