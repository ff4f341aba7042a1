"""Launches fake services and says what the launcher made of it: `fake_run.py FOLDER COORDINATOR SERVICE ...`.

Prints "up" once all services have registered, then "completed" or "stopped".
"""

import asyncio
import signal
import sys
from pathlib import Path

from atoll.cli.launch.launcher import supervise
from atoll.cli.launch.processes import ServiceCommand, ServiceDiedError, ServiceGroup
from atoll.cli.launch.tokens import Tokens
from atoll.runtime.clients.coordinator import CoordinatorClient

FAKE = Path(__file__).with_name("fake_service.py")


def fake(name: str, behaviour: str, *arguments: str, max_restarts: int = 0) -> ServiceGroup:
    command = (sys.executable, str(FAKE), behaviour, name, *arguments)
    return ServiceGroup((ServiceCommand(name, command),), max_restarts)


async def follow(client: CoordinatorClient) -> None:
    await client.status()
    print("up", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored if the tests run under nohup
    folder, coordinator, *behaviours = sys.argv[1:]

    def services(address: str) -> list[ServiceGroup]:
        return [fake(f"service-{i}", behaviour, address) for i, behaviour in enumerate(behaviours)]

    first = fake("coordinator", coordinator, "--expected", str(len(behaviours)))
    try:
        completed = asyncio.run(supervise(Path(folder), Tokens.of_this_run(), first, services, follow))
    except asyncio.CancelledError:
        completed = False
    except ServiceDiedError as error:
        sys.exit(str(error))
    print("completed" if completed else "stopped", flush=True)


if __name__ == "__main__":
    main()
