"""`atoll scale rollout N`: changes how many replicas the launcher of a running run keeps."""

import argparse
import asyncio

from atoll.cli.launch import active_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("role", choices=["rollout"])
    parser.add_argument("number", type=int, help="of replicas; a resumed run starts with rollout.replicas")
    active_runs.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    asyncio.run(scale(arguments))
    return 0


async def scale(arguments: argparse.Namespace) -> None:
    """Raises UserError if the launcher cannot run that many."""
    role, number = arguments.role, arguments.number
    async with active_runs.connect_coordinator(arguments) as client:
        before = {entry.name for entry in (await client.status()).services if entry.role == role}
        await client.scale(role, number)
    wanted = {f"{role}-{index}" for index in range(number)}
    for what, names in (("starts", wanted - before), ("drains", before - wanted)):
        if names:
            print(f"the launcher {what} {', '.join(sorted(names))}")
    if wanted == before:
        print(f"{number} x {role} are there already")
