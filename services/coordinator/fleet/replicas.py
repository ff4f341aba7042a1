"""The rollout replicas of a run: who is there, who may get work, how much each has."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum

from atoll.coordinator.fleet.routing import Router, Seat, Work
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import Arrival, RolloutClient
from atoll.runtime.errors import AtollError, EngineDiedError, ServiceUnavailableError
from atoll.wire.info import RolloutInfo
from atoll.wire.types import GroupId, ServiceEntry, Version

log = logging.getLogger(__name__)

VIOLATION_S = 5.0  # that a replica is out for what it sent; twice as long each time
MAX_VIOLATION_S = 300.0
EVERYTHING = ""  # the prefix of every request's id


class State(Enum):
    UNWELL = "unwell"  # it has not been seen to generate since it joined, or has failed to
    HELD = "held"  # it generates, and waits for the current weights
    ROUTED = "routed"
    LOST = "lost"  # for good: a later incarnation of the same name is another replica


@dataclass(slots=True, eq=False)
class Replica:
    entry: ServiceEntry
    client: RolloutClient
    info: RolloutInfo
    version: Version  # that it has committed
    latest: Version = field(init=False)  # that it was told to commit
    state: State = State.UNWELL
    why: str = "it has just joined"  # it is in that state
    committing: bool = False  # a new version: it may be silent
    asked: float = 0.0  # when it last answered a probe
    violations: int = 0  # times that it sent what it must not, or refused all that it was asked for
    out_until: float = 0.0  # after such a time it is not asked before then
    aborted_for: str = ""  # why all that it generated was aborted last
    refused: GroupId | None = None  # the last group that it refused, if nothing has arrived since
    alone: float = 0.0  # tokens per second of the probe when it joined: what it does at least
    seat: Seat = field(init=False)
    stirred: asyncio.Event = field(default_factory=asyncio.Event)  # its state has changed
    _reads: dict[asyncio.Timeout, None] = field(default_factory=dict)  # of its streams, at this moment

    def __post_init__(self) -> None:
        self.latest = self.version
        self.seat = Seat(f"{self.entry.name}/{self.entry.incarnation}", self.info.slots)

    async def next(self, stream: AsyncGenerator[Arrival, None]) -> Arrival | None:
        """What comes next on one of its streams; None at the end.

        Raises ServiceUnavailableError once the replica is unwell or lost, whatever the stream does. Only
        the reading is interrupted, so that what has arrived is dealt with to its end.
        """
        if self.state not in (State.UNWELL, State.LOST):
            with suppress(TimeoutError):  # its state has changed
                async with asyncio.timeout(None) as read:
                    self._reads[read] = None
                    try:
                        return await anext(stream, None)
                    finally:
                        self._reads.pop(read, None)
        raise ServiceUnavailableError(self.why)

    async def abort_all(self, why: object) -> None:
        """Ends all that it generates; streams that are still read return it as aborted, for this reason."""
        log.warning("%s is to abort everything: %s", self.entry.name, why)
        self.aborted_for = str(why)
        await self.client.abort(EVERYTHING)

    def is_joinable_after(self, error: AtollError) -> bool:
        """Whether it may still have what one of its streams, which ended by `error`, was to bring."""
        is_lost_stream = isinstance(error, ServiceUnavailableError) and not isinstance(error, EngineDiedError)
        return is_lost_stream and self.state not in (State.UNWELL, State.LOST)

    def interrupt(self) -> None:
        """Ends the reading of all its streams."""
        now = asyncio.get_running_loop().time()
        while self._reads:
            self._reads.popitem()[0].reschedule(now)

    @contextmanager
    def commits(self, version: Version) -> Iterator[None]:
        """While it commits weights, it need not be heard of."""
        self.latest = version
        self.committing = True
        try:
            yield
            self.version = version
        finally:
            self.committing = False
            self.seat.heard = asyncio.get_running_loop().time()


class Replicas:
    """Only replicas that generate and hold the current weights are routed to."""

    def __init__(self, caller: Caller, request_timeout_s: float) -> None:
        self._caller = caller
        self._timeout_s = request_timeout_s
        self._all: dict[str, Replica] = {}  # by name
        self._router = Router()
        self._changed = asyncio.Event()  # a state, or a replica has room again
        self._tokens: dict[str, int] = {}  # finished since `take_metrics`, by name
        self._counted_from: float | None = None
        self._violations = 0  # since `take_metrics`

    async def connect(self, entry: ServiceEntry) -> Replica:
        """A client and the replica's description; it takes its name's place with its first state.

        Raises ServiceUnavailableError.
        """
        client = RolloutClient(entry.address, self._caller, self._timeout_s)
        try:
            info = await client.info()
        except BaseException:
            await client.close()
            raise
        return Replica(entry, client, info, info.version)

    @property
    def waiting(self) -> frozenset[Replica]:
        """Those to be given the current weights by the next push."""
        return frozenset(self._in(State.HELD))

    def hold(self, replica: Replica) -> None:
        """No traffic before the next push."""
        self._enter(replica, State.HELD, "it waits for weights")

    async def route(self, replica: Replica) -> None:
        self._enter(replica, State.ROUTED, "it generates with the current weights")

    def suspend(self, replica: Replica, why: object) -> None:
        """No traffic until it is seen to generate; what it has in hand goes to others."""
        self._enter(replica, State.UNWELL, str(why))

    def blame(self, replica: Replica, why: object) -> None:
        """Suspends it for what it sent, each time for twice as long as the time before."""
        replica.violations += 1
        self._violations += 1
        replica.out_until = now() + min(VIOLATION_S * 2**replica.violations, MAX_VIOLATION_S)
        log.warning(
            "%s does what it must not, for the %dth time: %s", replica.entry.name, replica.violations, why
        )
        self.suspend(replica, why)

    def refused(self, replica: Replica, group: GroupId, why: object) -> None:
        """It does not take the group. One that refuses two, with nothing delivered between, is to blame
        itself."""
        if replica.refused not in (None, group):
            self.blame(replica, why)
        replica.refused = group

    def lose(self, replica: Replica, why: object) -> None:
        """No more traffic; a later incarnation of the same name is another replica."""
        self._enter(replica, State.LOST, str(why))

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._in(State.ROUTED))

    def __len__(self) -> int:
        return len(self._in(State.ROUTED))

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Raises ServiceUnavailableError where fewer than `count` replicas are there in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self) < count:
                    await self._next_change()
        except TimeoutError:
            others = "".join(
                f"; {replica.entry.name} is {replica.state.value}: {replica.why}"
                for replica in self._all.values()
                if replica.state is not State.ROUTED
            )
            raise ServiceUnavailableError(
                f"{len(self)} of {count} rollout replicas are ready after {timeout_s:g} s{others}; "
                "see logs/rollout-*.log of the run"
            ) from None

    async def wait_for_room(self, timeout_s: float) -> None:
        """Returns once a routed replica takes work. Raises ServiceUnavailableError where for `timeout_s`
        none is routed."""
        while not any(replica.seat.hungry for replica in self):
            if len(self) == 0:
                await self.wait_for(1, timeout_s)
            else:
                await self._next_change()

    def share(self, waiting: Iterable[Work]) -> dict[Replica, list[GroupId]]:
        """What each replica takes now of the work that waits, of which the first comes first."""
        replicas = {replica.seat: replica for replica in self}
        shares: dict[Replica, list[GroupId]] = {}
        for work, seat in self._router.share(waiting, replicas, now()):
            shares.setdefault(replicas[seat], []).append(work.group)
        return shares

    def finished(self, replica: Replica, arrival: Arrival, prompt_tokens: float) -> None:
        """Counts what a replica has sent; `prompt_tokens` is these samples' part of their prompts."""
        num_samples = len(arrival.samples)
        replica.refused = None
        self._router.finished(num_samples, arrival.num_tokens)
        replica.seat.finished(num_samples, prompt_tokens, arrival.num_tokens, now())
        self._tokens[replica.entry.name] = self._tokens.get(replica.entry.name, 0) + arrival.num_tokens
        self._changed.set()

    def released(self, replica: Replica, num_samples: int, prompt_tokens: float) -> None:
        """It will not send these."""
        replica.seat.released(num_samples, prompt_tokens)
        self._changed.set()

    def time_in_hand(self, replica: Replica) -> float:
        """Seconds in which it finishes all that it has, by its throughput."""
        return replica.seat.load(self._router.response_length) / (replica.seat.rate or replica.alone)

    def take_metrics(self) -> dict[str, float]:
        """Of the time since the last call."""
        end, tokens = now(), self._tokens
        seconds = end - (end if self._counted_from is None else self._counted_from)
        violations, self._violations = self._violations, 0
        self._tokens, self._counted_from = {}, end
        total = sum(tokens.values())
        return {
            "rollout/num_routed": float(len(self)),
            "rollout/num_unhealthy": float(len(self._in(State.UNWELL))),
            "rollout/num_violations": float(violations),
            "rollout/tokens_per_s": total / seconds if seconds else 0.0,
            "rollout/max_load_share": max(tokens.values(), default=0) / max(total, 1),
        }

    def _in(self, state: State) -> Collection[Replica]:
        return [replica for replica in self._all.values() if replica.state is state]

    def _enter(self, replica: Replica, state: State, why: str) -> None:
        """The one place where a replica's state changes."""
        if replica.state is State.LOST:
            return
        name, before = replica.entry.name, self._all.get(replica.entry.name)
        if before is not None and before is not replica:
            self._enter(before, State.LOST, "a later process has its name")
        changes = before is not replica or replica.state is not state
        if changes or (state is State.UNWELL and replica.why != why):
            of_a_push = {replica.state, state} <= {State.HELD, State.ROUTED}
            level = logging.DEBUG if of_a_push else logging.INFO
            log.log(level, "%s is %s: %s", name, state.value, why)
        self._all[name] = replica
        replica.state, replica.why = state, why
        if state is State.LOST:
            del self._all[name]
        if changes and state in (State.LOST, State.UNWELL):
            self._router.forget(replica.seat.name)
            replica.interrupt()
        if changes:
            replica.stirred.set()
            self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def now() -> float:
    return asyncio.get_running_loop().time()
