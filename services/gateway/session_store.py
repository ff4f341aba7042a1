"""Session state in the store, so that any gateway instance can continue any session.

    gateway/keys            hash   digest of a key -> "agent SESSION" or "reward SESSION"
    gateway/open            set    sessions that the coordinator has not ended
    gateway/session/ID      hash   spec (message SessionSpec without its keys), keys (their digests), opened,
                                   fence, end (why), closed (set when the coordinator ends it), and
                                   "read NUMBER" for each turn whose answer was delivered
    gateway/turns/ID        list   messages TurnRecord, in the order in which they were finished
    gateway/rewards/ID      hash   messages SessionReward by the name of the call that set them

The instance that was asked last holds a session: it has raised the session's fence, and what an earlier
holder writes is refused until it takes the session back.
"""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from atoll.runtime.errors import StaleFenceError, StoreError
from atoll.runtime.store import Script, Store
from atoll.runtime.write_batcher import WriteBatcher
from atoll.wire.codec.gateway import (
    dump_session_reward,
    dump_session_spec,
    dump_turn_record,
    parse_session_reward,
    parse_session_spec,
    parse_turn_record,
)
from atoll.wire.types import SessionEnd, SessionId, SessionReward, SessionSpec, TurnRecord

log = logging.getLogger(__name__)

NOTE_AFTER_S: Final = 0.05  # that delivered answers gather
REMEMBERED_S: Final = 3600  # that an ended session can be looked at, and its end be asked for again

# KEYS: keys, open, and session of each; ARGV of each: id, spec, digests of its keys, time. Answers by
# session: an Opening.
_OPEN: Final = Script("""
local answers = {}
for i = 3, #KEYS do
  local id, spec, agent, reward, now = unpack(ARGV, 5 * (i - 3) + 1, 5 * (i - 3) + 5)
  if redis.call('EXISTS', KEYS[i]) == 0 then
    redis.call('HSET', KEYS[i], 'spec', spec, 'keys', agent .. ' ' .. reward, 'opened', now, 'fence', 1)
    redis.call('HSET', KEYS[1], agent, 'agent ' .. id, reward, 'reward ' .. id)
    redis.call('SADD', KEYS[2], id)
    answers[#answers + 1] = 1
  else
    local is_same = redis.call('HGET', KEYS[i], 'keys') == agent .. ' ' .. reward
    answers[#answers + 1] = is_same and 2 or 0
  end
end
return answers
""")

# KEYS: session, turns
_TAKE: Final = Script("""
if redis.call('EXISTS', KEYS[1]) == 0 then return false end
redis.call('HINCRBY', KEYS[1], 'fence', 1)
return {redis.call('HGETALL', KEYS[1]), redis.call('LRANGE', KEYS[2], 0, -1)}
""")

# KEYS: session and turns of each; ARGV of each: fence, record. Answers by record: its position, or why it is
# refused.
_FINISH: Final = Script("""
local answers = {}
for i = 1, #KEYS, 2 do
  local fence, ended = unpack(redis.call('HMGET', KEYS[i], 'fence', 'end'))
  if not fence or ended then answers[#answers + 1] = 'ended'
  elseif fence ~= ARGV[i] then answers[#answers + 1] = 'taken'
  else answers[#answers + 1] = redis.call('RPUSH', KEYS[i + 1], ARGV[i + 1]) - 1 end
end
return answers
""")

# KEYS: session; ARGV: number of the turn
_DELIVERED: Final = Script("""
for i, session in ipairs(KEYS) do
  if redis.call('EXISTS', session) == 1 then redis.call('HSET', session, 'read ' .. ARGV[i], 1) end
end
""")

# KEYS: session, rewards, ARGV: reward
_REWARD: Final = Script("""
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'closed') == 1 then return 0 end
redis.call('HSETNX', KEYS[2], ARGV[1], ARGV[2])
return 1
""")

# KEYS: keys, session; ARGV: reason
_STOP: Final = Script("""
local known = redis.call('HGET', KEYS[2], 'keys')
if not known then return end
redis.call('HSETNX', KEYS[2], 'end', ARGV[1])
redis.call('HDEL', KEYS[1], string.match(known, '%S+'))
""")

# KEYS: keys, open, session, turns, rewards; ARGV: id, reason, seconds to remember it
_END: Final = Script("""
local known = redis.call('HGET', KEYS[3], 'keys')
if not known then return false end
redis.call('HSETNX', KEYS[3], 'end', ARGV[2])
redis.call('HSET', KEYS[3], 'closed', 1)
redis.call('HDEL', KEYS[1], string.match(known, '(%S+) (%S+)'))
redis.call('SREM', KEYS[2], ARGV[1])
for i = 3, 5 do redis.call('EXPIRE', KEYS[i], ARGV[3]) end
return {
  redis.call('HGET', KEYS[3], 'end'),
  redis.call('LRANGE', KEYS[4], 0, -1),
  redis.call('HVALS', KEYS[5]),
}
""")


class KeyUse(Enum):
    AGENT = "agent"  # may ask for turns
    REWARD = "reward"  # may set rewards


class Opening(Enum):
    FOREIGN = 0  # it was opened before, with other keys: it stays as it is
    NEW = 1
    REPEATED = 2  # it was opened before, with these keys, by a call whose answer was lost


class SessionTakenError(Exception):
    """Another instance holds the session now."""


class SessionEndedError(Exception):
    """It has ended, or was never opened."""


@dataclass(frozen=True, slots=True)
class HeldSession:
    """A session as it was when this instance took it."""

    spec: SessionSpec  # without its keys
    fence: int
    opened: float  # Unix seconds
    end: SessionEnd | None
    records: tuple[TurnRecord, ...]
    delivered: frozenset[int]  # numbers of turns whose answers arrived


@dataclass(frozen=True, slots=True)
class EndedSession:
    end: SessionEnd  # the first end, which counts
    records: tuple[TurnRecord, ...]
    rewards: tuple[SessionReward, ...]


def key_digest(key: str) -> str:
    """Keys themselves are stored nowhere."""
    return hashlib.sha256(key.encode()).hexdigest()


def without_keys(spec: SessionSpec) -> SessionSpec:
    return replace(spec, agent_key="", reward_key="")


class SessionStore:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._turns = WriteBatcher(self._write_turns)
        self._delivered: list[tuple[SessionId, int]] = []  # not noted yet
        self._noting: asyncio.Task[None] | None = None

    async def open(self, specs: Sequence[SessionSpec], now: float) -> list[Opening]:
        """`now`: in Unix seconds. The caller holds those that are new, under fence 1."""
        words: list[str | bytes] = []
        for spec in specs:
            keyless = dump_session_spec(without_keys(spec))
            digests = key_digest(spec.agent_key), key_digest(spec.reward_key)
            words += (str(spec.id), keyless, *digests, repr(now))
        sessions = [_session(spec.id) for spec in specs]
        answers = await self._write(_OPEN, ["gateway/keys", "gateway/open", *sessions], *words)
        return [Opening(answer) for answer in answers]

    async def find(self, key: str) -> tuple[KeyUse, SessionId] | None:
        """What a key is for; None if it is no open session's."""
        entry = await self._store.read("HGET", "gateway/keys", key_digest(key))
        if entry is None:
            return None
        use, _, id = entry.decode().partition(" ")
        return KeyUse(use), SessionId.parse(id)

    async def open_ids(self) -> list[SessionId]:
        return [SessionId.parse(id.decode()) for id in await self._store.read("SMEMBERS", "gateway/open")]

    async def take(self, id: SessionId) -> HeldSession:
        """Makes the caller the session's holder. Raises SessionEndedError if there is no such session."""
        answer = await self._write(_TAKE, [_session(id), _turns(id)])
        if answer is None:
            raise SessionEndedError
        cells, records = answer
        fields = {name.decode(): value for name, value in zip(cells[::2], cells[1::2], strict=True)}
        return HeldSession(
            spec=parse_session_spec(fields["spec"]),
            fence=int(fields["fence"]),
            opened=float(fields["opened"]),
            end=SessionEnd(fields["end"].decode()) if "end" in fields else None,
            records=tuple(map(parse_turn_record, records)),
            delivered=frozenset(int(name[5:]) for name in fields if name.startswith("read ")),
        )

    async def finish(self, id: SessionId, fence: int, record: TurnRecord) -> int:
        """The record's position among the session's. Raises SessionTakenError if the caller does not hold the
        session any more, SessionEndedError if it has ended; nothing is written then."""
        answer = await self._turns.write(f"{id} {fence}", dump_turn_record(record))
        if answer == "taken":
            raise SessionTakenError
        if answer == "ended":
            raise SessionEndedError
        return int(answer)

    def note_delivered(self, id: SessionId, number: int) -> None:
        """Soon: if it is lost with this instance, a repeated request gets the same answer once more."""
        if self._noting is None or self._noting.done():
            self._noting = asyncio.get_running_loop().create_task(self._note_delivered())
        self._delivered.append((id, number))

    async def reward(self, id: SessionId, call: str, reward: SessionReward) -> None:
        """A repeated `call` adds nothing. Raises SessionEndedError if the session has ended, KeyError if it
        has no such turn."""
        if reward.turn is not None:
            records, _ = await self.show(id)
            if not any(reward.turn == (r.number, branch) for r in records for branch in range(len(r.drawn))):
                raise KeyError(reward.turn)
        words = call, dump_session_reward(reward)
        if not await self._write(_REWARD, [_session(id), _rewards(id)], *words):
            raise SessionEndedError

    async def stop(self, id: SessionId, reason: SessionEnd) -> None:
        """Refuses further turns, and still takes rewards until `end`."""
        await self._write(_STOP, ["gateway/keys", _session(id)], reason.value)

    async def end(self, id: SessionId, reason: SessionEnd) -> EndedSession:
        """Its keys are worth nothing from now on. Raises SessionEndedError if there is no such session."""
        names = ["gateway/keys", "gateway/open", _session(id), _turns(id), _rewards(id)]
        answer = await self._write(_END, names, str(id), reason.value, REMEMBERED_S)
        if answer is None:
            raise SessionEndedError
        end, records, rewards = answer
        return EndedSession(
            SessionEnd(end.decode()),
            tuple(map(parse_turn_record, records)),
            tuple(map(parse_session_reward, rewards)),
        )

    async def show(self, id: SessionId) -> tuple[list[TurnRecord], list[SessionReward]]:
        """Without taking it."""
        records = await self._store.read("LRANGE", _turns(id), 0, -1)
        rewards = await self._store.read("HVALS", _rewards(id))
        return list(map(parse_turn_record, records)), list(map(parse_session_reward, rewards))

    def note_undelivered(self, id: SessionId, number: int) -> None:
        """Unless it is noted already."""
        if (id, number) in self._delivered:
            self._delivered.remove((id, number))

    async def close(self) -> None:
        """Writes out what is gathering."""
        if self._noting is not None:
            await self._noting

    async def _note_delivered(self) -> None:
        await asyncio.sleep(NOTE_AFTER_S)
        delivered, self._delivered = self._delivered, []
        if not delivered:
            return
        try:
            await self._write(
                _DELIVERED, [_session(id) for id, _ in delivered], *(number for _, number in delivered)
            )
        except StoreError as error:
            log.warning("delivered responses are not recorded: %s", error)

    async def _write_turns(self, messages: Sequence[str | bytes]) -> list[str]:
        names: list[str] = []
        words: list[str | bytes] = []
        for name, record in zip(messages[::2], messages[1::2], strict=True):
            assert isinstance(name, str)
            id, fence = name.rsplit(" ", 1)
            names += (f"gateway/session/{id}", f"gateway/turns/{id}")
            words += (fence, record)
        answers = await self._write(_FINISH, names, *words)
        return [answer.decode() if isinstance(answer, bytes) else str(answer) for answer in answers]

    async def _write(self, script: Script, keys: Sequence[str], *args: str | bytes | int) -> Any:
        """The run's fence is the coordinator's, which gateways follow: a new coordinator continues the
        sessions of the one before."""
        try:
            return await self._store.write(script, keys, *args)
        except StaleFenceError:
            await self._store.follow_epoch()
            return await self._store.write(script, keys, *args)


def _session(id: SessionId) -> str:
    return f"gateway/session/{id}"


def _turns(id: SessionId) -> str:
    return f"gateway/turns/{id}"


def _rewards(id: SessionId) -> str:
    return f"gateway/rewards/{id}"
