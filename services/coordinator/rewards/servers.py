"""Other people's servers in a run: which there are, how they are, and which one gets the next call.

A server stands in the config, or it was registered: then it is kept in the store, where the next coordinator
of the run finds it, until it is taken out or its lease ends: once it has been unwell for LEASE_S.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar, cast

from atoll.config.errors import ConfigError
from atoll.config.load import secret
from atoll.coordinator.rewards.lending import RETRY_S, Lender, Member, cause_of
from atoll.coordinator.rewards.terms import Terms
from atoll.external.base import ExternalClient, RewardServer
from atoll.runtime.errors import (
    AtollError,
    BadAnswerError,
    OverloadedError,
    ServiceUnavailableError,
    UserError,
)
from atoll.runtime.store import Script, Store
from atoll.wire.codec.fleet import decode_kept_server, encode_server
from atoll.wire.types import ExternalServer, ScoreItem, ServerHealth, Verdict

log = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_EVERY_S = 10.0  # of a server that is well and has answered nothing for as long
MAX_FAILURES = 3  # calls in a row that get no answer: then a server is unwell
MAX_RETRY_S = 30.0
LEASE_S = 300.0  # a registered server that was unwell for so long is taken out

_SERVERS: Final = "servers"  # hash: "kind name url" -> the server, encoded
_KEEP: Final = Script("redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])")
_REMOVE: Final = Script("redis.call('HDEL', KEYS[1], unpack(ARGV))")
_FORGET: Final = Script("redis.call('DEL', KEYS[1])")


class Servers:
    def __init__(
        self,
        store: Store,
        terms: Terms,
        *,
        patience_s: float,
        changed: Callable[[], Awaitable[None]],
        connect: Callable[[ExternalServer, str | None], ExternalClient],
    ) -> None:
        """`terms` are those of servers that are registered. A call waits `patience_s` for a server that is
        well. `changed` is called whenever `health` has changed."""
        self._store = store
        self._terms = terms
        self._changed = changed
        self._connect = connect
        self._lender = Lender(patience_s)
        self._keeping = asyncio.Lock()  # the store and the lender's servers change together
        self._stirred = asyncio.Event()  # a server is to be probed earlier than was known
        self._came = asyncio.Event()  # a server is well that was not

    def health(self) -> tuple[ServerHealth, ...]:
        members = sorted(self._lender, key=lambda member: member.key)
        return tuple(ServerHealth(member.server, not member.cause, member.cause) for member in members)

    def slots(self, name: str) -> int:
        """Calls that the reward servers of that name take at once, at this moment."""
        return sum(member.server.concurrency for member in self._lender.well(name))

    # Who is there

    async def restore(self, *, resume: bool) -> None:
        """Finds the servers that were registered in this run before, each unwell until it answers; a run
        that begins anew has none."""
        if not resume:
            await self._store.write(_FORGET, (_SERVERS,))
            return
        for content in await self._store.read("HVALS", _SERVERS):
            server = decode_kept_server(content)
            try:
                client = self._connect(server, self._terms.kept(server))
            except UserError as error:
                log.warning("%s is left out: %s", server, error)
                continue
            cause = "the coordinator was restarted and has not heard of it yet"
            await self._enter(Member(server, client, True, cause, unwell_since=now()))

    async def open(self, servers: Sequence[ExternalServer]) -> None:
        """Takes in those of the config. Raises UserError where one does not answer as it should."""
        await asyncio.gather(*(self._open(server) for server in servers))

    async def add(self, server: ExternalServer) -> None:
        """Takes in a server, in place of one with its kind, name and URL.

        Raises UserError if the terms do not allow it, or it does not answer as its protocol says; what it
        answered is for the log alone.
        """
        server, token = await self._terms.accepted(server)
        client = self._connect(server, token)
        member = Member(server, client, True)
        old = self._lender.get(member.key)
        try:
            if old and not old.has_lease:
                raise UserError(f"{old} stands in the run's config, in [[servers]]")
            try:
                found = await self._probe(member)
            except AtollError as error:
                log.warning("%s is not taken in: %s", member, cause_of(member.server, error))
                raise UserError(
                    f"{member}: {member.shown(error)}; the coordinator's log says what was answered"
                ) from None
            async with self._keeping:
                await self._store.write(
                    _KEEP, (_SERVERS,), member.key, encode_server(server).SerializeToString()
                )
                old = self._take_place(member)
        except BaseException:
            await client.close()
            raise
        log.info("%s joins: %s", member, found)
        await self._succeed(old, member)

    async def remove(self, kind: str, name: str, url: str) -> int:
        """Takes out registered servers of that name, or the one at `url`; returns how many there were.
        Calls that they have in hand are finished. Raises UserError for those of the config."""
        found = [member for member in self._lender.named(kind, name) if url in ("", member.server.url)]
        leaving = [member for member in found if member.has_lease]
        if found and not leaving:
            raise UserError(
                f"{found[0]} stands in the run's config: take it out of [[servers]], and --resume"
            )
        for member in leaving:
            await self._expel(member, "it was deregistered")
        return len(leaving)

    async def close(self) -> None:
        for member in self._lender:
            await member.client.close()

    def missing(self) -> list[str]:
        """Names that graders ask for and no server that is well has."""
        return [name for name in self._terms.asked if not self._lender.well(name)]

    async def wait_for_all(self) -> None:
        """Returns once every grader has a server to ask. Waits for registrations and recoveries."""
        while self.missing():
            self._came.clear()
            await self._came.wait()

    async def _open(self, server: ExternalServer) -> None:
        try:
            token = secret(server.auth) if server.auth else None
            member = Member(server, self._connect(server, token), has_lease=False)
            log.info("%s joins: %s", member, await self._probe(member))
        except (AtollError, ConfigError) as error:
            raise UserError(
                f"[[servers]]: {server}: {cause_of(server, error)}; start it before the run, or take it out "
                "of the config and `atoll register` it once it is there"
            ) from None
        await self._enter(member)

    async def _enter(self, member: Member) -> None:
        await self._succeed(self._take_place(member), member)

    def _take_place(self, member: Member) -> Member | None:
        """At once: another may be about to take the place, too. Returns who had it."""
        old = self._lender.put(member)
        self._probe_in(member, 0.0 if member.cause else PROBE_EVERY_S)
        return old

    async def _succeed(self, old: Member | None, member: Member) -> None:
        if old:
            await self._part_from(old)
        await self._noted(member)

    async def _expel(self, member: Member, why: str) -> None:
        async with self._keeping:
            if self._lender.get(member.key) is not member:
                return  # somebody else took it out meanwhile, or it was registered again
            await self._store.write(_REMOVE, (_SERVERS,), member.key)
            self._lender.remove(member)
        log.warning("%s is taken out: %s", member, why)
        await self._part_from(member)
        await self._changed()

    async def _part_from(self, member: Member) -> None:
        """Calls that it has in hand come to their end."""
        member.has_left = True
        if not member.in_hand:
            await member.client.close()

    async def _noted(self, member: Member) -> None:
        """What follows from how a server is now."""
        if not member.cause:
            self._came.set()
            self._lender.hand_out(member.server.name)
        await self._changed()

    # How they are

    async def watch(self) -> None:
        """Consumes servers whose time to be probed has come; waits for the next such time; unblocked by
        whoever is to be probed earlier. Ends by an error of the store only."""
        async with asyncio.TaskGroup() as probes:
            while True:
                self._stirred.clear()
                begun = now()
                for member in self._lender:
                    if member.due <= begun:
                        member.due = math.inf
                        probes.create_task(self._look_at(member))
                due = min((member.due for member in self._lender), default=math.inf)
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(None if due == math.inf else due):
                        await self._stirred.wait()

    async def _look_at(self, member: Member) -> None:
        """Probes a server, unless its calls show how it is."""
        is_talking = member.in_hand or now() - member.heard < PROBE_EVERY_S
        if not member.cause and is_talking:
            self._probe_in(member, PROBE_EVERY_S)
            return
        member.in_hand += 1
        try:
            await self._probe(member)
        except AtollError as error:
            await self._failed(member, error)
        else:
            await self._recovered(member)
        finally:
            await self._lender.release(member)

    async def _probe(self, member: Member) -> str:
        timeout_s = member.server.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await _answer(member, member.client.probe())
        except TimeoutError:
            raise ServiceUnavailableError(f"no answer to a probe within {timeout_s:g} s") from None
        except OverloadedError as error:
            return str(error)  # that is an answer

    async def _failed(self, member: Member, error: AtollError) -> None:
        """A call or a probe got no proper answer. A server may be silent a few times; one that answers
        something else is unwell at once."""
        member.failures += 1
        was_well = not member.cause
        if was_well and isinstance(error, ServiceUnavailableError) and member.failures < MAX_FAILURES:
            self._probe_in(member, member.pause_s)
            return
        if was_well:
            member.cause = member.shown(error)
            log.warning("%s is unwell and gets no calls: %s", member, cause_of(member.server, error))
            member.unwell_since = min(member.unwell_since, now())
            await self._noted(member)
        elif member.has_lease and not member.has_left and now() - member.unwell_since >= LEASE_S:
            await self._expel(member, f"it was unwell for {LEASE_S:g} s: {member.cause}")
            return
        self._probe_in(member, member.pause_s)
        member.pause_s = min(2 * member.pause_s, MAX_RETRY_S)

    async def _recovered(self, member: Member) -> None:
        """It has answered a probe; what it did before counts until it answers the next one, or a call."""
        self._probe_in(member, PROBE_EVERY_S)
        if not member.cause:
            self._trust(member)
            return
        log.info("%s is well again", member)
        member.cause, member.failures = "", 0
        await self._noted(member)

    def _trust(self, member: Member) -> None:
        member.failures, member.pause_s, member.unwell_since = 0, RETRY_S, math.inf

    def _probe_in(self, member: Member, seconds: float) -> None:
        member.due = now() + seconds
        self._stirred.set()

    # What they are asked

    async def wait_for_turn(self, name: str) -> None:
        """Returns once every call that waits has a server, and one has room for another; or once there has
        been no healthy server for too long."""
        with suppress(ServiceUnavailableError):
            async with self._lender.borrowed(name, ()):
                pass

    async def score(self, name: str, items: Sequence[ScoreItem]) -> list[Verdict]:
        """The verdicts of one of the reward servers of that name; of another one where it fails.

        Raises what the last one raised, OverloadedError where that has too much to do, and
        ServiceUnavailableError where none was well for too long.
        """
        tried: list[Member] = []
        while True:
            async with self._lender.borrowed(name, tried) as member:
                try:
                    verdicts = await _answer(member, cast(RewardServer, member.client).score(items))
                except AtollError as error:
                    tried.append(member)
                    # one that is unwell has failed another call already
                    if not (member.cause or isinstance(error, OverloadedError)):
                        await self._failed(member, error)
                    if all(other in tried for other in self._lender.well(name)):
                        raise type(error)(f"{member}: {member.shown(error)}") from error
                else:
                    member.heard = now()
                    self._trust(member)
                    return verdicts


async def _answer(member: Member, call: Awaitable[T]) -> T:
    """A protocol's library may raise anything at what a stranger sends: a bad answer, not the run's end."""
    try:
        return await call
    except AtollError:
        raise
    except TimeoutError:
        raise ServiceUnavailableError("no answer in time") from None
    except Exception as error:
        log.exception("%s: an error that its protocol's client does not know", member)
        raise BadAnswerError(f"{type(error).__name__}: {error}") from error


def now() -> float:
    return asyncio.get_running_loop().time()
