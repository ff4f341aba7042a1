"""The main of every service process: read the config, serve, hold a lease at the coordinator, stop."""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
import typing
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import grpc.aio

from services.config.errors import ConfigError
from services.config.load import access_token, read_resolved
from services.config.schema import Role, RunConfig
from services.runtime.clients import Caller, CoordinatorClient
from services.runtime.errors import AtollError, ReplacedError, UnauthenticatedError, UserError
from services.runtime.server import Server
from services.runtime.telemetry import configure_logging
from services.wire.types import ServiceEntry

_log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 5.0  # for calls in progress
COORDINATOR_TIMEOUT_S: Final = 3.0
AWAY_PAUSE_S: Final = 1.0  # between two tries to reach a coordinator that is away


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What a service is built from."""

    config: RunConfig
    role: str  # as it is registered: of a trainer, its model's; of others, the service's name
    name: str  # "rollout-0"
    incarnation: str


class Service(Protocol):
    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers its servicer."""
        ...

    async def failed(self) -> None:
        """Waits for as long as the service works; raises what it cannot survive."""
        ...

    async def close(self) -> None:
        """Frees what it holds; called once, after the last call has ended."""
        ...


def run_service(service: str, build: Callable[[ServiceContext], Awaitable[Service]]) -> None:
    """Runs `service` ("trainer", "rollout", "reward") until SIGTERM or SIGINT.

    Ends the process with exit code 1 where it cannot start, has failed, or the run does not want it.
    """
    arguments = parse_arguments(service)
    configure_logging(arguments.name)
    try:
        asyncio.run(_serve(service, build, arguments))
    except (UserError, ReplacedError, UnauthenticatedError, ConfigError) as error:
        sys.exit(f"{arguments.name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # before the service was built; afterwards SIGINT stops it in order


def new_incarnation() -> str:
    """Sorts by start time: of two processes with one name, the registry keeps the later."""
    return f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}"


def announce(ready_fd: int, address: str) -> None:
    """Tells the launcher that the service answers; it reads an ended pipe where a service dies first."""
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(json.dumps({"address": address}) + "\n")


def parse_arguments(service: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"atoll serve {service}")
    if service == "trainer":
        roles = typing.get_args(Role)
        parser.add_argument("--role", choices=roles, default="actor", help="which model of the run it holds")
    else:
        parser.set_defaults(role=service)
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved config.json")
    parser.add_argument("--name", required=True, help=f"unique in the run, such as {service}-0")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where to register; none: serve alone")
    parser.add_argument("--ready-fd", type=int, help="a pipe that gets a line once the service answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    return parser.parse_args()


async def _serve(
    name: str, build: Callable[[ServiceContext], Awaitable[Service]], arguments: argparse.Namespace
) -> None:
    config, token = read_resolved(arguments.config), access_token()
    context = ServiceContext(config, arguments.role, arguments.name, new_incarnation())
    service = await build(context)
    failed = asyncio.create_task(service.failed())
    try:
        server = await Server.start(
            f"atoll.v1.{name.capitalize()}",
            service.add_to,
            host=arguments.host,
            port=arguments.port,
            token=token,
            setting="--port",
        )
        try:
            stop = asyncio.Event()
            failed.add_done_callback(lambda _: stop.set())
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            if arguments.ready_fd is not None:
                announce(arguments.ready_fd, server.address)
            _log.info("serves %s at %s", context.role, server.address)
            entry = ServiceEntry(context.role, context.name, context.incarnation, server.address)
            await _hold_lease(entry, arguments.coordinator, token, stop)
            if failed.done():
                await failed
            _log.info("stops")
        finally:
            await server.stop(STOP_GRACE_S)
    finally:
        failed.cancel()
        await service.close()


async def _hold_lease(
    entry: ServiceEntry, coordinator: str | None, token: str | None, stop: asyncio.Event
) -> None:
    """Keeps `entry` registered until `stop` is set, however long the coordinator is away; then removes it.

    Raises ReplacedError where a newer process took the name, UnauthenticatedError for a wrong token.
    """
    if coordinator is None:
        await stop.wait()
        return
    client = CoordinatorClient(coordinator, Caller(token=token), COORDINATOR_TIMEOUT_S)
    lease = asyncio.create_task(_renew(entry, client))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((lease, stopped), return_when=asyncio.FIRST_COMPLETED)
        if lease.done():
            await lease
        with suppress(AtollError):  # a coordinator that is gone needs no goodbye
            await client.deregister(entry)
    finally:
        lease.cancel()
        stopped.cancel()
        await client.close()


async def _renew(entry: ServiceEntry, client: CoordinatorClient) -> None:
    """Registers, then sends three heartbeats in the time of a lease; ends where it is not wanted."""
    registered = away = False
    pause_s = AWAY_PAUSE_S
    while True:
        try:
            if registered:
                registered = await client.heartbeat(entry)
            if not registered:
                pause_s = await client.register(entry) / 3
                registered = True
                _log.info("registered at %s as %s", client.address, entry.incarnation)
            away = False
        except (ReplacedError, UnauthenticatedError):
            raise
        except AtollError as error:  # it is away, or has lost its store, or another one takes over
            if not away:
                _log.warning("no lease, trying on: %s", error)
            away = True
        await asyncio.sleep(AWAY_PAUSE_S if away else pause_s)
