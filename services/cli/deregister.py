"""`atoll deregister KIND NAME [URL]`: a registered server leaves its run once its calls have ended."""

import argparse
import asyncio

from atoll.cli import running
from atoll.cli.servers import KINDS
from atoll.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("name")
    parser.add_argument("url", nargs="?", default="", help="none: all of that name")
    running.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    print(f"{asyncio.run(_remove(arguments))} taken out")
    return 0


async def _remove(arguments: argparse.Namespace) -> int:
    kind, name, url = arguments.kind, arguments.name, arguments.url
    async with running.coordinator(arguments) as client:
        removed = await client.remove_server(kind, name, url)
        if removed:
            return removed
        servers = (health.server for health in (await client.status()).servers)
        there = ", ".join(f"{server.kind} {server.name} {server.url}" for server in servers)
    raise UserError(f"there is no {kind} server {name} {url}, only {there or 'none at all'}")
