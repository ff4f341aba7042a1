"""`python -m atoll.tracking`: sends a run to one tracker, while it runs or afterwards.

A process for each tracker, so that one that hangs or dies affects neither the run nor other trackers.
"""

import argparse
import asyncio
import sys
import typing
from contextlib import closing
from pathlib import Path

from atoll.config.errors import ConfigError
from atoll.config.load import access_token, read_resolved
from atoll.config.schema import TrackerName
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient, statuses
from atoll.runtime.errors import AtollError
from atoll.runtime.process import announce, stop_signal
from atoll.runtime.telemetry import configure_logging
from atoll.tracking.feed import Feed
from atoll.tracking.packages import make_tracker


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m atoll.tracking")
    parser.add_argument("--config", type=Path, required=True, help="path of the run's resolved config.json")
    parser.add_argument("--to", choices=typing.get_args(TrackerName), required=True, help="the tracker")
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="coordinator to follow; default: send what there is and exit",
    )
    parser.add_argument("--ready-fd", type=int, help="a pipe that receives a line once the process has begun")
    arguments = parser.parse_args()
    configure_logging(f"tracking-{arguments.to}")
    try:
        with closing(Feed(read_resolved(arguments.config), arguments.to, make_tracker(arguments.to))) as feed:
            if arguments.ready_fd is not None:
                announce(arguments.ready_fd, "")
            if arguments.coordinator is None:
                feed.start()
                feed.finish()
            else:
                asyncio.run(follow(arguments.coordinator, Caller(token=access_token()), feed))
    except (ConfigError, AtollError) as error:
        sys.exit(f"tracking-{arguments.to}: {error}")


async def follow(coordinator: str, caller: Caller, feed: Feed) -> None:
    """Sends what is new after every change of the run's status, until SIGTERM; then the rest.

    The feed blocks the loop: nothing else is to be done in this process.
    """
    client = CoordinatorClient(coordinator, caller)
    with stop_signal() as asked:
        feed.start()
        following = asyncio.create_task(_follow(client, feed))
        await asyncio.wait((asked, following), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            following.result()
        following.cancel()
    feed.finish()
    await client.close()


async def _follow(client: CoordinatorClient, feed: Feed) -> None:
    async for _ in statuses(client):
        feed.send()


if __name__ == "__main__":
    main()
