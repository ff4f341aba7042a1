"""How many programs run at once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

ASIDE = 7


class Places:
    """So many, so that programs get the processor time that their deadlines assume.

    A program that sleeps, or has used up its share of that time and is behind all others now, steps aside for
    another one; at most ASIDE times as many do. Without that, 1 % of programs that sleep until their deadline
    would fill all places.
    """

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)
        self._aside_left = ASIDE * count

    @asynccontextmanager
    async def one(self) -> AsyncIterator[Callable[[], None]]:
        """Waits for a place. What it yields makes its holder step aside."""
        await self._free.acquire()
        holds = True

        def step_aside() -> None:
            nonlocal holds
            if holds and self._aside_left:
                holds = False
                self._aside_left -= 1
                self._free.release()

        try:
            yield step_aside
        finally:
            if holds:
                self._free.release()
            else:
                self._aside_left += 1
