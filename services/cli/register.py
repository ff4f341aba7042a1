"""`atoll register KIND NAME URL`: adds an external server to a running run."""

import argparse
import asyncio

from atoll.cli import server_arguments
from atoll.cli.launch import active_runs
from atoll.wire.types import ExternalServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=server_arguments.KINDS)
    parser.add_argument("name", help="for a reward server: NAME of the grader server:NAME in reward.graders")
    parser.add_argument("url", help="URL as seen from the coordinator")
    server_arguments.add_arguments(parser)  # --auth names a variable in the coordinator's environment
    active_runs.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    server = server_arguments.parse_server(arguments, arguments.name)
    asyncio.run(_add(arguments, server))
    print(f"{server} joins")
    return 0


async def _add(arguments: argparse.Namespace, server: ExternalServer) -> None:
    async with active_runs.connect_coordinator(arguments) as client:
        await client.add_server(server)
