"""`atoll reload`: makes the reward services of a run import the user's own graders again."""

import argparse
import asyncio

from atoll.cli.launch import active_runs
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    for name in asyncio.run(_reload(arguments)):
        print(f"{name} now uses the current files of reward.graders")
    return 0


async def _reload(arguments: argparse.Namespace) -> list[str]:
    run = active_runs.find_run(arguments, in_full=True)
    async with active_runs.connect_to(run) as coordinator:
        status = await coordinator.status()
    services = [entry for entry in status.services if entry.role == "reward"]
    if not services:
        raise UserError(f"{status.run} has no reward service at the moment: see `atoll status`")
    for entry in services:
        client = RewardClient(entry.address, run.caller)
        try:
            await client.reload()
        except UserError as error:
            raise UserError(f"{entry.name} keeps its current graders: {error}") from error
        finally:
            await client.close()
    return [entry.name for entry in services]
