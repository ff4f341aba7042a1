"""Limits how many programs run concurrently."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

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
