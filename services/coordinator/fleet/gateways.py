"""The gateways of a run, and the streams that carry their sessions' turns."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Final

from atoll.runtime.clients.gateway import GatewayClient
from atoll.runtime.errors import AtollError
from atoll.wire.types import Trajectory, TurnId, TurnRequest, UndrawnTurn

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
        self._wanted: set[TurnId] = set()  # and not answered yet
        self.is_draining = False
        self._is_idle = asyncio.Event()  # of one that drains: all that it wanted was answered

    def answer(self, drawn: Sequence[Trajectory], undrawn: Sequence[UndrawnTurn]) -> None:
        self._answers[0].extend(drawn)
        self._answers[1].extend(undrawn)
        self._filled.set()

    async def drain(self) -> None:
        """It gets no turns but those that it wants already; returns once it was sent these. What its sessions
        ask for next, they ask for again from the gateway that takes them over."""
        self.is_draining = True
        self._note_idle()
        await self._is_idle.wait()

    def _note_idle(self) -> None:
        if self.is_draining and not self._wanted:
            self._is_idle.set()

    async def follow(self, want: "Want") -> None:
        """Consumes turns that the gateway wants; waits for them; ends when cancelled. A stream that breaks is
        opened again, and the gateway says again what it wants."""
        while True:
            try:
                async with aclosing(self.client.draw(self._take_answers())) as stream:
                    async for requests in stream:
                        if self.is_draining:
                            requests = [r for r in requests if self._wanted.issuperset(r.ids)]
                        self._wanted.update(id for request in requests for id in request.ids)
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
                self._forget(answers)

    def _forget(self, answers: Answers) -> None:
        """What was answered is not wanted any more."""
        drawn, undrawn = answers
        for sample in drawn:
            [turn] = sample.turns
            self._wanted.discard(TurnId(sample.id, sample.attempt, turn.number, turn.branch))
        self._wanted.difference_update(turn.id for turn in undrawn)
        self._note_idle()


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

    async def drain(self, client: GatewayClient) -> None:
        """It gets no new sessions; returns once the turns that those in progress wait for have arrived."""
        for link in self._of(client):
            await link.drain()

    def _of(self, client: GatewayClient) -> list[GatewayLink]:
        return [link for link in self._links.values() if link.client is client]

    def remove(self, client: GatewayClient) -> None:
        for link in self._of(client):
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
        while not (staying := [link for link in self._links.values() if not link.is_draining]):
            self._changed.clear()
            await self._changed.wait()
        return min(staying, key=lambda link: self._num_sessions[link.name])

    @asynccontextmanager
    async def place(self) -> AsyncIterator[GatewayLink]:
        """For a session, at the gateway that `choose` names."""
        link = await self.choose()
        self._num_sessions[link.name] += 1
        try:
            yield link
        finally:
            self._num_sessions[link.name] -= 1
