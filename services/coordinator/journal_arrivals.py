"""Messages of finished samples on their way to the store: those that come close together share one write."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

GATHER_S = 0.005  # between two writes: one costs the coordinator as much as ten samples in it

Write = Callable[[Sequence[str | bytes]], Awaitable[Sequence[str]]]


@dataclass(eq=False, slots=True)
class _Batch:
    words: list[str | bytes] = field(default_factory=list)
    answers: Sequence[str] | None = None  # one for each message; None: it is not written yet


class Arrivals:
    def __init__(self, write: Write) -> None:
        """`write` takes names and payload of each message in turn, and answers once for each message."""
        self._write = write
        self._open = _Batch()  # that messages join
        self._turn = asyncio.Lock()
        self._written = 0.0  # when the last write began, in the event loop's time

    async def write(self, names: str, payload: bytes) -> str:
        """Returns the answer once the message is in the store. Waits for the write before; the first of a
        batch to have its turn writes the whole of it."""
        batch = self._open
        number = len(batch.words) // 2
        batch.words += (names, payload)
        async with self._turn:
            if batch.answers is None:
                clock = asyncio.get_running_loop().time
                if (wait_s := self._written + GATHER_S - clock()) > 0:
                    await asyncio.sleep(wait_s)
                self._open, self._written = _Batch(), clock()
                batch.answers = await self._write(batch.words)
        return batch.answers[number]
