"""The turns that sessions ask for: drawn by replicas, and sent back to the gateway that wanted them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from atoll.coordinator.fleet.gateways import GatewayLink
from atoll.coordinator.fleet.replicas import Replicas
from atoll.coordinator.fleet.routing import ContextWork
from atoll.coordinator.journal.journal import OpenSession
from atoll.coordinator.rollouts.dispatch import Dispatch
from atoll.coordinator.rollouts.generate_call import turn_id
from atoll.runtime.clients.rollout import Arrival
from atoll.wire.types import (
    FinishReason,
    SessionEnd,
    SessionId,
    Trajectory,
    TurnId,
    TurnRequest,
    UndrawnTurn,
    Version,
)

log = logging.getLogger(__name__)

Record = Callable[[OpenSession], Awaitable[bool]]


class SessionTurn:
    """One request of a session: turns after one context, each its own branch. Mutable.

    A lost turn is asked for again under the same id: a replica that has it answers with it, another draws it
    anew, and only one of them is ever answered.
    """

    def __init__(self, request: TurnRequest, link: GatewayLink) -> None:
        self.sent_alone = False
        self.link = link
        self.failures = 0
        self._request = request
        self._missing = set(request.ids)

    @property
    def session(self) -> SessionId:
        return SessionId(self.key.sample, self.key.attempt)

    @property
    def ids(self) -> tuple[TurnId, ...]:
        return self._request.ids

    @property
    def key(self) -> TurnId:
        return self.ids[0]

    @property
    def id_prefix(self) -> str:
        sample, attempt, turn, _ = self.key
        return f"{sample}/{attempt}/{turn}/"

    def requests(self) -> list[TurnRequest]:
        return [replace(self._request, ids=tuple(self.still_missing(self.ids)))]

    def demand(self) -> ContextWork:
        request = self._request
        return ContextWork(
            request.group,
            request.context_ids,
            len(self._missing),
            request.sampling.max_new_tokens,
            request.session,
        )

    def note_sent(self, version: Version) -> None:
        pass  # its version is the one that the replica draws it with

    def still_missing(self, ids: Iterable[TurnId]) -> list[TurnId]:
        return [id for id in ids if id in self._missing]

    def accept(self, id: TurnId) -> bool:
        """False: it came before."""
        if id not in self._missing:
            return False
        self._missing.remove(id)
        return True

    @property
    def is_drawn(self) -> bool:
        return not self._missing


class SessionTurns:
    def __init__(
        self,
        replicas: Replicas,
        record: Record,
        *,
        model: str,
        max_attempts: int,
        sample_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`record` is called before the first turn of a session, or its first at a newer version, goes to its
        gateway; False: the session is not to go on."""
        self._replicas = replicas
        self._record = record
        self._max_attempts = max_attempts
        self._dispatch = Dispatch[SessionTurn](
            replicas,
            self._deliver,
            self._lose,
            lambda turn: turn.key in self._wanted,
            model=model,
            sample_timeout_s=sample_timeout_s,
            timeout_s=timeout_s,
        )
        self._wanted: dict[TurnId, SessionTurn] = {}  # by first id
        self._turns: dict[TurnId, SessionTurn] = {}  # by every id
        self._newest: dict[SessionId, Version] = {}  # that made a turn
        self._last_number: dict[SessionId, int] = {}  # of versions: a later one ends the session
        self._max_versions: dict[SessionId, int] = {}

    def want(self, link: GatewayLink, requests: Sequence[TurnRequest]) -> None:
        """Has them drawn. What is being drawn already is answered to whoever asked last."""
        new = []
        for request in requests:
            turn = self._wanted.get(request.ids[0])
            if turn is not None:
                turn.link = link
                continue
            turn = SessionTurn(request, link)
            if self._has_outlived(turn.session):
                self._give_up(turn, "its session outlived too many versions", SessionEnd.VERSIONS)
                continue
            self._wanted[turn.key] = turn
            self._turns |= dict.fromkeys(request.ids, turn)
            new.append(turn)
        self._dispatch.submit(new)

    def limit(self, session: SessionId, max_versions: int) -> None:
        """It ends before its first turn that could be of one version more; 0: it does not."""
        if max_versions:
            self._max_versions[session] = max_versions

    def has_turn(self, session: SessionId) -> bool:
        return session in self._newest

    def end(self, session: SessionId) -> None:
        """It asks for no further turn; what is being drawn for it is aborted."""
        for turn in [turn for turn in self._wanted.values() if turn.session == session]:
            self._give_up(turn, "its session has ended", None)
            self._dispatch.cancel(turn.key, "its session has ended")
        for table in (self._newest, self._last_number, self._max_versions):
            table.pop(session, None)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._dispatch.start(tasks)

    def stop(self) -> None:
        self._dispatch.stop()

    def _has_outlived(self, session: SessionId) -> bool:
        last = self._last_number.get(session)
        return last is not None and any(replica.version.number > last for replica in self._replicas)

    async def _deliver(self, arrival: Arrival) -> None:
        for drawn in arrival.samples:
            id = turn_id(drawn)
            turn = self._turns.get(id)
            if turn is None or drawn.finish_reason is FinishReason.ABORT or not turn.accept(id):
                continue
            if not await self._record_version(turn.session, drawn):
                self._give_up(turn, "another attempt at the sample has begun", SessionEnd.CANCELLED)
                continue
            turn.link.answer([drawn], [])
            if turn.is_drawn:
                self._forget(turn)

    async def _record_version(self, session: SessionId, drawn: Trajectory) -> bool:
        version = max(drawn.versions(), key=lambda version: version.number)
        newest = self._newest.get(session)
        if newest is not None and newest.number >= version.number:
            return True
        if not await self._record(OpenSession(session.sample, session.attempt, version)):
            return False
        self._newest[session] = version
        if newest is None and session in self._max_versions:
            self._last_number[session] = version.number + self._max_versions[session] - 1
        return True

    async def _lose(self, turn: SessionTurn, ids: Sequence[TurnId], reason: str) -> None:
        turn.failures += 1
        if turn.failures >= self._max_attempts:
            self._give_up(turn, f"{turn.failures} attempts failed, the last: {reason}", None)
        else:
            self._dispatch.put_back([turn])

    def _give_up(self, turn: SessionTurn, reason: str, end: SessionEnd | None) -> None:
        self._forget(turn)
        missing = turn.still_missing(turn.ids)
        turn.link.answer([], [UndrawnTurn(id, reason, end) for id in missing])

    def _forget(self, turn: SessionTurn) -> None:
        self._wanted.pop(turn.key, None)
        for id in turn.ids:
            self._turns.pop(id, None)
