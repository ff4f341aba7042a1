"""`atoll stop`: ends a running run as one Ctrl-C in its terminal does."""

import argparse
import asyncio
import logging
from pathlib import Path

from atoll.cli.display.summary import describe_summary, read_summary
from atoll.cli.launch import active_runs
from atoll.cli.launch.interrupts import follow_stop
from atoll.cli.launch.launcher import ADDRESS_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    active_runs.add_run(parser, optional=True)


def run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(format="%(message)s")
    folder: Path = arguments.run or active_runs.find_only_run(active_runs.RUNS)
    asyncio.run(stop(folder))
    summary = read_summary(folder)
    print(describe_summary(summary, folder) if summary else f"{folder} has ended")
    return 0


async def stop(folder: Path) -> None:
    """Returns once the run has ended. Raises UserError if it is not running."""
    async with active_runs.connect_to(active_runs.run_in(folder)) as client:
        await follow_stop(
            client,
            advice="Ctrl-C ends this command, but not the run",
            is_over=lambda: not (folder / ADDRESS_FILE).exists(),
        )
