"""The rollout replicas of a run: their state, health and load."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from atoll.coordinator.fleet.routing import ContextWork, ReplicaLoad, Router
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import Arrival, RolloutClient
from atoll.runtime.errors import AtollError, EngineDiedError, ServiceUnavailableError
from atoll.wire.info import RolloutInfo
from atoll.wire.types import EngineMemory, GroupId, ServiceEntry, Version

log = logging.getLogger(__name__)

VIOLATION_S = 5.0  # pause after a protocol violation; doubles each time
MAX_VIOLATION_S = 300.0
PUSH_RETRY_S = 1.0  # pause after weights that it could not take; doubles each time in a row
MAX_PUSH_RETRY_S = 60.0
EVERYTHING = ""  # the prefix of every request's id


class ReplicaState(Enum):
    UNHEALTHY = "unhealthy"  # it has not generated since it joined, or has failed to
    HELD = "held"  # it generates and waits for the current weights
    ROUTED = "routed"
    DRAINING = "draining"  # it leaves: it finishes its work, and gets neither traffic nor weights
    LOST = "lost"  # permanently: a later incarnation of the same name is another replica


@dataclass(slots=True, eq=False)
class Replica:
    entry: ServiceEntry
    client: RolloutClient
    info: RolloutInfo
    version: Version  # that it has committed
    latest: Version = field(init=False)  # last version that it was told to commit
    state: ReplicaState = ReplicaState.UNHEALTHY
    why: str = "it just joined"  # reason of its state
    committing: bool = False  # it is committing a version and may be silent
    last_probed: float = 0.0  # when it last answered a probe
    violations: int = 0  # protocol violations and complete refusals
    excluded_until: float = 0.0  # not probed before this time
    push_failures: int = 0  # times in a row that it could not take its weights
    push_error: str = ""  # the last reason, which is logged once
    has_failed: bool = False  # since it joined
    abort_reason: str = ""  # reason of the last abort of all its samples
    last_refused: GroupId | None = None  # last refused group, if nothing has arrived since
    probe_throughput: float = math.inf  # tokens per second in its last probe, if any: a lower bound
    released: frozenset[EngineMemory] = frozenset()  # memory that it may have given to the models
    load: ReplicaLoad = field(init=False)
    state_changed: asyncio.Event = field(default_factory=asyncio.Event)  # its state has changed
    _reads: dict[asyncio.Timeout, None] = field(default_factory=dict)  # pending reads of its streams

    def __post_init__(self) -> None:
        self.latest = self.version
        self.load = ReplicaLoad(f"{self.entry.name}/{self.entry.incarnation}", self.info.slots)

    async def next(self, stream: AsyncGenerator[Arrival, None], deadline: float) -> Arrival | None:
        """The next message of one of its streams; None at the end.

        Raises ServiceUnavailableError once the replica is unhealthy or lost, TimeoutError at the deadline (in
        event-loop time). Only the read is interrupted, so that messages that have arrived are processed
        completely.
        """
        gone = (ReplicaState.UNHEALTHY, ReplicaState.LOST)
        if self.state not in gone:
            try:
                async with asyncio.timeout_at(deadline) as read:
                    self._reads[read] = None
                    try:
                        return await anext(stream, None)
                    finally:
                        self._reads.pop(read, None)
            except TimeoutError:
                if self.state not in gone:
                    raise
        raise ServiceUnavailableError(self.why)

    def has_kept(self, version: Version) -> bool:
        """Whether it joined with these weights and has generated with them since."""
        return self.version == version and not self.has_failed

    async def abort_all(self, why: object) -> None:
        """Aborts everything that it generates; open streams return the samples as aborted, with this
        reason.
        """
        log.warning("aborting all requests on %s: %s", self.entry.name, why)
        self.abort_reason = str(why)
        await self.client.abort(EVERYTHING)

    async def release(self) -> None:
        """It ends what it runs and gives its memory to the models."""
        self.released = frozenset(EngineMemory)  # perhaps also if the call fails
        await self.client.release()

    async def restore(self, memory: EngineMemory) -> None:
        """It takes released memory back: first weights, then, with a version committed, the rest."""
        await self.client.restore(memory)
        self.released -= {memory}

    def is_joinable_after(self, error: AtollError) -> bool:
        """Whether it may still have the samples of a stream that ended with `error`."""
        is_lost_stream = isinstance(error, ServiceUnavailableError) and not isinstance(error, EngineDiedError)
        return is_lost_stream and self.state not in (ReplicaState.UNHEALTHY, ReplicaState.LOST)

    def interrupt(self) -> None:
        """Interrupts the reads of all its streams."""
        now = asyncio.get_running_loop().time()
        while self._reads:
            self._reads.popitem()[0].reschedule(now)

    @contextmanager
    def track_commit(self, version: Version) -> Iterator[None]:
        """While it commits weights, it may be silent."""
        self.latest = version
        self.committing = True
        try:
            yield
            self.version = version
        finally:
            self.committing = False
            self.load.last_activity = asyncio.get_running_loop().time()


class Replicas:
    """All replicas; only those that generate and hold the current weights get traffic."""

    def __init__(self, caller: Caller, request_timeout_s: float) -> None:
        self._caller = caller
        self._timeout_s = request_timeout_s
        self._all: dict[str, Replica] = {}  # by name
        self._router = Router()
        self._changed = asyncio.Event()  # a state, or a replica has room again
        self._room = asyncio.Lock()  # of who waits for room first: the others queue
        self._tokens: dict[str, int] = {}  # finished since `take_metrics`, by name
        self._counted_from: float | None = None
        self._violations = 0  # since `take_metrics`

    async def connect(self, entry: ServiceEntry) -> Replica:
        """Connects and fetches the replica's description; it is listed once it gets its first state.

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
        """Replicas that get the current weights with the next push."""
        return frozenset(self._in(ReplicaState.HELD))

    def hold(self, replica: Replica) -> None:
        """Stops traffic until the next push."""
        self._enter(replica, ReplicaState.HELD, "it waits for weights")

    async def route(self, replica: Replica) -> None:
        self._enter(replica, ReplicaState.ROUTED, "it generates with the current weights")

    def suspend(self, replica: Replica, why: object) -> None:
        """Stops traffic until it generates again; its pending samples go to others."""
        self._enter(replica, ReplicaState.UNHEALTHY, str(why))

    def blame(self, replica: Replica, why: object) -> None:
        """Suspends it for a protocol violation, for twice as long each time."""
        replica.violations += 1
        self._violations += 1
        replica.excluded_until = now() + min(VIOLATION_S * 2**replica.violations, MAX_VIOLATION_S)
        log.warning(
            "%s violated the protocol (violation %d): %s", replica.entry.name, replica.violations, why
        )
        self.suspend(replica, why)

    def defer(self, replica: Replica, why: object) -> None:
        """Suspends a replica that could not take its weights, for twice as long each time in a row."""
        pause_s = min(PUSH_RETRY_S * 2**replica.push_failures, MAX_PUSH_RETRY_S)
        replica.excluded_until = max(replica.excluded_until, now() + pause_s)
        replica.push_failures += 1
        if replica.push_error != str(why):
            replica.push_error = str(why)
            log.warning("%s could not take its weights: %s", replica.entry.name, why)
        self.suspend(replica, why)

    def note_refusal(self, replica: Replica, group: GroupId, why: object) -> None:
        """It refused the group. A replica that refuses two groups without delivering anything in between is
        blamed.
        """
        if replica.last_refused not in (None, group):
            self.blame(replica, why)
        replica.last_refused = group

    async def drain(self, replica: Replica) -> None:
        """Stops traffic permanently; returns once its samples have arrived, or it is lost."""
        self._enter(replica, ReplicaState.DRAINING, "it leaves")
        while replica.load.in_hand:
            await self._next_change()

    def lose(self, replica: Replica, why: object) -> None:
        """Stops traffic permanently; a later incarnation of the same name is another replica."""
        self._enter(replica, ReplicaState.LOST, str(why))

    @property
    def everyone(self) -> Collection[Replica]:
        """Also those that get no traffic."""
        return [*self._all.values()]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._in(ReplicaState.ROUTED))

    def __len__(self) -> int:
        return len(self._in(ReplicaState.ROUTED))

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Raises ServiceUnavailableError if fewer than `count` replicas are ready in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self) < count:
                    await self._next_change()
        except TimeoutError:
            others = "".join(
                f"; {replica.entry.name} is {replica.state.value}: {replica.why}"
                for replica in self._all.values()
                if replica.state is not ReplicaState.ROUTED
            )
            raise ServiceUnavailableError(
                f"{len(self)} of {count} rollout replicas are ready after {timeout_s:g} s{others}; "
                "see the logs of the rollout services"
            ) from None

    async def wait_for_room(self, timeout_s: float) -> None:
        """Waits until a routed replica has room: the caller's, until it waits again. Callers take turns.
        Raises ServiceUnavailableError if none is routed for `timeout_s`.
        """
        async with self._room:
            while not any(replica.load.has_room for replica in self):
                if len(self) == 0:
                    await self.wait_for(1, timeout_s)
                else:
                    await self._next_change()

    def share(self, waiting: Iterable[ContextWork]) -> dict[Replica, list[ContextWork]]:
        """Assigns waiting work to replicas with room, in order."""
        replicas = {replica.load: replica for replica in self}
        shares: dict[Replica, list[ContextWork]] = {}
        for work, load in self._router.share(waiting, replicas, now()):
            shares.setdefault(replicas[load], []).append(work)
        return shares

    def record_finished(self, replica: Replica, arrival: Arrival, prompt_tokens: float) -> None:
        """Records samples that a replica has sent; `prompt_tokens` is their share of their prompts'
        tokens.
        """
        num_samples = len(arrival.samples)
        replica.last_refused = None
        self._router.record_finished(num_samples, arrival.num_tokens)
        replica.load.record_finished(num_samples, prompt_tokens, arrival.num_tokens, now())
        self._tokens[replica.entry.name] = self._tokens.get(replica.entry.name, 0) + arrival.num_tokens
        self._changed.set()

    def record_released(self, replica: Replica, num_samples: int, prompt_tokens: float) -> None:
        """These samples will not arrive."""
        replica.load.record_released(num_samples, prompt_tokens)
        self._changed.set()

    def backlog_s(self, replica: Replica) -> float:
        """Estimated seconds to finish all its current work, by its throughput."""
        return replica.load.tokens_in_hand(self._router.response_length) / (
            replica.load.throughput or replica.probe_throughput
        )

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call."""
        end, tokens = now(), self._tokens
        seconds = end - (end if self._counted_from is None else self._counted_from)
        violations, self._violations = self._violations, 0
        self._tokens, self._counted_from = {}, end
        total = sum(tokens.values())
        return {
            "rollout/num_routed": float(len(self)),
            "rollout/num_unhealthy": float(len(self._in(ReplicaState.UNHEALTHY))),
            "rollout/num_violations": float(violations),
            "rollout/tokens_per_s": total / seconds if seconds else 0.0,
            "rollout/max_load_share": max(tokens.values(), default=0) / max(total, 1),
        }

    def _in(self, state: ReplicaState) -> Collection[Replica]:
        return [replica for replica in self._all.values() if replica.state is state]

    def _enter(self, replica: Replica, state: ReplicaState, why: str) -> None:
        """The one place where a replica's state changes. One that leaves does not return: what would suspend
        it loses it."""
        if replica.state is ReplicaState.LOST:
            return
        if replica.state is ReplicaState.DRAINING:
            if state in (ReplicaState.HELD, ReplicaState.ROUTED):
                return
            if state is ReplicaState.UNHEALTHY:
                state = ReplicaState.LOST
        name, before = replica.entry.name, self._all.get(replica.entry.name)
        if before is not None and before is not replica:
            self._enter(before, ReplicaState.LOST, "replaced by a later process of that name")
        changes = before is not replica or replica.state is not state
        if changes or (state is ReplicaState.UNHEALTHY and replica.why != why):
            level = logging.DEBUG if _is_routine(replica, state, why) else logging.INFO
            log.log(level, "%s is %s: %s", name, state.value, why)
        self._all[name] = replica
        replica.has_failed |= state is ReplicaState.UNHEALTHY and replica.state is not state
        replica.state, replica.why = state, why
        if state is ReplicaState.ROUTED:
            replica.push_failures, replica.push_error = 0, ""
        if state is ReplicaState.LOST:
            del self._all[name]
        if changes and state in (ReplicaState.LOST, ReplicaState.UNHEALTHY):
            self._router.forget(replica.load.name)
            replica.interrupt()
        if changes:
            replica.state_changed.set()
            self._changed.set()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _is_routine(replica: Replica, state: ReplicaState, why: str) -> bool:
    """Changes of a push, and of its attempts to take weights again, which fail for the same reason."""
    if replica.push_failures > 0:
        return state is ReplicaState.HELD or why == replica.push_error
    return {replica.state, state} <= {ReplicaState.HELD, ReplicaState.ROUTED}


def now() -> float:
    return asyncio.get_running_loop().time()
