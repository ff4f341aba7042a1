"""Messages of finished samples on their way to the store: those that come close together share one write."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

GATHER = 8  # times as long as a write took, messages gather for the next one: a busy coordinator writes less
MAX_GATHER_S = 0.05

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
        self._gathered = 0.0  # when the next write may begin, in the event loop's time

    async def write(self, names: str, payload: bytes) -> str:
        """Returns the answer once the message is in the store. Waits for the write before; the first of a
        batch to have its turn writes the whole of it."""
        batch = self._open
        number = len(batch.words) // 2
        batch.words += (names, payload)
        async with self._turn:
            if batch.answers is None:
                clock = asyncio.get_running_loop().time
                if (wait_s := self._gathered - clock()) > 0:
                    await asyncio.sleep(wait_s)
                self._open, begun = _Batch(), clock()
                batch.answers = await self._write(batch.words)
                self._gathered = clock() + min(GATHER * (clock() - begun), MAX_GATHER_S)
        return batch.answers[number]
