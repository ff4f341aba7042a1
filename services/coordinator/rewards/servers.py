"""The external servers of a run: registration, health, and the choice of one for each call.

A server is listed in the config or was registered. Registered servers are kept in the store, for the run's
next coordinator, until they are removed or have been unhealthy for LEASE_S.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, TypeVar, cast

from atoll.config.errors import ConfigError
from atoll.config.load import secret
from atoll.coordinator.rewards.registration import RegistrationRules
from atoll.coordinator.rewards.server_pool import RETRY_S, Name, PoolMember, ServerPool, cause_of
from atoll.external.base import ExternalClient, RewardServer
from atoll.runtime.errors import (
    AtollError,
    OverloadedError,
    ProtocolError,
    ServiceUnavailableError,
    UserError,
)
from atoll.runtime.store import Script, Store
from atoll.wire.codec.fleet import decode_stored_server, encode_server
from atoll.wire.types import ExternalServer, ScoreItem, ServerAccess, ServerHealth, Verdict

log = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_EVERY_S = 10.0  # of a healthy server without calls
MAX_FAILURES = 3  # consecutive failed calls until a server is unhealthy
MAX_RETRY_S = 30.0
LEASE_S = 300.0  # a registered server that is unhealthy for this long is removed

_SERVERS: Final = "servers"  # hash: "kind name url" -> the server, encoded
_KEEP: Final = Script("redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])")
_REMOVE: Final = Script("redis.call('HDEL', KEYS[1], unpack(ARGV))")
_FORGET: Final = Script("redis.call('DEL', KEYS[1])")


class Servers:
    def __init__(
        self,
        store: Store,
        rules: RegistrationRules,
        *,
        wait_timeout_s: float,
        changed: Callable[[], Awaitable[None]],
        connect: Callable[[ExternalServer, str | None], ExternalClient],
    ) -> None:
        """`rules` apply to registered servers. A call waits `wait_timeout_s` for a healthy server. `changed`
        is called whenever `health` has changed.
        """
        self._store = store
        self._rules = rules
        self._changed = changed
        self._connect = connect
        self._wait_timeout_s = wait_timeout_s
        self._pool = ServerPool(wait_timeout_s)
        self._store_lock = asyncio.Lock()  # keeps the store and the pool in step
        self._schedule_changed = asyncio.Event()  # a probe was moved forward
        self._became_healthy = asyncio.Condition()  # a server did

    def health(self) -> tuple[ServerHealth, ...]:
        members = sorted(self._pool, key=lambda member: member.key)
        return tuple(ServerHealth(member.server, not member.cause, member.cause) for member in members)

    def slots(self, name: str) -> int:
        """Calls that the reward servers of that name take at once, at this moment."""
        return sum(member.server.concurrency for member in self._pool.healthy(("reward", name)))

    # Membership

    async def restore(self, *, resume: bool) -> None:
        """Restores servers registered earlier in this run, unhealthy until they answer; a new run has
        none.
        """
        if not resume:
            await self._store.write(_FORGET, (_SERVERS,))
            return
        for content in await self._store.read("HVALS", _SERVERS):
            server = decode_stored_server(content)
            try:
                token = self._rules.readmit(server)
                client = self._connect(server, token)
            except UserError as error:
                log.warning("%s is left out: %s", server, error)
                continue
            cause = "the coordinator was restarted and has not probed it yet"
            await self._enter(PoolMember(server, client, token, True, cause, unhealthy_since=now()))

    async def open(self, servers: Sequence[ExternalServer]) -> None:
        """Opens the servers of the config. Raises UserError if one does not answer properly."""
        await asyncio.gather(*(self._open(server) for server in servers))

    async def add(self, server: ExternalServer) -> None:
        """Adds a server, replacing one with the same kind, name and URL.

        Raises UserError if the rules do not allow it, or if it violates its protocol; its response is only
        logged.
        """
        server, token = await self._rules.admit(server)
        client = self._connect(server, token)
        member = PoolMember(server, client, token, True)
        old = self._pool.get(member.key)
        try:
            if old and not old.is_registered:
                raise UserError(f"{old} is listed in the run's config, in [[servers]]")
            try:
                found = await self._probe(member)
            except AtollError as error:
                log.warning("%s was not added: %s", member, cause_of(member.server, error))
                raise UserError(
                    f"{member}: {member.public_error(error)}; see the coordinator's log for the response"
                ) from None
            async with self._store_lock:
                await self._store.write(
                    _KEEP, (_SERVERS,), member.key, encode_server(server).SerializeToString()
                )
                old = self._add_member(member)
        except BaseException:
            await client.close()
            raise
        log.info("%s joins: %s", member, found)
        await self._replace(old, member)

    async def remove(self, kind: str, name: str, url: str) -> int:
        """Removes registered servers of that name, or the one at `url`; returns their number. Pending calls
        are finished. Raises UserError for servers of the config.
        """
        named = [member for member in self._pool if member.name == (kind, name)]
        found = [member for member in named if url in ("", member.server.url)]
        leaving = [member for member in found if member.is_registered]
        if found and not leaving:
            raise UserError(
                f"{found[0]} is listed in the run's config: remove it from [[servers]], and --resume"
            )
        for member in leaving:
            await self._evict(member, "it was deregistered")
        return len(leaving)

    async def close(self) -> None:
        for member in self._pool:
            await member.client.close()

    def missing(self, names: Collection[Name]) -> list[Name]:
        """Those without a healthy server."""
        return [name for name in names if not self._pool.healthy(name)]

    async def wait_for(self, names: Collection[Name]) -> None:
        """Waits until each has a healthy server; unblocked by registrations and recoveries."""
        async with self._became_healthy:
            await self._became_healthy.wait_for(lambda: not self.missing(names))

    async def _open(self, server: ExternalServer) -> None:
        try:
            token = secret(server.auth) if server.auth else None
            member = PoolMember(server, self._connect(server, token), token, is_registered=False)
            log.info("%s joins: %s", member, await self._probe(member))
        except (AtollError, ConfigError) as error:
            raise UserError(
                f"[[servers]]: {server}: {cause_of(server, error)}; start it before the run, or remove it "
                "from the config and `atoll register` it later"
            ) from None
        await self._enter(member)

    async def _enter(self, member: PoolMember) -> None:
        await self._replace(self._add_member(member), member)

    def _add_member(self, member: PoolMember) -> PoolMember | None:
        """Without awaiting, since another server may take the same key. Returns the replaced one."""
        old = self._pool.put(member)
        self._probe_in(member, 0.0 if member.cause else PROBE_EVERY_S)
        return old

    async def _replace(self, old: PoolMember | None, member: PoolMember) -> None:
        if old:
            await self._close_when_idle(old)
        await self._apply_health(member)

    async def _evict(self, member: PoolMember, why: str) -> None:
        async with self._store_lock:
            if self._pool.get(member.key) is not member:
                return  # it was removed or registered again in the meantime
            await self._store.write(_REMOVE, (_SERVERS,), member.key)
            self._pool.remove(member)
        log.warning("%s was removed: %s", member, why)
        await self._close_when_idle(member)
        await self._changed()

    async def _close_when_idle(self, member: PoolMember) -> None:
        """Lets pending calls finish."""
        member.has_left = True
        if not member.in_hand:
            await member.client.close()

    async def _apply_health(self, member: PoolMember) -> None:
        """Applies a server's new health."""
        if not member.cause:
            async with self._became_healthy:
                self._became_healthy.notify_all()
            self._pool.dispatch(member.name)
        await self._changed()

    # Health

    async def watch(self) -> None:
        """Consumes servers whose probe is due; waits for the next probe time; unblocked by earlier probes.
        Ends only with an error of the store.
        """
        async with asyncio.TaskGroup() as probes:
            while True:
                self._schedule_changed.clear()
                begun = now()
                for member in self._pool:
                    if member.due <= begun:
                        member.due = math.inf
                        probes.create_task(self._check(member))
                due = min((member.due for member in self._pool), default=math.inf)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(None if due == math.inf else due):
                        await self._schedule_changed.wait()

    async def _check(self, member: PoolMember) -> None:
        """Probes a server, unless its calls show its health."""
        is_talking = member.in_hand or now() - member.last_answered < PROBE_EVERY_S
        if not member.cause and is_talking:
            self._probe_in(member, PROBE_EVERY_S)
            return
        member.in_hand += 1
        try:
            await self._probe(member)
        except AtollError as error:
            await self._record_failure(member, error)
        else:
            await self._record_recovery(member)
        finally:
            await self._pool.release(member)

    async def _probe(self, member: PoolMember) -> str:
        timeout_s = member.server.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(member, member.client.probe())
        except TimeoutError:
            raise ServiceUnavailableError(f"no answer to a probe within {timeout_s:g} s") from None
        except OverloadedError as error:
            return str(error)  # busy counts as an answer

    async def _record_failure(self, member: PoolMember, error: AtollError) -> None:
        """A call or a probe failed. Missing responses are tolerated a few times; a wrong response makes a
        server unhealthy at once.
        """
        member.failures += 1
        was_healthy = not member.cause
        if was_healthy and isinstance(error, ServiceUnavailableError) and member.failures < MAX_FAILURES:
            self._probe_in(member, member.pause_s)
            return
        if was_healthy:
            member.cause = member.public_error(error)
            log.warning("%s is unhealthy and gets no calls: %s", member, cause_of(member.server, error))
            member.unhealthy_since = min(member.unhealthy_since, now())
            await self._apply_health(member)
        elif member.is_registered and not member.has_left and now() - member.unhealthy_since >= LEASE_S:
            await self._evict(member, f"it was unhealthy for {LEASE_S:g} s: {member.cause}")
            return
        self._probe_in(member, member.pause_s)
        member.pause_s = min(2 * member.pause_s, MAX_RETRY_S)

    async def _record_recovery(self, member: PoolMember) -> None:
        """A probe succeeded; earlier failures count until the next probe or call succeeds."""
        self._probe_in(member, PROBE_EVERY_S)
        if not member.cause:
            self._reset_failures(member)
            return
        log.info("%s is healthy again", member)
        member.cause, member.failures = "", 0
        await self._apply_health(member)

    def _reset_failures(self, member: PoolMember) -> None:
        member.failures, member.pause_s, member.unhealthy_since = 0, RETRY_S, math.inf

    def _probe_in(self, member: PoolMember, seconds: float) -> None:
        member.due = now() + seconds
        self._schedule_changed.set()

    # Calls

    async def wait_until_dispatched(self, name: str) -> None:
        """Waits until every waiting call has a server and one has room, or until no server has been healthy
        for too long.
        """
        with suppress(ServiceUnavailableError):
            async with self._pool.acquire(("reward", name)):
                pass

    async def score(self, name: str, items: Sequence[ScoreItem]) -> list[Verdict]:
        """Verdicts of one of the reward servers of that name, or of another one if it fails.

        Raises the last server's error, OverloadedError if it was busy, and ServiceUnavailableError if none
        was healthy for too long.
        """
        tried: list[PoolMember] = []
        while True:
            async with self._pool.acquire(("reward", name), tried) as member:
                try:
                    verdicts = await _answer(member, cast(RewardServer, member.client).score(items))
                except AtollError as error:
                    tried.append(member)
                    # an unhealthy one has already failed another call
                    if not (member.cause or isinstance(error, OverloadedError)):
                        await self._record_failure(member, error)
                    if all(other in tried for other in self._pool.healthy(("reward", name))):
                        raise type(error)(f"{member}: {member.public_error(error)}") from error
                else:
                    member.last_answered = now()
                    self._reset_failures(member)
                    return verdicts

    @asynccontextmanager
    async def occupy(self, name: str) -> AsyncIterator[ServerAccess]:
        """One of the environment servers of that name, for an episode, which takes one of its `concurrency`
        places. Waits for a place; unblocked by episodes that end, joins and recoveries. Raises
        ServiceUnavailableError if none is healthy for too long."""
        async with self._pool.acquire(("env", name)) as member:
            yield member.access

    async def tools(self, names: Sequence[str]) -> list[ServerAccess]:
        """All healthy tool servers of these names. Waits until each name has one; unblocked by registrations
        and recoveries. Raises ServiceUnavailableError if one has none for too long."""
        wanted: list[Name] = [("tool", name) for name in names]
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                await self.wait_for(wanted)
        except TimeoutError:
            missing = ", ".join(name for _, name in self.missing(wanted))
            raise ServiceUnavailableError(
                f"waited {self._wait_timeout_s:g} s for a healthy tool server {missing}: register one"
            ) from None
        return [member.access for name in wanted for member in self._pool.healthy(name)]

    async def check(self, access: ServerAccess) -> None:
        """Probes a server that a session failed at; returns once its health is known."""
        for member in self._pool:
            if member.server == access.server and not member.cause:
                try:
                    await self._probe(member)
                except AtollError as error:
                    member.failures = MAX_FAILURES
                    await self._record_failure(member, error)
                return


async def _answer(member: PoolMember, call: Awaitable[T]) -> T:
    """A protocol's library may raise anything for an invalid response, which must not end the run."""
    try:
        return await call
    except AtollError:
        raise
    except TimeoutError:
        raise ServiceUnavailableError("no answer in time") from None
    except Exception as error:
        log.exception("%s: an error that its protocol's client does not know", member)
        raise ProtocolError(f"{type(error).__name__}: {error}") from error


def now() -> float:
    return asyncio.get_running_loop().time()
