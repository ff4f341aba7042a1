"""`atoll register KIND NAME URL`: someone else's server joins a run that goes on."""

import argparse
import asyncio

from atoll.cli import running, servers
from atoll.wire.types import ExternalServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=servers.KINDS)
    parser.add_argument(
        "name", help="a reward server: that of a grader, NAME of server:NAME in reward.graders"
    )
    parser.add_argument("url", help="as the coordinator reaches it")
    servers.add_arguments(parser)  # the variable of --auth is one of the coordinator's environment
    running.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    server = servers.described(arguments, arguments.name)
    asyncio.run(_add(arguments, server))
    print(f"{server} joins")
    return 0


async def _add(arguments: argparse.Namespace, server: ExternalServer) -> None:
    async with running.coordinator(arguments) as client:
        await client.add_server(server)
