"""The gateway's end of `Draw`: sends turns to the coordinator and receives them generated."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from atoll.wire.types import SessionEnd, Trajectory, TurnId, TurnRequest


class UndrawnError(Exception):
    """No replica drew the turn. `end`: its session is over; None: it may be asked for again."""

    def __init__(self, reason: str, end: SessionEnd | None) -> None:
        super().__init__(reason)
        self.end = end


class Draws:
    """Turns that are wanted and not drawn yet. One stream at a time carries them."""

    def __init__(self) -> None:
        self._wanted: dict[TurnId, TurnRequest] = {}  # by its first id
        self._waiting: dict[TurnId, asyncio.Future[Trajectory]] = {}
        self._unsent: list[TurnRequest] = []
        self._filled = asyncio.Event()
        self._stream: object = None  # the one that carries turns now

    async def draw(self, request: TurnRequest) -> list[Trajectory]:
        """One turn for each id, in their order; waits for a coordinator as long as there is none. Raises
        UndrawnError."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Trajectory]] = [loop.create_future() for _ in request.ids]
        self._waiting.update(zip(request.ids, futures, strict=True))
        self._wanted[request.ids[0]] = request
        self._unsent.append(request)
        self._filled.set()
        try:
            return await asyncio.gather(*futures)
        finally:
            del self._wanted[request.ids[0]]
            for id in request.ids:
                del self._waiting[id]

    async def wanted(self, stream: object) -> AsyncIterator[list[TurnRequest]]:
        """What a new stream sends: all that is wanted now, then what comes, as much at once as has gathered.
        Ends when another stream has taken its place."""
        self._stream = stream
        self._unsent = list(self._wanted.values())
        self._filled.set()
        while True:
            await self._filled.wait()
            if self._stream is not stream:
                return
            self._filled.clear()
            unsent, self._unsent = self._unsent, []
            if unsent:
                yield unsent

    def interrupt(self, stream: object) -> None:
        """Ends the stream, unless another one has taken its place."""
        if self._stream is stream:
            self._stream = None
            self._filled.set()

    def close(self) -> None:
        """Fails all waiting requests; their clients can retry at another instance."""
        for id in list(self._waiting):
            self.give_up(id, "this gateway is stopping", None)

    def deliver(self, turns: Sequence[Trajectory]) -> None:
        """Turns that nobody waits for any more are ignored."""
        for turn in turns:
            [drawn] = turn.turns
            self._resolve(TurnId(turn.id, turn.attempt, drawn.number, drawn.branch), turn)

    def give_up(self, id: TurnId, reason: str, end: SessionEnd | None) -> None:
        self._resolve(id, UndrawnError(reason, end))

    def _resolve(self, id: TurnId, result: Trajectory | UndrawnError) -> None:
        with suppress(KeyError):
            future = self._waiting[id]
            if future.done():
                return
            if isinstance(result, UndrawnError):
                future.set_exception(result)
            else:
                future.set_result(result)
