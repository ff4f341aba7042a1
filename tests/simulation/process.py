"""A process that can be killed between any two of its steps, on a clock of its own, with a real store.

Its time stands still while an answer of the store is awaited. Once it is killed, none of its tasks runs any
more, not even to clean up: what it leaves is the store and its files.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar

import redis

from atoll.coordinator.journal import scripts
from atoll.runtime.store import Script
from tests.virtual_clock import VirtualClock

SCRIPTS = {name: script for name, script in vars(scripts).items() if isinstance(script, Script)}
MAX_TICKS = 20_000  # of one life; most take a thousand
NAMES = {script.sha: name for name, script in SCRIPTS.items()}


class Killed(BaseException):
    """Out of the event loop, past all tasks."""


class Numbered:
    """Its place in a set is not by its address, so what the order of a set decides is the same each time."""

    numbers: ClassVar[Iterator[int]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = next(Numbered.numbers)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._number


class NumberedTask(Numbered, asyncio.Task[Any]): ...


class NumberedTimeout(Numbered, asyncio.Timeout): ...  # type: ignore[misc]


class Process(VirtualClock):
    """The event loop of one coordinator's life."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        Numbered.numbers = itertools.count()
        self.dice = dice
        self.dead = False
        self.ticks = 0
        self._tasks: list[asyncio.Task[Any]] = []  # held: a coroutine that is collected would clean up
        self._ticks_left: int | None = None
        self._fatal_write: tuple[str, int, bool] | None = None
        self.at_each_tick(self._count_tick)
        self.set_task_factory(self._hold)

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """What `main` returns. Raises Killed."""
        asyncio.set_event_loop(self)
        try:
            return self.run_until_complete(main)
        finally:
            asyncio.set_event_loop(None)

    def kill_in(self, ticks: int) -> None:
        """After that many turns of the event loop."""
        self._ticks_left = ticks

    def kill_at_write(self, script: str, nth: int, *, after: bool) -> None:
        """When the journal runs the script for the nth time: before it reaches the store, or after it did and
        before its answer is heard."""
        self._fatal_write = (script, nth, after)

    async def reach(self, words: tuple[Any, ...], *, after: bool) -> None:
        """Lines come by here before and after each call. Never returns where it is the fatal one."""
        script = NAMES.get(words[1], "") if words[0] == "EVALSHA" else ""
        if self._fatal_write and self._fatal_write[::2] == (script, after):
            _, nth, _ = self._fatal_write
            self._fatal_write = (script, nth - 1, after)
            if nth == 1:
                self.dead = True
        if self.dead:
            await self.create_future()

    def bury(self) -> None:
        """Ends the tasks of a dead process, now that nobody looks at the store and the files any more."""
        self._ticks_left, self.dead = None, False
        self.at_each_tick(lambda: None)
        self.call_soon(self.stop)
        self.run_forever()  # once: what was to run in the turn in which it was killed
        while tasks := list(self._tasks):  # which may begin others when they end
            for task in tasks:
                task.cancel()
            self.run(asyncio.wait(tasks))
        self.run(self.shutdown_asyncgens())
        self.close()

    def run_in_executor(self, executor: Any, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """At once: what a thread does takes no time."""
        future = self.create_future()
        try:
            future.set_result(work(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _hold(self, loop: Any, work: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = NumberedTask(work, loop=loop, **options)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    def _count_tick(self) -> None:
        self.ticks += 1
        if self.ticks > MAX_TICKS:
            raise RuntimeError(f"after {MAX_TICKS} turns of the event loop the run has not ended")
        if self._ticks_left is not None:
            self._ticks_left -= 1
            self.dead |= self._ticks_left < 0
        if self.dead:
            raise Killed


class Line:
    """A connection to the store in place of redis-py's: each call is answered while time stands still, some
    turns of the event loop later, so that other tasks run in between."""

    process: ClassVar[Process]  # that connects

    def __init__(self, path: str, **others: Any) -> None:
        self._process = Line.process
        self._connection = redis.connection.UnixDomainSocketConnection(
            path=path, socket_timeout=30, protocol=2
        )
        self._words: tuple[Any, ...] = ()

    async def connect(self) -> None:
        self._connection.connect()

    async def send_command(self, *words: Any) -> None:
        self._words = words
        await self._process.reach(words, after=False)
        self._connection.send_command(*words)

    async def read_response(self) -> Any:
        try:
            return self._connection.read_response()
        finally:
            for _ in range(self._process.dice.randrange(4)):
                await asyncio.sleep(0)
            await self._process.reach(self._words, after=True)

    async def disconnect(self) -> None:
        self._connection.disconnect()
