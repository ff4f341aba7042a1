"""Service processes of one run on this machine: started, awaited, restarted, taken down."""

import asyncio
import json
import logging
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from services.runtime.errors import AtollError
from services.runtime.tether import tethered

_log = logging.getLogger(__name__)

READY_TIMEOUT_S = 600.0  # a large model loads for minutes
TERMINATE_TIMEOUT_S = 10.0  # between SIGTERM and SIGKILL
LOG_LINES = 20  # quoted when a service dies


class ServiceDiedError(AtollError):
    """A service that the run needs is gone; the message quotes the end of its log."""


@dataclass(frozen=True, slots=True)
class Service:
    """A process to start. It gets `--ready-fd N` and writes {"address": "host:port"} there once it serves."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0


class Fleet:
    """The processes of a run, each in its own process group and with its own log. Leaving ends them all."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[str, Process] = {}

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """SIGTERM to all, a bounded wait, SIGKILL to the rest; cancelling goes straight there."""
        self._signal(signal.SIGTERM)
        everyone = asyncio.gather(*(process.wait() for process in self._processes.values()))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(everyone), TERMINATE_TIMEOUT_S)
        finally:
            self._signal(signal.SIGKILL)
            await everyone

    async def start(self, service: Service) -> str:
        """Returns the service's address once it serves. Raises ServiceDiedError where it does not."""
        ready = await self._spawn(service)
        process, what = self._processes[service.name], "did not start"
        try:
            line = await asyncio.wait_for(ready.readline(), READY_TIMEOUT_S)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            line, what = b"", f"did not start within {READY_TIMEOUT_S:g} s"
        if not line:
            raise ServiceDiedError(self._obituary(service.name, what, await process.wait()))
        return str(json.loads(line)["address"])

    async def keep(self, service: Service) -> None:
        """Runs the service, again after each death as often as it may. Raises ServiceDiedError in the end.

        A service that dies before it served is not started again: it would die of the same cause.
        """
        for life in range(service.max_restarts + 1):
            await self.start(service)
            code = await self._processes[service.name].wait()
            if life < service.max_restarts:
                _log.warning(
                    "%s died (%s); restart %d of %d", service.name, _how(code), life + 1, service.max_restarts
                )
        raise ServiceDiedError(self._obituary(service.name, "died", code))

    async def finished(self, name: str) -> None:
        """Returns when a started service ends of its own accord. Raises ServiceDiedError where it failed."""
        if code := await self._processes[name].wait():
            raise ServiceDiedError(self._obituary(name, "failed", code))

    async def _spawn(self, service: Service) -> asyncio.StreamReader:
        """Starts the process; returns its readiness pipe, which ends when the process does."""
        read_end, write_end = os.pipe()
        ready = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(ready), os.fdopen(read_end, "rb")
        )
        try:
            with (self._logs / f"{service.name}.log").open("ab") as log:
                self._processes[service.name] = await asyncio.create_subprocess_exec(
                    *tethered(*service.command, "--ready-fd", str(write_end)),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    env={**os.environ, **service.environment},
                    pass_fds=(write_end,),
                    start_new_session=True,  # a Ctrl-C in the terminal reaches the launcher alone
                )
        finally:
            os.close(write_end)
        return ready

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.returncode is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.killpg(process.pid, number)

    def _obituary(self, name: str, what: str, code: int) -> str:
        log = self._logs / f"{name}.log"
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join(
            [f"{name} {what} ({_how(code)}); its log {log} ends with:", *(f"  {line}" for line in lines)]
        )


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
