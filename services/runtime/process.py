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
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Protocol

import grpc.aio

from atoll.config.errors import ConfigError
from atoll.config.load import access_token, bypass_proxies_on_loopback, read_resolved, trainer_rank
from atoll.config.schema import Role, RunConfig
from atoll.runtime.errors import (
    AtollError,
    EngineDiedError,
    MemoryExhaustedError,
    ReplacedError,
    SandboxError,
    UnauthenticatedError,
    UserError,
)
from atoll.runtime.failure_window import FailureWindow
from atoll.runtime.lease import Lease
from atoll.runtime.prometheus import ProcessMetrics
from atoll.runtime.server import Server
from atoll.runtime.telemetry import configure_logging
from atoll.wire.types import ServiceEntry

_log = logging.getLogger(__name__)

STOP_GRACE_S: Final = 5.0  # for calls in progress
# Allocations between garbage collections (`gc.set_threshold`) where cycles are rare and each collection
# would walk all samples in flight, or all open sessions.
GARBAGE: Final = (20_000, 10, 10)
BACKLOG: Final = 4096  # connections of agents that wait while a gateway is started again
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
        section = context.config.coordinator
        lease = Lease(arguments.coordinator, token, section.away_timeout_s, section.drain_grace_s)
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
