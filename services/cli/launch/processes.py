"""Starts, watches, restarts and stops the service processes of a run on this machine."""

import asyncio
import json
import logging
import os
import signal
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from types import MappingProxyType, TracebackType
from typing import Self

from atoll.runtime.errors import AtollError
from atoll.runtime.failure_window import FailureWindow
from atoll.runtime.parent_death import with_parent_death
from atoll.runtime.ports import reserve_port
from atoll.runtime.process import EXIT_RANK_LOST, EXIT_RESTARTS_EXHAUSTED

_log = logging.getLogger(__name__)

RESTART_PAUSE_S = 1.0  # before the next try if a restart failed; doubles each time
TERMINATE_TIMEOUT_S = 10.0  # between SIGTERM and SIGKILL
CAUSE_TIMEOUT_S = 10.0  # for the exit of the rank that caused another rank to exit: a driver may delay it
LOG_LINES = 20  # quoted if a service dies
LOOPBACK = "127.0.0.1"


class ServiceDiedError(AtollError):
    """A required service has died; the message has the sentence that it ended with, or the end of its log."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.has_given_up = code == EXIT_RESTARTS_EXHAUSTED
        self.has_drained = code == 0


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """A process to start. It gets `--ready-fd N` and writes {"address": "host:port"} there once it serves.

    `listener` is a listening socket that it serves HTTP on, as `--http-fd N`. The caller keeps it open, so
    that clients who connect while the process is down are answered by its successor.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    listener: socket | None = None


@dataclass(frozen=True, slots=True)
class ServiceGroup:
    """Processes that start and end together, such as the ranks of a trainer; most services have one.

    Each gets MASTER_ADDR and MASTER_PORT for torch.distributed; the port changes at every start.
    """

    services: tuple[ServiceCommand, ...]
    max_restarts: int = 0  # in an hour
    if_lost: str = ""  # of one that the run can do without: what its user is told once it is lost for good
    after: tuple[str, ...] = ()  # services that must have served once before these start
    elsewhere: str = ""  # of one whose GPUs are on other hosts: how its user starts it there

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(service.name for service in self.services)


class ScrapeTargets:
    """Where the processes of a run serve /metrics: a file in Prometheus' file_sd format, for as long as the
    context lasts. Prometheus follows its changes.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path = path
        self._run = run
        self._addresses: dict[str, str] = {}

    def put(self, service: str, address: str) -> None:
        """Replaces the address of the service's last life."""
        self._addresses[service] = address
        self._write()

    def drop(self, service: str) -> None:
        """One that has left for good."""
        if self._addresses.pop(service, None):
            self._write()

    def _write(self) -> None:
        targets = [
            {"targets": [address], "labels": {"run": self._run, "service": name}}
            for name, address in self._addresses.items()
        ]
        new = self._path.with_name(f".{self._path.name}.new")
        new.write_text(json.dumps(targets, indent=2) + "\n")
        new.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._path.unlink(missing_ok=True)


class Fleet:
    """The processes of a run, each with its own process group and log. Leaving the context stops them all."""

    def __init__(
        self,
        logs: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        *,
        start_timeout_s: float | None = None,
        targets: ScrapeTargets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment`: for every process, over this one's and under a service's own. `start_timeout_s`:
        until a process serves; None: no limit. `targets`: gets the address of each /metrics."""
        self._logs = logs
        self._environment = environment
        self._start_timeout_s = start_timeout_s
        self._targets = targets
        self._clock = clock
        self._served: dict[str, asyncio.Event] = {}  # whether a service has served once
        self._processes: dict[str, Process] = {}
        self._log_starts: dict[
            str, int
        ] = {}  # of each process in its log, which earlier ones have written to

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop(*self._processes)

    async def start(self, group: ServiceGroup) -> str:
        """Returns the address of the group's first process once all serve. Raises ServiceDiedError if one
        does not.
        """
        with reserve_port() as port:
            meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
            pipes = [await self._spawn(service, meeting) for service in group.services]
            lines = [asyncio.create_task(pipe.readline()) for pipe in pipes]
            try:
                for line in asyncio.as_completed(lines, timeout=self._start_timeout_s):
                    if not await line:
                        name, code = await self._first_death(group)
                        raise self._death(name, "did not start", code)
            except TimeoutError:
                name = next(name for name, line in zip(group.names, lines, strict=True) if not line.done())
                os.killpg(self._processes[name].pid, signal.SIGKILL)
                code = await self._processes[name].wait()
                what = f"did not start within {self._start_timeout_s:g} s (coordinator.start_timeout_s)"
                raise self._death(name, what, code) from None
            finally:
                for task in lines:
                    task.cancel()
        answers = [json.loads(line.result()) for line in lines]
        for name, answer in zip(group.names, answers, strict=True):
            self._first_serving(name).set()
            if self._targets and (metrics := answer.get("metrics")):
                self._targets.put(name, metrics)
        return str(answers[0]["address"])

    async def keep(
        self, group: ServiceGroup, is_wanted: Callable[[str], Awaitable[bool]] | None = None
    ) -> None:
        """Runs the group once those that it comes `after` have served, and restarts it after each death
        within its limit; one death ends all its processes. A group that leaves in order (exit code 0) has
        not failed: if `is_wanted` says so of its first name, it starts again, else this returns.

        Raises ServiceDiedError in the end, or waits until it is cancelled if the run can do without the
        group. A group that has never served is not restarted, since it would fail again; nor is a process
        that has given up.
        """
        for name in group.after:
            await self._first_serving(name).wait()
        failures, has_served = FailureWindow(self._clock), False
        while True:
            serves = False
            try:
                await self.start(group)
                has_served = serves = True
                await self.watch(group)
            except ServiceDiedError as death:
                if serves and death.has_drained and is_wanted is not None:
                    if not await is_wanted(group.names[0]):
                        _log.info("%s has left", ", ".join(group.names))
                        return
                    _log.info("%s has left in order and starts again", ", ".join(group.names))
                    await self._stop(*group.names)
                    continue
                number = failures.record()
                if not has_served or death.has_given_up or number > group.max_restarts:
                    if not group.if_lost:
                        raise
                    _log.warning("%s\n%s", death, group.if_lost)
                    await asyncio.Event().wait()
                who = ", ".join(group.names)
                _log.warning("restart %d of %d of %s: %s", number, group.max_restarts, who, death)
            await self._stop(*group.names)
            if not serves:
                await asyncio.sleep(RESTART_PAUSE_S * 2 ** (number - 1))

    async def watch(self, group: ServiceGroup) -> None:
        """Waits while all processes of a started group live. Raises ServiceDiedError."""
        name, code = await self._first_death(group)
        raise self._death(name, "died", code)

    async def wait_for_exit(self, name: str) -> None:
        """Returns when a started service exits by itself. Raises ServiceDiedError if it failed."""
        if code := await self._processes[name].wait():
            raise self._death(name, "failed", code)

    async def drain(self, *names: str, grace_s: float) -> None:
        """Has services that are not kept any more finish their work and leave, for good."""
        await self._stop(*names, timeout_s=grace_s + TERMINATE_TIMEOUT_S)
        for name in names:
            if self._targets:
                self._targets.drop(name)

    async def kill(self, name: str) -> None:
        """Ends a service at once, if it has not ended."""
        _signal([self._processes[name]], signal.SIGKILL)
        await self._processes[name].wait()

    def _first_serving(self, name: str) -> asyncio.Event:
        return self._served.setdefault(name, asyncio.Event())

    async def _first_death(self, group: ServiceGroup) -> tuple[str, int]:
        """Waits for a process of the group to end; returns the name and exit code of the one that caused it.

        A rank that exits because it lost another one may be noticed first.
        """

        async def end(name: str) -> tuple[str, int]:
            return name, await self._processes[name].wait()

        ends = [asyncio.create_task(end(name)) for name in group.names]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            with suppress(TimeoutError):
                for death in asyncio.as_completed(ends, timeout=CAUSE_TIMEOUT_S):
                    name, code = await death
                    if code != EXIT_RANK_LOST:
                        return name, code
            return done.pop().result()
        finally:
            for task in ends:
                task.cancel()

    async def _spawn(self, service: ServiceCommand, meeting: Mapping[str, str]) -> asyncio.StreamReader:
        """Starts the process; returns its readiness pipe, which closes when the process ends."""
        read_end, write_end = os.pipe()
        ready = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(ready), os.fdopen(read_end, "rb")
        )
        fds = {"--ready-fd": write_end}
        if service.listener:
            fds["--http-fd"] = service.listener.fileno()
        arguments = [word for option, fd in fds.items() for word in (option, str(fd))]
        try:
            with (self._logs / f"{service.name}.log").open("ab") as log:
                self._log_starts[service.name] = log.tell()
                self._processes[service.name] = await asyncio.create_subprocess_exec(
                    *with_parent_death(*service.command, *arguments),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    env={**os.environ, **self._environment, **meeting, **service.environment},
                    pass_fds=tuple(fds.values()),
                    start_new_session=True,  # Ctrl-C in the terminal reaches only the launcher
                )
        finally:
            os.close(write_end)
        return ready

    async def _stop(self, *names: str, timeout_s: float | None = None) -> None:
        """SIGTERM, a bounded wait, then SIGKILL; cancelling skips to SIGKILL."""
        timeout_s = TERMINATE_TIMEOUT_S if timeout_s is None else timeout_s
        processes = [self._processes[name] for name in names if name in self._processes]
        _signal(processes, signal.SIGTERM)
        everyone = asyncio.gather(*(process.wait() for process in processes))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(everyone), timeout_s)
        finally:
            _signal(processes, signal.SIGKILL)
            await everyone

    def _death(self, name: str, what: str, code: int) -> ServiceDiedError:
        log = self._logs / f"{name}.log"
        written = log.read_bytes()[self._log_starts[name] :].decode(errors="replace")
        end = f"{name} {what} ({_describe_exit(code)})"
        _, ended_by_sentence, sentence = f"\n{written}".rpartition(f"\n{name}: ")  # sys.exit's, which is last
        if ended_by_sentence:
            return ServiceDiedError(f"{end}: {sentence.strip()}\n  its log: {log}", code)
        lines = [f"  {line}" for line in written.splitlines()[-LOG_LINES:]]
        return ServiceDiedError("\n".join([f"{end}; its log {log} ends with:", *lines]), code)


def _signal(processes: Iterable[Process], number: signal.Signals) -> None:
    for process in processes:
        if process.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(process.pid, number)


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
