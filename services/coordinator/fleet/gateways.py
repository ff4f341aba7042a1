"""The gateways of a run, and the streams that carry their sessions' turns."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

from atoll.runtime.clients.gateway import GatewayClient
from atoll.runtime.errors import AtollError
from atoll.wire.types import Trajectory, TurnRequest, UndrawnTurn

log = logging.getLogger(__name__)

REJOIN_S: Final = 0.2  # before a stream is opened again

Answers = tuple[list[Trajectory], list[UndrawnTurn]]


class GatewayLink:
    """One gateway: its client, and its stream of wanted and drawn turns."""

    def __init__(self, name: str, client: GatewayClient) -> None:
        self.name = name
        self.client = client
        self._answers: Answers = ([], [])
        self._filled = asyncio.Event()

    def answer(self, drawn: Sequence[Trajectory], undrawn: Sequence[UndrawnTurn]) -> None:
        self._answers[0].extend(drawn)
        self._answers[1].extend(undrawn)
        self._filled.set()

    async def follow(self, want: "Want") -> None:
        """Consumes turns that the gateway wants; waits for them; ends when cancelled. A stream that breaks is
        opened again, and the gateway says again what it wants."""
        while True:
            try:
                async with aclosing(self.client.draw(self._take_answers())) as stream:
                    async for requests in stream:
                        want(self, requests)
            except AtollError as error:
                log.warning("%s: its stream of turns broke: %s", self.name, error)
            await asyncio.sleep(REJOIN_S)

    async def _take_answers(self) -> AsyncIterator[Answers]:
        """What was answered into a stream that broke is wanted again."""
        self._answers = ([], [])
        while True:
            await self._filled.wait()
            self._filled.clear()
            answers, self._answers = self._answers, ([], [])
            if any(answers):
                yield answers


Want = Callable[[GatewayLink, Sequence[TurnRequest]], None]
Leave = Callable[[GatewayLink], None]


class Gateways:
    """Those that are registered now."""

    def __init__(self) -> None:
        self._want: Want | None = None
        self._leave: Leave | None = None
        self._links: dict[str, GatewayLink] = {}
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._num_sessions: Counter[str] = Counter()  # by name
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._links)

    def add(self, name: str, client: GatewayClient) -> None:
        self._links[name] = GatewayLink(name, client)
        self._follow(name)
        self._changed.set()

    def remove(self, client: GatewayClient) -> None:
        for link in [link for link in self._links.values() if link.client is client]:
            del self._links[link.name]
            self._stop(link.name)
            if self._leave is not None:
                self._leave(link)

    def serve(self, want: Want | None, leave: Leave | None = None) -> None:
        """From now on `want` is called with the turns that sessions ask for, all over again, and `leave` with
        a gateway that is removed; None: nobody is."""
        self._want, self._leave = want, leave
        for name in self._links:
            self._follow(name)

    def _follow(self, name: str) -> None:
        self._stop(name)
        if self._want is not None:
            self._streams[name] = asyncio.create_task(self._links[name].follow(self._want))

    def _stop(self, name: str) -> None:
        if stream := self._streams.pop(name, None):
            stream.cancel()

    async def choose(self) -> GatewayLink:
        """The one with the fewest sessions; waits until there is one."""
        while not self._links:
            self._changed.clear()
            await self._changed.wait()
        name = min(self._links, key=lambda name: self._num_sessions[name])
        return self._links[name]

    @asynccontextmanager
    async def place(self) -> AsyncIterator[GatewayLink]:
        """For a session, at the gateway that `choose` names."""
        link = await self.choose()
        self._num_sessions[link.name] += 1
        try:
            yield link
        finally:
            self._num_sessions[link.name] -= 1
