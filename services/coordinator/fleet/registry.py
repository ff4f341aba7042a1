"""Service registry: leases in the store, renewed by heartbeats, expiring by the store's clock."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Final

from atoll.runtime.errors import ReplacedError, RunEndedError, UserError
from atoll.runtime.store import Script, Store
from atoll.wire.types import ServiceEntry

_LEASES: Final = "leases"  # sorted set: "name incarnation role address" -> end of the lease in Unix ms
_HOLDERS: Final = "holders"  # hash: name -> the incarnation that was the last to register for the first time
_REPLACED: Final = "replaced"  # set: incarnations whose name a later one took
_KEYS: Final = (_LEASES, _HOLDERS, _REPLACED)


def _script(body: str) -> Script:
    return Script(
        """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
        + body
    )


# entry, lease in ms; answers the incarnation that took the name from this one, or "". Which of two came later
# is known by the order in which they registered: the clocks of their hosts may differ.
_REGISTER: Final = _script("""
local name, incarnation = string.match(ARGV[1], '^(%S+) (%S+)')
local holder = redis.call('HGET', KEYS[2], name)
if redis.call('SISMEMBER', KEYS[3], incarnation) == 1 then return holder end
if holder and holder ~= incarnation then redis.call('SADD', KEYS[3], holder) end
redis.call('HSET', KEYS[2], name, incarnation)
for _, entry in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if string.match(entry, '^(%S+)') == name then redis.call('ZREM', KEYS[1], entry) end
end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
return ''
""")

# entry, lease in ms; answers 1 unless the entry was removed. A lease that has lapsed is renewed, too: only
# _LOOK removes those, since the heartbeats may have waited for a suspended coordinator.
_RENEW: Final = _script("""
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
return 1
""")

_REMOVE: Final = _script("redis.call('ZREM', KEYS[1], ARGV[1])")

# time of the last look in ms (0: none), lease in ms; answers the time, live entries, and lapsed ones, which
# it removes. A late look first opens every lease again: nobody could renew one while the coordinator or the
# store was suspended. Only the store's clock always shows that: a monotonic clock may have stopped, too.
_LOOK: Final = _script("""
local last, lease = tonumber(ARGV[1]), tonumber(ARGV[2])
if last > 0 and now - last > lease / 2 then
  for _, entry in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
    redis.call('ZADD', KEYS[1], now + lease, entry)
  end
end
local lapsed = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
return {now, redis.call('ZRANGE', KEYS[1], 0, -1), lapsed}
""")

_LIVE: Final = _script("return redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')")


@dataclass(frozen=True, slots=True)
class ServiceJoined:
    entry: ServiceEntry


@dataclass(frozen=True, slots=True)
class ServiceLeft:
    """Its lease lapsed, it deregistered, or a newer incarnation took its name."""

    entry: ServiceEntry
    lapsed: bool = field(default=False, compare=False)  # its process may just be suspended


class Registry:
    """Outlives its coordinator: the next one finds the services that are still registered.

    Only `changes` decides that a lease has lapsed, and never because the coordinator itself was suspended.
    """

    def __init__(self, store: Store, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._live: tuple[ServiceEntry, ...] = ()
        self._revision = 0
        self._has_ended = False
        self._sent_home: dict[str, str] = {}  # name -> role of services that were told that the run has ended
        self._changed = asyncio.Condition()

    @property
    def epoch(self) -> int:
        """The epoch of this coordinator. Once a call to the store succeeds, no later one existed."""
        return self._store.epoch

    async def register(self, entry: ServiceEntry) -> float:
        """Opens a lease and returns its duration in seconds; ends that of an earlier process of the same
        name.

        Raises ReplacedError if a later process of that name is there already, RunEndedError after `end`.
        """
        await self._check_running(entry)
        newer = (await self._write(_REGISTER, _line(entry), round(self._lease_s * 1000))).decode()
        if newer:
            raise ReplacedError(
                f"{entry.name} is taken by a process that registered later (incarnation {newer}, this one "
                f"is {entry.incarnation}); stop this process or give it another --name"
            )
        await self._touch()
        return self._lease_s

    async def renew(self, entry: ServiceEntry) -> bool:
        """False if the lease has lapsed: register again. Raises RunEndedError after `end`."""
        await self._check_running(entry)
        return bool(await self._write(_RENEW, _line(entry), round(self._lease_s * 1000)))

    async def deregister(self, entry: ServiceEntry) -> None:
        await self._write(_REMOVE, _line(entry))
        self._live = tuple(other for other in self._live if other != entry)
        await self._touch()

    def end(self) -> None:
        """From now on, services that register or send a heartbeat are told that the run has ended."""
        self._has_ended = True

    async def dismiss(self) -> None:
        """Ends the run: services hear of it by their next heartbeat, and end. Returns once all have left,
        at the latest when the lease of one that hears nothing has lapsed."""
        self.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s), self._changed:
                while await self._write(_LIVE):
                    await self._changed.wait()

    async def send_home(self, expected: Mapping[str, int], timeout_s: float) -> None:
        """Ends a run whose services may still be starting. Returns once `expected`, numbers by role, were
        told and no other service came for a lease, at the latest after `timeout_s`."""
        self.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: Counter(self._sent_home.values()) >= Counter(expected))
                while True:
                    async with asyncio.timeout(self._lease_s):
                        await self._changed.wait()

    def services(self) -> tuple[ServiceEntry, ...]:
        """Those that `changes` saw last, by name."""
        return self._live

    async def changes(self) -> AsyncIterator[ServiceJoined | ServiceLeft]:
        """Yields every current service, then each join and leave; a replaced service leaves first.

        Checks after each register and deregister, and four times per lease for lapsed ones. If the last check
        was more than half a lease ago, it first gives every service another lease.
        """
        known: dict[ServiceEntry, None] = {}  # ordered, as a set is not
        looked = 0
        while True:
            revision = self._revision
            looked, live, lapsed = await self._write(_LOOK, looked, round(self._lease_s * 1000))
            self._live = _entries(live)
            now, gone = dict.fromkeys(self._live), _entries(lapsed)
            for entry in known:
                if entry not in now:
                    yield ServiceLeft(entry, lapsed=entry in gone)
            for entry in now:
                if entry not in known:
                    yield ServiceJoined(entry)
            known = now
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 4), self._changed:
                    while self._revision == revision:
                        await self._changed.wait()

    async def _check_running(self, entry: ServiceEntry) -> None:
        if self._has_ended:
            self._sent_home[entry.name] = entry.role
            await self._touch()
            raise RunEndedError("the run has ended")

    async def _touch(self) -> None:
        async with self._changed:
            self._revision += 1
            self._changed.notify_all()

    async def _write(self, script: Script, *args: str | int) -> Any:
        return await self._store.write(script, _KEYS, *args)


def _line(entry: ServiceEntry) -> str:
    words = (entry.name, entry.incarnation, entry.role, entry.address)
    if any(len(word.split()) != 1 for word in words):
        raise UserError(f"cannot register {astuple(entry)}: its parts must not be empty or contain spaces")
    return " ".join(words)


def _entries(lines: list[bytes]) -> tuple[ServiceEntry, ...]:
    parts = sorted(line.decode().split() for line in lines)
    return tuple(ServiceEntry(role, name, incarnation, address) for name, incarnation, role, address in parts)
