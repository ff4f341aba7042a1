"""`atoll reload`: the reward services of a run import the user's own graders anew."""

import argparse
import asyncio

from atoll.cli import running
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    running.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    for name in asyncio.run(_reload(arguments)):
        print(f"{name} grades with what reward.graders' files hold now")
    return 0


async def _reload(arguments: argparse.Namespace) -> list[str]:
    run = running.found(arguments, in_full=True)
    async with running.connected(run) as coordinator:
        status = await coordinator.status()
    services = [entry for entry in status.services if entry.role == "reward"]
    if not services:
        raise UserError(f"{status.run} has no reward service now: see `atoll status`")
    for entry in services:
        client = RewardClient(entry.address, run.caller)
        try:
            await client.reload()
        except UserError as error:
            raise UserError(f"{entry.name} goes on with the graders that it has: {error}") from error
        finally:
            await client.close()
    return [entry.name for entry in services]
