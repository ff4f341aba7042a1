"""What the world sees of the run, and what it asks of it: the meeting point of the loop and the service."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from atoll.runtime.errors import UserError

T = TypeVar("T")


class State(Enum):
    STARTING = "starting"
    WARMING_UP = "warming up"
    TRAINING = "training"
    VALIDATING = "validating"
    PAUSED = "paused"
    RECOVERING = "recovering"  # a trainer died: waits for its next life, then restores the last checkpoint
    SAVING = "writing its last checkpoint"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Progress:
    state: State = State.STARTING
    step: int = 0
    num_steps: int = 0
    version: int = 0
    error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last finished step
    revision: int = 1


class Control:
    def __init__(self, *, trains: bool) -> None:
        self.progress = Progress()
        self._trains = trains
        self._stop = asyncio.Event()
        self._paused = False
        self._changed = asyncio.Condition()
        self._checkpoints: list[asyncio.Future[str]] = []  # asked for
        self._begun: list[asyncio.Future[str]] = []  # asked for before the one that is being written began

    async def report(self, **changes: object) -> None:
        """The loop says where it is; whoever follows wakes up."""
        self.progress = replace(self.progress, **changes, revision=self.progress.revision + 1)  # type: ignore[arg-type]
        await self._wake()

    async def follow(self, seen: int, timeout_s: float) -> Progress:
        """The progress once its revision is not `seen` any more, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):  # nothing new: the caller asks again
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self.progress.revision != seen)
        return self.progress

    async def pause(self, reason: str = "") -> None:
        """Between two steps. `reason` is shown until the run goes on."""
        self._paused = True
        await self.report(error=reason)

    async def resume(self) -> None:
        self._paused = False
        await self._wake()

    async def stop(self) -> None:
        self._stop.set()
        await self._wake()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def unless_stopped(self, work: Coroutine[None, None, T]) -> T | None:
        """The work's result; None if the run is to stop before the work is done."""
        tasks = asyncio.create_task(work), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].result() if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()

    async def gate(self, save: Callable[[], Awaitable[None]]) -> None:
        """Where the loop waits between two steps while the run is paused; `save` answers those who ask for
        a checkpoint in the meantime."""
        if not self._paused or self.stopping:
            return
        before = self.progress.state
        await self.report(state=State.PAUSED)
        while self._paused and not self.stopping:
            if self._checkpoints:
                await save()
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not self._paused or self.stopping or self.checkpoint_requested
                )
        await self.report(state=before, error="")

    async def request_checkpoint(self) -> str:
        """Returns the path once the loop has saved, after the step in progress. Raises UserError for a
        run that trains nothing, and for one that a guard has paused."""
        if not self._trains:
            raise UserError(
                'Checkpoint: a run of mode "rollout_only" has no trainer to save; '
                "coordinator.dump = true keeps what it generates"
            )
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checkpoints.append(future)
        await self._wake()
        return await future

    @property
    def checkpoint_requested(self) -> bool:
        return bool(self._checkpoints)

    def checkpoint_begun(self) -> None:
        """Those who have asked until now get the one that is begun."""
        self._begun, self._checkpoints = self._begun + self._checkpoints, []

    def checkpoint_saved(self, path: str) -> None:
        for future in self._begun:
            if not future.done():
                future.set_result(path)
        self._begun = []

    def refuse_checkpoint(self, reason: str) -> None:
        """Those who have asked until now get none."""
        for future in self._checkpoints:
            if not future.done():
                future.set_exception(UserError(reason))
        self._checkpoints = []

    def checkpoint_abandoned(self) -> None:
        """Those who waited for it get the next one."""
        self._checkpoints, self._begun = self._begun + self._checkpoints, []

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
