"""Main function of every service process: reads the config, serves, holds a lease at the coordinator."""

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import socket
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
from atoll.config.load import access_token, bypass_proxies_on_loopback, read_resolved, trainer_rank
from atoll.config.schema import Role, RunConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.errors import (
    AtollError,
    EngineDiedError,
    MemoryExhaustedError,
    ReplacedError,
    RunEndedError,
    SandboxError,
    ServiceUnavailableError,
    UnauthenticatedError,
    UserError,
)
from atoll.runtime.failure_window import FailureWindow
from atoll.runtime.prometheus import ProcessMetrics
from atoll.runtime.server import Fence, Server
from atoll.runtime.telemetry import configure_logging
from atoll.wire.types import ServiceEntry

_log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 5.0  # for calls in progress
# Allocations between garbage collections (`gc.set_threshold`) where cycles are rare and each collection
# would walk all samples in flight, or all open sessions.
GARBAGE: Final = (20_000, 10, 10)
BACKLOG: Final = 4096  # connections of agents that wait while a gateway is started again
COORDINATOR_TIMEOUT_S: Final = 3.0
AWAY_PAUSE_S: Final = 1.0  # between attempts to reach an unavailable coordinator
EXIT_RANK_LOST: Final = 3  # of a trainer rank that ends because another rank died
EXIT_RESTARTS_EXHAUSTED: Final = 4  # of a service that has used up its restarts, or that none would help


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """What a service is built from."""

    config: RunConfig
    role: str  # as it is registered: of a trainer, its model's; of others, the service's name
    name: str  # "rollout-0"
    incarnation: str
    host: str  # that it serves on
    exports: tuple[Path, ...] = ()  # folders outside the run's that a trainer may write to
    store: str = ""  # URL, for a gateway
    http_fd: int | None = None  # listening socket that a gateway was given
    agent: str = ""  # that a process of agents runs; "": all of them


class Service(Protocol):
    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers its servicer."""
        ...

    async def wait_for_failure(self) -> None:
        """Waits while the service works; raises a fatal error: EngineDiedError if a rebuilt service can
        continue.
        """
        ...

    async def close(self) -> None:
        """Frees resources; called once, after the last call."""
        ...


def run_service(
    service: str,
    build: Callable[[ServiceContext], Awaitable[Service]],
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Runs `service` ("trainer", "rollout", "reward", "agents", "gateway") until SIGTERM, SIGINT or the end
    of its run.

    Ends the process with exit code 1 if it cannot start, has failed, or the run does not want it. The last
    lines on stderr are then "NAME: ..." for the caller that started it, unless the cause is a bug.
    """
    arguments = parse_arguments(service)
    configure_logging(arguments.name)
    bypass_proxies_on_loopback()
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(_serve(service, build, arguments))
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
        _log.exception("giving up")
        sys.exit(EXIT_RESTARTS_EXHAUSTED)
    except (AtollError, OSError) as error:
        _log.exception("failed")
        sys.exit(f"{arguments.name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # before the service was built; afterwards SIGINT stops it gracefully


def new_incarnation() -> str:
    """A unique id of this start of a service. The registry knows which of two is later."""
    return secrets.token_hex(8)


def announce(ready_fd: int, address: str, metrics: str = "") -> None:
    """Tells the launcher that the service is ready, and where its /metrics is; if the service dies first, the
    pipe just closes."""
    with os.fdopen(ready_fd, "w") as ready:
        ready.write(json.dumps({"address": address, "metrics": metrics}) + "\n")


def parse_arguments(service: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"atoll serve {service}")
    if service == "trainer":
        roles = typing.get_args(Role)
        parser.add_argument("--role", choices=roles, default="actor", help="the model's role in the run")
        parser.add_argument(
            "--export", type=Path, help="folder outside the run's that it may export a model to"
        )
    else:
        parser.set_defaults(role=service, export=None)
    if service == "gateway":
        parser.add_argument("--store", required=True, help="redis://, rediss:// or unix:// URL")
        parser.add_argument("--http-fd", type=int, help="a listening socket; default: one of its own")
    else:
        parser.set_defaults(store="", http_fd=None)
    if service == "agents":
        parser.add_argument("--agent", default="", help="name of the agent that it runs; default: all")
    else:
        parser.set_defaults(agent="")
    if service == "rollout":
        parser.add_argument(
            "--claim-gpus",
            type=Path,
            metavar="DIR",
            help="take free GPUs by locks in a folder of all replicas",
        )
    parser.add_argument("--config", type=Path, required=True, help="path of the run's resolved config.json")
    ranked = service == "trainer"
    default = "ROLE-RANK" if ranked else f"{service}-HOSTNAME"
    parser.add_argument("--name", help=f"name, unique in the run; default: {default}")
    parser.add_argument(
        "--coordinator", metavar="HOST:PORT", help="coordinator to register at; default: run standalone"
    )
    parser.add_argument("--ready-fd", type=int, help="a pipe that receives a line once the service is ready")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="port; 0: any free port")
    arguments = parser.parse_args()
    if arguments.name is None:
        arguments.name = f"{arguments.role}-{trainer_rank() if ranked else socket.gethostname()}"
    return arguments


async def _serve(
    service: str, build: Callable[[ServiceContext], Awaitable[Service]], arguments: argparse.Namespace
) -> None:
    """Serves until told to stop. If the engine dies, the service is rebuilt as a new incarnation, up to
    `rollout.max_restarts` times per hour.
    """
    config, token = read_resolved(arguments.config), access_token()
    metrics = ProcessMetrics()
    metrics.serve(config.prometheus)
    started, failures = False, FailureWindow()
    for life in count(1):
        context = ServiceContext(
            config,
            arguments.role,
            arguments.name,
            new_incarnation(),
            arguments.host,
            (arguments.export,) if arguments.export else (),
            arguments.store,
            arguments.http_fd,
            arguments.agent,
        )
        try:
            built = await build(context)
            started = True
            await _serve_one(service, built, context, arguments, token, metrics, first=life == 1)
            return
        except EngineDiedError as death:
            number = failures.record()
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
    metrics: ProcessMetrics,
    *,
    first: bool,
) -> None:
    failed = asyncio.create_task(built.wait_for_failure())
    lease = None
    if arguments.coordinator is not None:
        client = CoordinatorClient(arguments.coordinator, Caller(token=token), COORDINATOR_TIMEOUT_S)
        section = context.config.coordinator
        lease = _Lease(client, section.away_timeout_s, section.drain_grace_s)
    with stop_signal() as asked:
        try:
            server = await Server.start(
                f"atoll.v1.{service.capitalize()}",
                built.add_to,
                host=arguments.host,
                port=arguments.port,
                token=token,
                setting="--port",
                fence=lease.fence if lease else None,
                calls=metrics.calls,
            )
            try:
                if first and arguments.ready_fd is not None:
                    announce(arguments.ready_fd, server.address, metrics.address)
                _log.info("serves %s at %s", context.role, server.address)
                if metrics.address:
                    _log.info("serves /metrics at %s", metrics.address)
                entry = ServiceEntry(context.role, context.name, context.incarnation, server.address)
                if lease:
                    await lease.hold(entry, asked, failed)
                else:
                    await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
                if (
                    failed.done() and not asked.done()
                ):  # a signal to the group ends an engine's processes, too
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
def stop_signal() -> Iterator[asyncio.Future[None]]:
    """Completes at the first SIGTERM or SIGINT; before and afterwards, and for a second time, these end the
    process at once."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    asked = loop.create_future()

    def ask() -> None:
        asked.set_result(None)
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, ask)
    try:
        yield asked
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class _Lease:
    """A service's place in its run: it registers, then sends three heartbeats per lease; the replies say
    which coordinator's epoch is valid, and whether an operator wants the service to leave.
    """

    def __init__(self, client: CoordinatorClient, away_timeout_s: float, drain_grace_s: float) -> None:
        self._client = client
        self._away_timeout_s = away_timeout_s
        self._drain_grace_s = drain_grace_s
        self._told_to_leave: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_away = False  # the coordinator did not answer last
        self._registered = asyncio.Event()
        self._entry: ServiceEntry | None = None  # as it was registered first
        self.fence = Fence(self._epoch)

    async def hold(
        self, entry: ServiceEntry, asked: asyncio.Future[None], failed: asyncio.Future[None]
    ) -> None:
        """Keeps `entry` registered until it is `asked` or told to leave, has `failed` or the run has ended,
        even if the coordinator is unavailable for a while. A service that leaves finishes its work first;
        then deregisters.

        Raises ReplacedError if a newer process took the name, UnauthenticatedError for a wrong token,
        ServiceUnavailableError if the coordinator stays away.
        """
        lease = asyncio.create_task(self._renew(entry))
        try:
            ends = (lease, failed, asked, self._told_to_leave)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not (lease.done() or failed.done()):
                await self._drain(entry, lease, failed)
            if lease.done():
                await lease
            lease.cancel()  # otherwise its next heartbeat would register again
            await asyncio.wait((lease,))
            if not self._is_away:
                with suppress(AtollError):  # ignore a coordinator that is gone
                    await self._client.deregister(entry)
        finally:
            lease.cancel()

    async def _drain(self, entry: ServiceEntry, *ends: asyncio.Future[None]) -> None:
        """Gets no new work, and waits until none is in progress here: at most `coordinator.drain_grace_s`,
        not at all if the coordinator is away, and until the first of `ends` is done."""
        if self._is_away or not self._client.is_connected:  # a call would be retried for most of a second
            self._is_away = True
            return
        _log.info("drains: gets no new work, and leaves once its work in progress is finished")
        grace_s = self._drain_grace_s
        drained = asyncio.create_task(self._client.drain(entry, grace_s + COORDINATOR_TIMEOUT_S))
        try:
            await asyncio.wait((drained, *ends), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if drained.done():
                await drained
            elif not any(end.done() for end in ends):
                _log.warning(
                    "leaves after %g s (coordinator.drain_grace_s); others repeat its work in progress",
                    grace_s,
                )
        except AtollError as error:
            self._is_away = isinstance(error, ServiceUnavailableError)
            _log.info("stops at once: %s", error)
        finally:
            drained.cancel()

    async def close(self) -> None:
        await self._client.close()

    async def _renew(self, entry: ServiceEntry) -> None:
        """Returns when the run has ended."""
        clock = asyncio.get_running_loop().time
        registered, away_since = False, None
        pause_s = AWAY_PAUSE_S
        while True:
            try:
                if registered:
                    renewal = await self._client.heartbeat(entry)
                    registered, epoch = renewal.known, renewal.epoch
                    if renewal.drain and not self._told_to_leave.done():
                        _log.info("an operator wants this service to leave")
                        self._told_to_leave.set_result(None)
                if not registered:
                    lease_s, epoch = await self._client.register(entry)
                    pause_s, registered = lease_s / 3, True
                    _log.info("registered at %s as %s", self._client.address, entry.incarnation)
                self._heard(entry, epoch)
                away_since, self._is_away = None, False
            except RunEndedError:
                _log.info("the run has ended")
                return
            except (ReplacedError, UnauthenticatedError):
                raise
            except AtollError as error:  # it is away, or has lost its store, or another one takes over
                self._is_away = isinstance(error, ServiceUnavailableError)
                if away_since is None:
                    away_since = clock()
                    _log.warning("could not renew the lease, retrying: %s", error)
                if clock() >= away_since + self._away_timeout_s:
                    raise ServiceUnavailableError(
                        f"no answer from the coordinator at {self._client.address} for "
                        f"{self._away_timeout_s:g} s (coordinator.away_timeout_s): {error}"
                    ) from None
            await asyncio.sleep(pause_s if away_since is None else AWAY_PAUSE_S)

    def _heard(self, entry: ServiceEntry, epoch: int) -> None:
        self._entry = entry
        self.fence.rise(epoch)
        self._registered.set()

    async def _epoch(self) -> int:
        """Waits for the first registration, whose answer a coordinator's first order may overtake."""
        await self._registered.wait()
        assert self._entry is not None
        return (await self._client.heartbeat(self._entry)).epoch
