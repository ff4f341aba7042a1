"""The turns that sessions ask for: drawn by replicas, and sent back to the gateway that wanted them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

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
        return SessionId(self.ids[0].sample, self.ids[0].attempt)

    @property
    def ids(self) -> tuple[TurnId, ...]:
        return self._request.ids

    @property
    def key(self) -> tuple[TurnId, ...]:
        return self.ids

    @property
    def id_prefix(self) -> str:
        sample, attempt, turn, _ = self.ids[0]
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

    def accept(self, id: TurnId) -> None:
        self._missing.remove(id)

    @property
    def is_drawn(self) -> bool:
        return not self._missing


@dataclass(slots=True)
class _SessionState:
    """A session, from its limit or its first requested turn to its end."""

    wanted: set[SessionTurn] = field(default_factory=set)
    newest: Version | None = None  # that made a turn
    max_versions: int = 0  # 0: no limit
    last_number: int | None = None  # of versions: a later one ends it


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
            self._is_wanted,
            model=model,
            sample_timeout_s=sample_timeout_s,
            timeout_s=timeout_s,
        )
        self._turns: dict[TurnId, SessionTurn] = {}  # each id not drawn yet
        self._sessions: dict[SessionId, _SessionState] = {}

    def want(self, link: GatewayLink, requests: Sequence[TurnRequest]) -> None:
        """Has them drawn. A turn in progress is answered to the gateway that asked last; one that was
        answered before is drawn again."""
        new = []
        for request in requests:
            for id in request.ids:
                if id in self._turns:
                    self._turns[id].link = link
            rest = tuple(id for id in request.ids if id not in self._turns)
            if not rest:
                continue
            turn = SessionTurn(replace(request, ids=rest), link)
            session = self._session(turn.session)
            if self._has_outlived(session):
                self._give_up(turn, "its session outlived too many versions", SessionEnd.VERSIONS)
                continue
            session.wanted.add(turn)
            self._turns |= dict.fromkeys(turn.ids, turn)
            new.append(turn)
        self._dispatch.submit(new)

    def leave(self, link: GatewayLink) -> None:
        """Aborts the turns that a lost gateway was waiting for: the instance that takes over its sessions
        uses new turn numbers. If the gateway returns, it asks for them again."""
        for turn in {turn for turn in self._turns.values() if turn.link is link}:
            self._abort(turn, "its gateway is gone")

    def limit(self, session: SessionId, max_versions: int) -> None:
        """It ends before its first turn that could be of one version more; 0: it does not."""
        if max_versions:
            self._session(session).max_versions = max_versions

    def has_turn(self, session: SessionId) -> bool:
        return session in self._sessions and self._sessions[session].newest is not None

    def end(self, session: SessionId) -> None:
        """It asks for no further turn; what is being drawn for it is aborted."""
        if (ended := self._sessions.pop(session, None)) is None:
            return
        for turn in ended.wanted:
            self._abort(turn, "its session has ended")

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._dispatch.start(tasks)

    def stop(self) -> None:
        self._dispatch.stop()

    def _session(self, id: SessionId) -> _SessionState:
        return self._sessions.setdefault(id, _SessionState())

    def _is_wanted(self, turn: SessionTurn) -> bool:
        """And neither drawn nor given up."""
        return any(self._turns.get(id) is turn for id in turn.ids)

    def _has_outlived(self, session: _SessionState) -> bool:
        last = session.last_number
        return last is not None and any(replica.version.number > last for replica in self._replicas)

    async def _deliver(self, arrival: Arrival) -> None:
        for drawn in arrival.samples:
            id = turn_id(drawn)
            turn = self._turns.get(id)
            if turn is None or drawn.finish_reason is FinishReason.ABORT:
                continue
            goes_on = await self._record_version(turn.session, drawn)
            if self._turns.get(id) is not turn:
                continue  # aborted while its version was recorded
            if not goes_on:
                self._abort(turn, "another attempt at the sample has begun", SessionEnd.CANCELLED)
                continue
            turn.accept(id)
            del self._turns[id]
            turn.link.answer([drawn], [])
            if turn.is_drawn:
                self._forget(turn)

    async def _record_version(self, id: SessionId, drawn: Trajectory) -> bool:
        session = self._session(id)
        version = max(drawn.versions(), key=lambda version: version.number)
        newest = session.newest
        if newest is not None and newest.number >= version.number:
            return True
        if not await self._record(OpenSession(id.sample, id.attempt, version)):
            return False
        session.newest = version
        if newest is None and session.max_versions:
            session.last_number = version.number + session.max_versions - 1
        return True

    async def _lose(self, turn: SessionTurn, ids: Sequence[TurnId], reason: str) -> None:
        if not self._is_wanted(turn):
            return
        turn.failures += 1
        if turn.failures >= self._max_attempts:
            self._give_up(turn, f"{turn.failures} attempts failed, the last: {reason}", None)
        else:
            self._dispatch.put_back([turn])

    def _abort(self, turn: SessionTurn, reason: str, end: SessionEnd | None = None) -> None:
        self._give_up(turn, reason, end)
        self._dispatch.cancel(turn.key, reason)

    def _give_up(self, turn: SessionTurn, reason: str, end: SessionEnd | None) -> None:
        missing = turn.still_missing(turn.ids)
        self._forget(turn)
        turn.link.answer([], [UndrawnTurn(id, reason, end) for id in missing])

    def _forget(self, turn: SessionTurn) -> None:
        for id in turn.still_missing(turn.ids):
            self._turns.pop(id, None)
        if (session := self._sessions.get(turn.session)) is not None:
            session.wanted.discard(turn)
            if session == _SessionState():  # it came after its end
                del self._sessions[turn.session]
