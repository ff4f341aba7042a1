"""Limits how many programs run concurrently, and detects callers whose programs all sleep."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

MAX_PARKED_PER_SLOT = 7


class ProgramSlots:
    """Slots for programs, so that they get the CPU time that their deadlines assume.

    A program that sleeps, or that has used up its share and runs at low priority, is parked, which frees its
    slot; at most MAX_PARKED_PER_SLOT per slot. Otherwise, even 1 % of programs sleeping until their deadline
    would occupy all slots.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._parking_left = MAX_PARKED_PER_SLOT * count

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Callable[[], None]]:
        """Waits for a slot. Yields a function that parks its holder."""
        await self._free.acquire()
        holds = True

        def park() -> None:
            nonlocal holds
            if holds and self._parking_left:
                holds = False
                self._parking_left -= 1
                self._free.release()

        try:
            yield park
        finally:
            if holds:
                self._free.release()
            else:
                self._parking_left += 1


class SleepWatch:
    """Calls `when_all_sleep` if all programs that run under it sleep. One that uses up CPU time does not."""

    def __init__(self, when_all_sleep: Callable[[], None]) -> None:
        self._when_all_sleep = when_all_sleep
        self._asleep: dict[object, bool] = {}  # by running program

    @contextmanager
    def program(self) -> Iterator[Callable[[], None]]:
        """Yields a function to call when the program sleeps."""
        program = object()
        self._asleep[program] = False

        def fall_asleep() -> None:
            self._asleep[program] = True
            self._check()

        try:
            yield fall_asleep
        finally:
            del self._asleep[program]
            self._check()

    def _check(self) -> None:
        if self._asleep and all(self._asleep.values()):
            self._when_all_sleep()
