"""Runs graders that may hang or crash in worker processes that can be killed.

Both ends of a worker's socket are in this file. A frame is a 4-byte little-endian length followed by that
many bytes: a serialized ScoreItem to the worker, a serialized Verdict back. The worker's first frame is the
reason why its grader could not be loaded, or empty.

Workers are forked from a server that has already imported their modules (fork_server.py), so a new one starts
within milliseconds and inherits none of gRPC's threads.

Why not a pool library: pebble's pool breaks permanently once an idle worker is killed, stops workers with
SIGTERM, which these ignore, and loses the cause if a grader cannot be loaded.
"""

import asyncio
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Self

from atoll.config import functions
from atoll.config.errors import ConfigError
from atoll.config.schema import GraderConfig
from atoll.config.user_files import source_of
from atoll.reward.score import (
    BUDGETED,
    GRADERS,
    QUICK,
    Failure,
    Grader,
    Outcome,
    combine,
    error_place,
    judge,
    judge_quickly,
)
from atoll.runtime.errors import UserError
from atoll.runtime.parent_death import die_with_parent
from atoll.wire.codec.rewards import encode_score_item, encode_verdict, parse_score_item, parse_verdict
from atoll.wire.types import Grade, Graded, ScoreItem

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0  # for importing the user's file
STOP_TIMEOUT_S = 5.0
NICENESS = 5  # of workers, so that the service stays responsive
BUDGET_S = 2.0  # of CPU time for one response of a BUDGETED grader
STEP_ASIDE_S = 0.5  # after which such a response frees its place for the next one
MAX_ASIDE = 4  # of these at once

_CONTEXT = multiprocessing.get_context("forkserver")


def start_fork_server(modules: Sequence[str]) -> None:
    """It imports `modules` in the background and ends with the calling thread. Further calls do nothing."""
    _CONTEXT.set_forkserver_preload(["atoll.reward.fork_server", __name__, *modules])
    multiprocessing.forkserver.ensure_running()


class IsolatedGrader:
    """One grader in up to `concurrency` workers, each of which grades one response at a time.

    Workers start on demand. One that hangs, crashes, or whose call is cancelled is killed; the next response
    gets a new one. BUDGETED graders may have MAX_ASIDE workers more, so that what is expensive to grade does
    not hold up other responses.
    """

    def __init__(self, config: GraderConfig) -> None:
        """Reads the user's file once, so that later changes do not affect this grader. Raises UserError
        if it cannot be read."""
        self._config = config
        try:
            self._source = source_of(config.name) if config.is_users_own else None
        except ConfigError as error:
            raise UserError(str(error)) from error
        quick, over_budget = QUICK.get(config.name), BUDGETED.get(config.name)
        self._quick = partial(quick, **config.parameters) if quick else None
        self._over_budget = partial(over_budget, **config.parameters) if over_budget else None
        self._free = asyncio.Semaphore(config.concurrency or 1)
        self._aside = asyncio.Semaphore(MAX_ASIDE)
        self._idle: list[_GraderProcess] = []

    async def load(self) -> None:
        """Starts a worker. Raises UserError if the grader cannot be loaded."""
        self._idle.append(await self._start())

    async def grade(self, item: ScoreItem) -> Outcome:
        if self._quick is not None and (outcome := judge_quickly(self._quick, item)) is not None:
            return outcome
        async with AsyncExitStack() as place:
            await place.enter_async_context(self._free)
            try:
                worker = await self._worker()
            except UserError as error:
                return Failure(str(error), retryable=True)
            asking = asyncio.create_task(self._ask(worker, item))
            try:
                await asyncio.wait({asking}, timeout=STEP_ASIDE_S if self._over_budget else None)
                if asking.done() or self._aside.locked():
                    return await asking
                async with self._aside:
                    await place.aclose()
                    return await asking
            finally:
                asking.cancel()

    async def _ask(self, worker: "_GraderProcess", item: ScoreItem) -> Outcome:
        try:
            async with asyncio.timeout(self._config.deadline_s):
                outcome = await worker.ask(item)
            self._idle.append(worker)
            return outcome
        except TimeoutError:
            # it would most likely hang again, unless it has a budget: then the machine is slow
            cause = f"no grade within {self._config.deadline_s:g} s (deadline_s)"
            return Failure(cause, retryable=self._over_budget is not None, timed_out=True)
        except (EOFError, ConnectionError):
            ending = await worker.ending()
            if self._over_budget is not None and worker.is_over_budget:
                return self._over_budget(item)
            return Failure(f"its process died ({ending}); see the log", retryable=True)
        finally:
            if worker not in self._idle:
                worker.kill()

    async def close(self) -> None:
        """Call once nothing is being graded."""
        for worker in self._idle:
            worker.kill()
            await worker.ending()
        self._idle.clear()

    async def _worker(self) -> "_GraderProcess":
        while self._idle:
            if not (worker := self._idle.pop()).has_ended:
                return worker
            worker.kill()
        return await self._start()

    async def _start(self) -> "_GraderProcess":
        budget_s = BUDGET_S if self._over_budget else None
        return await _GraderProcess.start(self._config, self._source, budget_s)


class _GraderProcess:
    """A process and the service's end of its socket."""

    def __init__(
        self,
        process: multiprocessing.context.ForkServerProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, config: GraderConfig, source: bytes | None, budget_s: float | None) -> Self:
        """Raises UserError if the grader cannot be loaded there."""
        ours, theirs = socket.socketpair()
        process = _CONTEXT.Process(target=_serve, args=(theirs, config, source, budget_s), daemon=True)

        def fork() -> None:
            with theirs:  # else the socket would stay open after the process has ended
                process.start()

        forking = asyncio.create_task(asyncio.to_thread(fork))
        try:
            await asyncio.shield(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(lambda _: process.kill())
            ours.close()
            raise
        worker = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                problem = (await worker._receive()).decode()
        except TimeoutError:
            problem = f"reward.graders: {config.name} did not load within {LOAD_TIMEOUT_S:g} s"
        except (EOFError, ConnectionError):
            ending = await worker.ending()
            problem = f"reward.graders: the process died while loading {config.name} ({ending}); see the log"
        except asyncio.CancelledError:
            worker.kill()
            raise
        if problem:
            worker.kill()
            raise UserError(problem)
        return worker

    @property
    def has_ended(self) -> bool:
        return self._reader.at_eof()

    @property
    def is_over_budget(self) -> bool:
        """Whether it has ended because a response took more than the budget."""
        return bool(self._process.exitcode == -signal.SIGPROF)

    async def ask(self, item: ScoreItem) -> Outcome:
        """Raises EOFError or ConnectionError if the process ends."""
        frame = encode_score_item(item).SerializeToString()
        self._writer.write(len(frame).to_bytes(4, "little") + frame)
        await self._writer.drain()
        verdict = parse_verdict(await self._receive(), item.id)
        if not isinstance(verdict, Graded):
            return Failure(verdict.cause, verdict.retryable)
        return Grade(verdict.value, "".join(verdict.reasons.values()))

    def kill(self) -> None:
        self._process.kill()
        self._writer.close()

    async def ending(self) -> str:
        """Waits for the process to end; returns how it did."""
        await asyncio.to_thread(self._process.join, STOP_TIMEOUT_S)
        code = self._process.exitcode
        if code is None:
            return "still running"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _receive(self) -> bytes:
        size = int.from_bytes(await self._reader.readexactly(4), "little")
        return await self._reader.readexactly(size)


def _serve(
    connection: socket.socket, config: GraderConfig, source: bytes | None, budget_s: float | None
) -> None:
    """Worker process: grades responses until the service closes the socket or dies, or until one takes more
    than `budget_s` of CPU time: then the kernel ends it by SIGPROF, whatever it is in the middle of."""
    die_with_parent()
    os.nice(NICENESS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the service finishes its calls, then ends this process

    def send(frame: bytes) -> None:
        connection.sendall(len(frame).to_bytes(4, "little") + frame)

    try:
        grade = functions.load(config, GRADERS, source)
    except ConfigError as error:
        send(str(error).encode())
        return
    send(b"")
    file = config.name.rpartition(":")[0] if config.is_users_own else ""
    grade = with_logged_errors(grade, config.name, file) if file else grade
    with connection.makefile("rb") as requests:
        while header := requests.read(4):
            item = parse_score_item(requests.read(int.from_bytes(header, "little")))
            signal.setitimer(signal.ITIMER_PROF, budget_s or 0)
            outcome = judge(grade, item, file)
            signal.setitimer(signal.ITIMER_PROF, 0)
            verdict = combine(item.id, {config.name: 1.0}, {config.name: outcome})
            send(encode_verdict(verdict).SerializeToString())


def with_logged_errors(grade: Grader, name: str, file: str) -> Grader:
    """Logs the traceback of the first error of each line of `file`."""
    places: set[str] = set()

    def logged(item: ScoreItem) -> float | Grade:
        try:
            return grade(item)
        except (Exception, SystemExit) as error:
            if (place := error_place(error, file)) not in places:
                places.add(place)
                log.error(
                    "%s raised an error on %s; further errors at this line are not logged",
                    name,
                    item.id,
                    exc_info=True,
                )
            raise

    return logged
