"""Orders weight pushes: the trainer publishes, the replicas receive and commit."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from services.coordinator.replicas import Replica, Replicas
from services.runtime.clients import TrainerClient
from services.runtime.errors import AtollError, UserError
from services.weights.plan import plan
from services.wire.types import Catalog, Plan, Published, StreamManifest, Version

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushReport:
    seconds: float
    num_bytes: int  # written by the trainer; 0: the version's bytes equal those of the last
    stall_s: float  # the longest time that one replica's generation stood still
    failed: Mapping[str, str]  # why, by the name of each replica that was dropped from the push


class WeightSync:
    """Brings replicas to the trainer's version and routes to those that hold it.

    Replicas with equal catalogs form a class: one plan, one set of streams. Pushes and late joiners
    exclude one another, so a replica never holds half of two versions.
    """

    def __init__(
        self,
        trainer: Callable[[], TrainerClient],
        replicas: Replicas,
        dtype: str,
        *,
        finish_running: bool,
    ) -> None:
        """`trainer` is asked for when a push begins. `finish_running`: a replica ends its running sequences
        before it commits; else they go on with the new weights from one token to the next."""
        self._trainer = trainer
        self._replicas = replicas
        self._dtype = dtype
        self._finish_running = finish_running
        self._sources: Sequence[Catalog] = ()
        self._plans: dict[tuple[tuple[str, ...], bytes], Plan] = {}  # by the content of a catalog
        self._trainer_has: set[str] = set()  # ids of plans
        self._have_plan: set[str] = set()  # incarnations of replicas that were sent theirs
        self._version: Version | None = None  # of the streams; None: no push has ended well
        self._streams: list[StreamManifest] = []
        self._lock = asyncio.Lock()

    async def push(self, version: Version) -> PushReport:
        """Publishes the trainer's weights as `version` and commits them on every replica.

        A replica that fails leaves the routing and this push, and is tried again at the next one; the
        others go on. Raises AtollError where the trainer fails: no replica has committed then.
        """
        async with self._lock:
            started = time.perf_counter()
            self._version, self._streams = None, []
            waiting = self._replicas.waiting
            members = {replica: await self._plan_of(replica) for replica in {*self._replicas, *waiting}}
            failed: dict[Replica, AtollError] = {}
            try:
                num_bytes = await self._stage(version, members, failed)
            except AtollError:
                await self._each(members, failed, lambda replica: replica.client.rollback_weights(version))
                raise
            stalls = await self._each(members, failed, lambda replica: self._commit(replica, version))
            self._version = version
            for replica in waiting - failed.keys():
                await self._replicas.route(replica)
            await self._each(self._replicas.waiting - waiting, failed, self._bring_up)  # joined meanwhile
            for replica, error in failed.items():
                log.warning("%s did not get the weights %s: %s", replica.entry.name, version, error)
                if replica in waiting:  # the second time in a row: it has to register anew
                    self._replicas.lose(replica, error)
                else:
                    self._replicas.hold(replica)
            return PushReport(
                seconds=time.perf_counter() - started,
                num_bytes=num_bytes,
                stall_s=max(stalls, default=0.0),
                failed={replica.entry.name: str(error) for replica, error in failed.items()},
            )

    async def catch_up(self, replica: Replica) -> None:
        """Gives a replica that has joined the current version and routes to it; the trainer does nothing.

        Before the first push, or where the replica is the first of its class, the next push includes it.
        Does not wait for a push that runs: that push sees to it at its end. Raises AtollError where the
        replica fails.
        """
        if self._lock.locked():
            self._replicas.hold(replica)
            return
        async with self._lock:
            await self._bring_up(replica)

    async def _bring_up(self, replica: Replica) -> None:
        version, streams = self._version, self._streams
        plan = await self._plan_of(replica) if version else None
        if version is None or plan is None or all(stream.plan_id != plan.id for stream in streams):
            self._replicas.hold(replica)
            return
        await self._receive({replica: plan}, version, streams, replica)
        await self._commit(replica, version)
        await self._replicas.route(replica)

    async def _plan_of(self, replica: Replica) -> Plan:
        catalog = replica.info.catalog
        key = (catalog.tensors, catalog.boxes.tobytes())
        if key not in self._plans:
            if not self._sources:
                self._sources = (await self._trainer().info()).shards
            try:
                self._plans[key] = await asyncio.to_thread(plan, self._sources, [catalog])
            except ValueError as error:
                raise UserError(f"{replica.entry.name} and the trainer do not fit: {error}") from error
        return self._plans[key]

    async def _stage(
        self, version: Version, members: Mapping[Replica, Plan], failed: dict[Replica, AtollError]
    ) -> int:
        """Replicas receive one part while the trainer writes the next. Returns bytes written."""
        num_bytes = 0
        ahead = asyncio.create_task(self._publish(version, 0))
        try:
            for part in count(1):
                published = await ahead
                if not published.last:
                    ahead = asyncio.create_task(self._publish(version, part))
                num_bytes += published.num_bytes
                self._streams += published.streams
                receive = partial(self._receive, members, version, published.streams)
                await self._each(members, failed, receive)
                if published.last:
                    break
        finally:
            ahead.cancel()
        return num_bytes

    async def _publish(self, version: Version, part: int) -> Published:
        plans = list(self._plans.values())
        new = [plan for plan in plans if plan.id not in self._trainer_has]
        try:
            published = await self._trainer().publish_weights(
                version, self._dtype, [plan.id for plan in plans], new, part
            )
        except AtollError:
            self._trainer_has.clear()  # it may be a new process
            raise
        self._trainer_has |= {plan.id for plan in new}
        return published

    async def _receive(
        self,
        members: Mapping[Replica, Plan],
        version: Version,
        streams: Sequence[StreamManifest],
        replica: Replica,
    ) -> None:
        plan, incarnation = members[replica], replica.entry.incarnation
        mine = [stream for stream in streams if stream.plan_id == plan.id]
        await replica.client.receive_weights(version, mine, None if incarnation in self._have_plan else plan)
        self._have_plan.add(incarnation)

    async def _commit(self, replica: Replica, version: Version) -> float:
        """Returns the seconds that generation stood still."""
        stall_s = await replica.client.commit_weights(version, finish_running=self._finish_running)
        replica.version = version
        return stall_s

    async def _each(
        self,
        members: Iterable[Replica],
        failed: dict[Replica, AtollError],
        action: Callable[[Replica], Awaitable[T]],
    ) -> list[T]:
        """Runs the action at once for all members that have not failed; notes those for which it fails."""

        async def attempt(replica: Replica) -> list[T]:
            try:
                return [await action(replica)]
            except AtollError as error:
                failed[replica] = error
                self._have_plan.discard(replica.entry.incarnation)
                return []

        results = await asyncio.gather(*(attempt(replica) for replica in members if replica not in failed))
        return [result for some in results for result in some]
