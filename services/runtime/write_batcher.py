"""Batches writes to the store: messages that arrive close together share one write."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

GATHER_FACTOR = 8  # messages gather for this many times the last write's duration
MAX_GATHER_S = 0.05

Write = Callable[[Sequence[str | bytes]], Awaitable[Sequence[str]]]


@dataclass(eq=False, slots=True)
class _WriteBatch:
    words: list[str | bytes] = field(default_factory=list)
    answers: Sequence[str] | None = None  # one for each message; None: it is not written yet


class WriteBatcher:
    def __init__(self, write: Write) -> None:
        """`write` takes names and payload of each message in turn, and answers once for each message."""
        self._write = write
        self._open = _WriteBatch()  # that messages join
        self._writing = asyncio.Lock()
        self._gathered = 0.0  # when the next write may begin, in the event loop's time

    async def write(self, names: str, payload: bytes) -> str:
        """Returns the answer once the message is in the store. Waits for the write before; the first of a
        batch to have its turn writes the whole of it."""
        batch = self._open
        number = len(batch.words) // 2
        batch.words += (names, payload)
        async with self._writing:
            if batch.answers is None:
                clock = asyncio.get_running_loop().time
                if (wait_s := self._gathered - clock()) > 0:
                    await asyncio.sleep(wait_s)
                self._open, begun = _WriteBatch(), clock()
                batch.answers = await self._write(batch.words)
                self._gathered = clock() + min(GATHER_FACTOR * (clock() - begun), MAX_GATHER_S)
        return batch.answers[number]
