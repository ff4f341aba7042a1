"""The sessions that this instance holds, and their limits."""

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from atoll.gateway.conversation import RequestError
from atoll.gateway.history.tree import SessionTree
from atoll.gateway.session_store import (
    EndedSession,
    HeldSession,
    KeyUse,
    Opening,
    SessionEndedError,
    SessionStore,
    key_digest,
    without_keys,
)
from atoll.wire.info import SessionSummary
from atoll.wire.types import SessionEnd, SessionId, SessionReward, SessionSpec, Turn, TurnRecord

log = logging.getLogger(__name__)

TURNS_PER_HOLDER: Final = 1 << 16  # numbers that a holder may give: those of holders never meet
IDLE_S: Final = 900.0  # after which a session is forgotten here; the store has it


@dataclass(eq=False, slots=True)
class AskedTurn:
    """A request whose answer has not arrived at the client: the same body is the same turn until then."""

    record: "asyncio.Future[TurnRecord]"

    @classmethod
    def of_finished(cls, record: TurnRecord) -> Self:
        future = asyncio.get_running_loop().create_future()
        future.set_result(record)
        return cls(future)


@dataclass(eq=False, slots=True)
class Session:
    """An open session, as its holder has it. Mutable."""

    spec: SessionSpec
    fence: int
    opened: float  # Unix seconds
    tree: SessionTree
    asked: dict[bytes, AskedTurn] = field(default_factory=dict)  # by digest of the body
    undelivered: dict[bytes, TurnRecord] = field(default_factory=dict)  # finished by an earlier holder
    num_numbered: int = 0  # turns numbered by this holder
    overflowed: bool = False  # its last request did not fit into the context
    used: float = 0.0  # when it was asked for a turn last, in monotonic seconds
    key: str = ""  # digest of the agent's key, once it was shown

    @property
    def id(self) -> SessionId:
        return self.spec.id

    def next_number(self) -> int:
        """For a turn's id. An earlier holder's unfinished turns keep theirs to themselves."""
        number = self.fence * TURNS_PER_HOLDER + self.num_numbered
        self.num_numbered += 1
        return number


class Sessions:
    """Sessions by key and by id. Another instance may take a session at any time, and this one take it back:
    what is in memory here is a copy of the store's."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._held: OrderedDict[SessionId, Session] = OrderedDict()  # used last at the end
        self._keys: dict[str, SessionId] = {}  # digests of agents' keys
        self._taking: dict[SessionId, asyncio.Task[Session]] = {}
        self.counters: Counter[str] = Counter()  # since this instance started

    def __len__(self) -> int:
        return len(self._held)

    async def open(self, specs: Sequence[SessionSpec]) -> set[SessionId]:
        """Those that have the keys of their specs. The others were opened before, with other keys, and stay
        as they are."""
        self._forget_idle()
        now = time.time()
        openings = list(zip(specs, await self._store.open(specs, now), strict=True))
        for spec in (spec for spec, opening in openings if opening is Opening.NEW):
            session = Session(without_keys(spec), 1, now, SessionTree())
            session.key, session.used = key_digest(spec.agent_key), time.monotonic()
            self._held[session.id] = session
            self._keys[session.key] = session.id
            self.counters["sessions_opened"] += 1
        return {spec.id for spec, opening in openings if opening is not Opening.FOREIGN}

    async def of_agent(self, key: str) -> Session:
        """Raises RequestError unless it is the agent's key of an open session."""
        digest = key_digest(key)
        id = self._keys.get(digest) or await self._look_up(key, KeyUse.AGENT)
        session = self._held.get(id) or await self.take(id)
        self._keys[digest] = id
        session.key, session.used = digest, time.monotonic()
        self._held.move_to_end(id)
        return session

    async def reward(self, key: str, call: str, value: float, component: str, answer_id: str | None) -> None:
        """For the turn of the answer with that id; None: for the session. A repeated `call` adds nothing.
        Raises RequestError unless the key is the reward key of an open session, and the answer one of its."""
        id = await self._look_up(key, KeyUse.REWARD)
        turn = None if answer_id is None else _turn_of(answer_id, id)
        try:
            await self._store.reward(id, call, SessionReward(component, value, turn))
        except SessionEndedError:
            raise _no_session() from None
        except KeyError:
            raise _no_turn(str(answer_id)) from None

    def summaries(self) -> list[SessionSummary]:
        """Of those that this instance holds."""
        return [
            SessionSummary(
                session.id,
                session.tree.num_turns,
                session.tree.num_produced,
                session.opened,
                session.tree.branches,
                session.tree.num_recomputed,
            )
            for session in self._held.values()
        ]

    async def take(self, id: SessionId) -> Session:
        """Reads the session from the store and becomes its holder. Raises RequestError if it has ended."""
        if id not in self._taking:  # requests that come together take it once
            self._taking[id] = asyncio.create_task(self._take(id))
            self._taking[id].add_done_callback(lambda _: self._taking.pop(id))
        return await asyncio.shield(self._taking[id])

    async def stop(self, id: SessionId, reason: SessionEnd) -> None:
        """Ends it by rule: further turns are refused, but rewards can be set until `end`."""
        await self._store.stop(id, reason)
        self.forget(id)

    async def end(self, id: SessionId, reason: SessionEnd) -> EndedSession:
        """Raises SessionEndedError if there is no such session."""
        session = self._held.get(id)
        if session is not None and session.overflowed and reason is SessionEnd.AGENT_FAILED:
            reason = SessionEnd.CONTEXT
        ended = await self._store.end(id, reason)
        self.forget(id)
        self.counters[f"sessions_ended: {ended.end.value}"] += 1
        return ended

    def forget(self, id: SessionId) -> None:
        """Pending turns are abandoned."""
        if session := self._held.pop(id, None):
            self._keys.pop(session.key, None)
            for asked in session.asked.values():
                asked.record.cancel()

    async def _look_up(self, key: str, use: KeyUse) -> SessionId:
        found = await self._store.find(key)
        if found is None:
            raise _no_session()
        if found[0] is not use:
            raise RequestError(
                403, "permission", f"this key may not do that: it is a session's {found[0].value} key"
            )
        return found[1]

    async def _take(self, id: SessionId) -> Session:
        try:
            held = await self._store.take(id)
        except SessionEndedError:
            raise _no_session() from None
        if held.end is not None:
            raise _no_session()
        before = self._held.get(id)
        session = _session(held)
        if before is not None:  # taken back: pending turns continue
            before.fence, before.num_numbered = session.fence, 0
            before.tree, before.undelivered = session.tree, session.undelivered
            session = before
            self.counters["sessions_taken_back"] += 1
        self._held[id] = session
        return session

    def _forget_idle(self) -> None:
        oldest = time.monotonic() - IDLE_S
        while self._held:
            session = next(iter(self._held.values()))
            if session.used > oldest or session.asked:
                return
            self.forget(session.id)


def _session(held: HeldSession) -> Session:
    undelivered = {r.request: r for r in held.records if r.number not in held.delivered}
    return Session(held.spec, held.fence, held.opened, SessionTree(held.records), undelivered=undelivered)


def turn_name(id: SessionId, number: int) -> str:
    """Unique in the run: part of all ids that clients get."""
    return f"{_prefix(id)}{number:x}"


def reply_name(id: SessionId, turn: Turn) -> str:
    """Of one reply of a turn: part of its calls' ids."""
    return f"{turn_name(id, turn.number)}_{turn.branch}"


def _prefix(id: SessionId) -> str:
    return hashlib.blake2b(str(id).encode(), digest_size=5).hexdigest()


def _turn_of(answer_id: str, id: SessionId) -> tuple[int, int]:
    """Number and branch of the turn that an id such as "chatcmpl-NAME" or "call_NAME_BRANCH_0" names."""
    name, _, rest = answer_id.replace("-", "_").partition("_")[2].partition("_")
    if not name.startswith(_prefix(id)):
        raise _no_turn(answer_id)
    try:
        return int(name.removeprefix(_prefix(id)), 16), int(rest.partition("_")[0] or 0)
    except ValueError:
        raise _no_turn(answer_id) from None


def _no_turn(answer_id: str) -> RequestError:
    return RequestError(
        404, "not_found", f"turn: got {answer_id!r}, expected the id of an answer of this session"
    )


def _no_session() -> RequestError:
    return RequestError(
        401, "authentication", "no open session has this key: it is misspelt, or its session has ended"
    )
