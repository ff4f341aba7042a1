"""The main of every service process: read the config, serve, hold a lease at the coordinator, stop."""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import typing
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import grpc.aio

from atoll.config.errors import ConfigError
from atoll.config.load import access_token, read_resolved, trainer_rank
from atoll.config.schema import Role, RunConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.deaths import Deaths
from atoll.runtime.errors import (
    AtollError,
    EngineDiedError,
    MemoryExhaustedError,
    ReplacedError,
    SandboxError,
    UnauthenticatedError,
    UserError,
)
from atoll.runtime.server import Fence, Server
from atoll.runtime.telemetry import configure_logging
from atoll.wire.types import ServiceEntry

_log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 5.0  # for calls in progress
COORDINATOR_TIMEOUT_S: Final = 3.0
AWAY_PAUSE_S: Final = 1.0  # between two tries to reach a coordinator that is away
EXIT_RANK_LOST: Final = 3  # of a trainer rank that ends because another one died: that one is to blame
EXIT_GAVE_UP: Final = 4  # of a service that has built itself anew as often as it may: it is not started again


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What a service is built from."""

    config: RunConfig
    role: str  # as it is registered: of a trainer, its model's; of others, the service's name
    name: str  # "rollout-0"
    incarnation: str
    host: str  # that it serves on
    exports: tuple[Path, ...] = ()  # outside the run's folder, where a trainer may write


class Service(Protocol):
    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers its servicer."""
        ...

    async def failed(self) -> None:
        """Waits for as long as the service works; raises what it cannot survive: EngineDiedError where one
        built anew can go on."""
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
    except (
        UserError,
        ReplacedError,
        UnauthenticatedError,
        ConfigError,
        MemoryExhaustedError,
        SandboxError,
    ) as error:
        sys.exit(f"{arguments.name}: {error}")
    except EngineDiedError:
        _log.exception("gives up")
        sys.exit(EXIT_GAVE_UP)
    except KeyboardInterrupt:
        sys.exit(130)  # before the service was built; afterwards SIGINT stops it in order


def new_incarnation() -> str:
    """Tells this life of a service from all others. Which is the later one, the registry knows."""
    return secrets.token_hex(8)


def announce(ready_fd: int, address: str) -> None:
    """Tells the launcher that the service answers; it reads an ended pipe where a service dies first."""
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(json.dumps({"address": address}) + "\n")


def parse_arguments(service: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"atoll serve {service}")
    if service == "trainer":
        roles = typing.get_args(Role)
        parser.add_argument("--role", choices=roles, default="actor", help="which model of the run it holds")
        parser.add_argument(
            "--export", type=Path, help="a folder outside the run's that it may write a model to"
        )
    else:
        parser.set_defaults(role=service, export=None)
    parser.add_argument("--config", type=Path, required=True, help="the run's resolved config.json")
    ranked = service == "trainer"
    parser.add_argument(
        "--name",
        required=not ranked,
        help=f"unique in the run, such as {service}-0" + ("; default: ROLE-RANK" if ranked else ""),
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where to register; none: serve alone")
    parser.add_argument("--ready-fd", type=int, help="a pipe that gets a line once the service answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    arguments = parser.parse_args()
    arguments.name = arguments.name or f"{arguments.role}-{trainer_rank()}"
    return arguments


async def _serve(
    service: str, build: Callable[[ServiceContext], Awaitable[Service]], arguments: argparse.Namespace
) -> None:
    """Serves until it is told to stop. If the engine dies, another service takes the place of the one that
    lost it, `rollout.max_restarts` times an hour: a new incarnation, which joins the run as a new process
    would."""
    config, token = read_resolved(arguments.config), access_token()
    started, deaths = False, Deaths()
    for life in count(1):
        context = ServiceContext(
            config,
            arguments.role,
            arguments.name,
            new_incarnation(),
            arguments.host,
            (arguments.export,) if arguments.export else (),
        )
        try:
            built = await build(context)
            started = True
            await _serve_one(service, built, context, arguments, token, first=life == 1)
            return
        except EngineDiedError as death:
            number = deaths.count()
            if number > config.rollout.max_restarts or not started:
                raise
            where = f"engine restart {number} of {config.rollout.max_restarts}"
            _log.warning("%s: %s", where, death, exc_info=death.__cause__)


async def _serve_one(
    service: str,
    built: Service,
    context: ServiceContext,
    arguments: argparse.Namespace,
    token: str,
    *,
    first: bool,
) -> None:
    failed = asyncio.create_task(built.failed())
    lease = None
    if arguments.coordinator is not None:
        lease = _Lease(CoordinatorClient(arguments.coordinator, Caller(token=token), COORDINATOR_TIMEOUT_S))
    with _stop_signal() as asked:
        try:
            server = await Server.start(
                f"atoll.v1.{service.capitalize()}",
                built.add_to,
                host=arguments.host,
                port=arguments.port,
                token=token,
                setting="--port",
                fence=lease.fence if lease else None,
            )
            try:
                if first and arguments.ready_fd is not None:
                    announce(arguments.ready_fd, server.address)
                _log.info("serves %s at %s", context.role, server.address)
                entry = ServiceEntry(context.role, context.name, context.incarnation, server.address)
                if lease:
                    await lease.hold(entry, asked, failed)
                else:
                    await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():  # a signal to the process group ends an engine's processes, too
                    await failed
                _log.info("stops")
            finally:
                await server.stop(STOP_GRACE_S)
        finally:
            failed.cancel()
            if lease:
                await lease.close()
            await built.close()


@contextmanager
def _stop_signal() -> Iterator[asyncio.Future[None]]:
    """Done at SIGTERM or SIGINT, which end the process at once before and afterwards."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    asked = loop.create_future()

    def ask() -> None:
        if not asked.done():
            asked.set_result(None)

    for number in signals:
        loop.add_signal_handler(number, ask)
    try:
        yield asked
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class _Lease:
    """A service's place in its run: it registers, then sends three heartbeats in the time of a lease, and
    learns from the answers whose orders to take."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._registered = asyncio.Event()
        self._entry: ServiceEntry | None = None  # as it was registered first
        self.fence = Fence(self._epoch)

    async def hold(self, entry: ServiceEntry, *ends: asyncio.Future[None]) -> None:
        """Keeps `entry` registered until the first of `ends` is done, however long the coordinator is away;
        then removes it.

        Raises ReplacedError where a newer process took the name, UnauthenticatedError for a wrong token.
        """
        lease = asyncio.create_task(self._renew(entry))
        try:
            await asyncio.wait((lease, *ends), return_when=asyncio.FIRST_COMPLETED)
            if lease.done():
                await lease
            lease.cancel()  # else its next heartbeat, unknown by then, would register again
            await asyncio.wait((lease,))
            with suppress(AtollError):  # a coordinator that is gone needs no goodbye
                await self._client.deregister(entry)
        finally:
            lease.cancel()

    async def close(self) -> None:
        await self._client.close()

    async def _renew(self, entry: ServiceEntry) -> None:
        """Ends where the service is not wanted."""
        registered = away = False
        pause_s = AWAY_PAUSE_S
        while True:
            try:
                if registered:
                    registered, epoch = await self._client.heartbeat(entry)
                if not registered:
                    lease_s, epoch = await self._client.register(entry)
                    pause_s, registered = lease_s / 3, True
                    _log.info("registered at %s as %s", self._client.address, entry.incarnation)
                self._heard(entry, epoch)
                away = False
            except (ReplacedError, UnauthenticatedError):
                raise
            except AtollError as error:  # it is away, or has lost its store, or another one takes over
                if not away:
                    _log.warning("no lease, trying on: %s", error)
                away = True
            await asyncio.sleep(AWAY_PAUSE_S if away else pause_s)

    def _heard(self, entry: ServiceEntry, epoch: int) -> None:
        self._entry = entry
        self.fence.rise(epoch)
        self._registered.set()

    async def _epoch(self) -> int:
        """Waits for the first registration, whose answer a coordinator's first order may overtake."""
        await self._registered.wait()
        assert self._entry is not None
        _, epoch = await self._client.heartbeat(self._entry)
        return epoch
