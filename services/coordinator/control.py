"""Run state and operator requests: connects the loop and the coordinator service."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from atoll.coordinator.fleet.departures import Departures
from atoll.coordinator.fleet.scaling import Scaling
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.wire.types import ServiceEntry

T = TypeVar("T")


class RunState(Enum):
    STARTING = "starting"
    WARMING_UP = "warming up"
    TRAINING = "training"
    VALIDATING = "validating"
    PAUSED = "paused"
    RECOVERING = "recovering"  # a trainer died: waiting for it to return, then restoring the last checkpoint
    SAVING = "writing the last checkpoint"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunProgress:
    state: RunState = RunState.STARTING
    step: int = 0
    num_steps: int = 0
    version: int = 0
    error: str = ""
    note: str = ""  # advice on the step, shown if there is no error
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last finished step
    revision: int = 1


class TrainerLeavesError(ServiceUnavailableError):
    """A trainer leaves; all that it has learned is in the last checkpoint."""


# States in which a trainer holds steps that no checkpoint covers, and the loop can save them.
_AT_WORK = (RunState.TRAINING, RunState.VALIDATING, RunState.PAUSED, RunState.SAVING)


class RunControl:
    def __init__(
        self, *, trains: bool, scaling: Scaling | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.progress = RunProgress()
        self.departures = Departures()
        self.scaling = scaling or Scaling()
        self._trains = trains
        self._clock, self._started = clock, clock()
        self._earlier_s: float | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._leaving: set[str] = set()  # names of trainers
        self._leave = asyncio.Event()  # there is one
        self._paused = False
        self._changed = asyncio.Condition()
        self._checkpoints: list[asyncio.Future[str]] = []  # asked for
        self._begun: list[asyncio.Future[str]] = []  # requested before the checkpoint in progress began

    @property
    def seconds(self) -> float:
        """That the run has taken, over all its starts, from each start of the coordinator."""
        return self._clock() - self._started + (self._earlier_s or 0.0)

    def continue_from(self, seconds: float) -> None:
        """Earlier starts took `seconds`. Only the first call counts: a loop that begins again after the loss
        of a trainer has lost no time that this start did not take."""
        if self._earlier_s is None:
            self._earlier_s = seconds

    async def report(self, **changes: object) -> None:
        """Called by the loop to report its state; wakes followers."""
        self.progress = replace(self.progress, **changes, revision=self.progress.revision + 1)  # type: ignore[arg-type]
        await self._wake()

    async def note(self, note: str) -> None:
        """Shows what the run waits for, or advice, until the next step's; "": nothing."""
        await self.report(note=note)

    async def changes(self) -> AsyncIterator[RunProgress]:
        """Yields the progress now and after each change, without end."""
        while True:
            progress = self.progress
            yield progress
            async with self._changed:
                while self.progress is progress:
                    await self._changed.wait()

    async def follow(self, seen: int, timeout_s: float) -> RunProgress:
        """Returns the progress once its revision differs from `seen`, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):  # nothing new: the caller repeats its call
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.progress.revision != seen)
        return self.progress

    async def tell_to_leave(self, name: str, services: Collection[ServiceEntry]) -> tuple[ServiceEntry, str]:
        """As `Departures.tell`."""
        told = self.departures.tell(name, services)
        await self.report()
        return told

    async def scale(self, role: str, number: int) -> None:
        """As `Scaling.change`. Replicas that operators have drained may come back."""
        self.scaling.change(role, number)
        self.departures.take_back([f"{role}-{index}" for index in range(number)])
        await self.report()

    async def pause(self, reason: str = "") -> None:
        """Between two steps. `reason` is shown until the run resumes."""
        self._paused = True
        await self.report(error=reason)

    async def resume(self) -> None:
        self._paused = False
        await self._wake()

    async def stop(self, *, hurry: bool = False) -> None:
        """After the step in progress. `hurry`: without anything that its checkpoint does not need: pushes and
        validations, which services may not answer any more."""
        self._stop.set()
        if hurry:
            self._hurry.set()
        await self._wake()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def hand_over(self, trainer: str) -> None:
        """Has the loop save for a trainer that leaves, after the step in progress. Returns once it has, or if
        there is nothing to save: the run waits for its trainers, or has ended."""
        if self.progress.state not in _AT_WORK:
            return
        self._leaving.add(trainer)
        self._leave.set()
        await self._wake()
        async with self._changed:
            await self._changed.wait_for(
                lambda: trainer not in self._leaving or self.progress.state not in _AT_WORK
            )

    @property
    def leaving(self) -> str:
        """The names of the trainers that leave; "": none."""
        return ", ".join(sorted(self._leaving))

    async def let_go(self) -> None:
        """Trainers that leave may do so now."""
        self._leaving.clear()
        self._leave.clear()
        await self._wake()

    @property
    def hurries(self) -> bool:
        return self._hurry.is_set()

    async def run_unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The work's result; None if the run is stopped, or a trainer leaves, before the work is done."""
        return await _run_unless(work, self._stop, self._leave)

    async def run_unless_hurried(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The work's result; None if the run is to stop in a hurry before the work is done."""
        return await _run_unless(work, self._hurry)

    async def run_unless_left(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The work's result; None if a trainer leaves before the work is done."""
        return await _run_unless(work, self._leave)

    async def gate(self, save: Callable[[], Awaitable[None]]) -> None:
        """The loop waits here between two steps while the run is paused; `save` serves checkpoint requests
        during that time, and trainers that leave, also if it is not.
        """
        if self._leaving:
            await save()
        if not self._paused or self.stopping:
            return
        before = self.progress.state
        await self.report(state=RunState.PAUSED)
        while self._paused and not self.stopping:
            if self.checkpoint_requested:
                await save()
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self._paused or self.stopping or self.checkpoint_requested
                )
        await self.report(state=before, error="")

    async def request_checkpoint(self) -> str:
        """Returns the path once the loop has saved, after the step in progress. Raises UserError if the run
        trains nothing, or if a guard has paused it.
        """
        if not self._trains:
            raise UserError(
                'Checkpoint: a run of mode "rollout_only" has no trainer to save; '
                'coordinator.dump = "all" keeps what it generates'
            )
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checkpoints.append(future)
        await self._wake()
        return await future

    @property
    def checkpoint_requested(self) -> bool:
        return bool(self._checkpoints or self._leaving)

    def begin_checkpoint(self) -> None:
        """Requests made so far are served by the checkpoint that begins now."""
        self._begun, self._checkpoints = self._begun + self._checkpoints, []

    def finish_checkpoint(self, path: str) -> None:
        for future in self._begun:
            if not future.done():
                future.set_result(path)
        self._begun = []

    def refuse_checkpoint(self, reason: str) -> None:
        """Rejects the requests made so far."""
        for future in self._checkpoints:
            if not future.done():
                future.set_exception(UserError(reason))
        self._checkpoints = []

    def requeue_checkpoint(self) -> None:
        """Requests that waited for it are served by the next one."""
        self._checkpoints, self._begun = self._begun + self._checkpoints, []

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _run_unless(work: Coroutine[Any, Any, T], *events: asyncio.Event) -> T | None:
    if any(event.is_set() for event in events):
        work.close()
        return None
    working = asyncio.create_task(work)
    tasks = [working, *(asyncio.create_task(event.wait()) for event in events)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in tasks:
            task.cancel()
