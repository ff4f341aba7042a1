"""Orders weight pushes: the trainer publishes, the replicas receive and commit."""

# long because epochs, commits and catching up share the state of one push

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeVar

from atoll.config.schema import WeightsSection
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.weight_sync.canary import Canary, CanaryError
from atoll.coordinator.weight_sync.plans import Plans
from atoll.coordinator.weight_sync.push_report import Live, PushReport, report
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import AtollError, ServiceUnavailableError, UserError, WeightPushError
from atoll.runtime.patience import while_it_progresses
from atoll.wire.types import (
    Float32,
    Membership,
    Plan,
    Published,
    PublishRequest,
    PushPart,
    StreamManifest,
    Version,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

ANSWER_S = 10.0  # that a replica's answer takes, beside the transport's deadline


@dataclass(frozen=True, slots=True, eq=False)
class _Seat:
    """A replica's place in an epoch."""

    plan: Plan  # of its class
    membership: Membership


class WeightSync:
    """Brings replicas to the trainer's version and routes to those that hold it.

    Replicas with equal catalogs form a class: one plan, one set of streams, numbered members. An epoch lasts
    for as long as its members stay the same and none fails; what was begun in one that is over is void.

    A push takes over whoever is catching up, so a replica never holds half of two versions.
    """

    def __init__(
        self,
        trainer: Callable[[], TrainerClient],
        replicas: Replicas,
        canary: Canary,
        weights: WeightsSection,
        dtype: str,
        *,
        finish_running: bool,
        first_epoch: int,
    ) -> None:
        """`trainer` is asked for when a push begins. `finish_running`: a replica ends its running sequences
        before it commits; else they go on with the new weights from one token to the next. `first_epoch` is
        above all that the services may have seen."""
        self._trainer = trainer
        self._replicas = replicas
        self._canary = canary
        self._dtype = dtype
        self._plans = Plans(trainer, dtype, weights.bucket_mb)
        self._stays_readable = weights.stays_readable
        self._deadline_s = weights.deadline_s
        self._finish_running = finish_running
        self._epoch = first_epoch
        self._seats: Mapping[Replica, _Seat] = {}  # of the epoch; none where it is over
        self._num_pushes = 0
        self._trainer_has: set[str] = set()  # ids of plans
        self._have_plan: set[str] = set()  # incarnations of replicas that were sent theirs
        self._version: Version | None = None  # of the parts; None: no push has ended well
        self._parts: list[Sequence[StreamManifest]] = []
        self._is_asked = True  # the trainer, what it makes of the canary's texts with the version
        self._expected: asyncio.Task[list[Float32]] | None = None  # its answer
        self._joining: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    async def push(self, version: Version) -> PushReport:
        """Publishes the trainer's weights as `version` and commits them on every replica.

        A replica that fails leaves the routing and this push; the others go on. It catches up once it
        generates, or is held for the next push where it does but computes something else. Raises AtollError
        where the trainer fails, or where every replica answers and none takes the version: nothing gets
        traffic with it then.
        """
        async with self._lock:
            return await self._push_to_all(version)

    async def catch_up(self, replica: Replica) -> None:
        """Gives a replica that generates the current version and routes to it.

        The trainer does nothing for that, but where the transport keeps nothing: there the replica is held
        for the next push, or, where no other gets traffic, this is one. It is held as well before the first
        push, where it is the first of its class, and where a push runs, which sees to it at its end. Raises
        UserError where it does not fit the trainer, AtollError where it fails.
        """
        self._replicas.hold(replica)
        version = self._version
        if version is None or self._lock.locked():
            return
        if self._stays_readable:
            joining = self._join(replica)
            await asyncio.wait([joining])
            if not joining.cancelled():  # else a push has taken it over
                joining.result()
        elif len(self._replicas) == 0:
            await self.push(version)

    async def forget_trainer(self) -> None:
        """Its next incarnation has no plan and no streams. No replica gets traffic before it has pushed:
        theirs are versions of a lineage that is left."""
        async with self._lock:
            await self._take_over_joining()
            await self._forget_version()
            self._trainer_has.clear()
            self._seats = {}
            for replica in self._replicas:
                self._replicas.hold(replica)

    async def _push_to_all(self, version: Version) -> PushReport:
        started = time.perf_counter()
        await self._take_over_joining()
        if version != self._version:
            await self._forget_version()
            self._is_asked = not self._canary.is_due(self._num_pushes)
            self._num_pushes += 1
        failed: dict[Replica, AtollError] = {}
        plans = await self._plans_of([*self._replicas, *self._replicas.waiting], failed)
        try:
            num_bytes = await self._transfer(version, plans, failed)
            self._version = version
            self._ask_trainer()
            live = await self._each(plans, failed, partial(self._go_live, version))
            if self._expected:
                await self._expected  # where the trainer failed, no replica is to blame
        except AtollError:
            await self._forget_version()
            await self._each(plans, {}, lambda replica: self._roll_back(version, replica))
            raise
        self._leave(failed)
        if failed and not live and all(isinstance(error, WeightPushError) for error in failed.values()):
            raise WeightPushError(f"no replica takes the weights {version}: {_causes(failed)}")
        joined = self._replicas.waiting - failed.keys()  # meanwhile
        if self._stays_readable:
            for replica in joined:
                self._join(replica)
        elif joined and len(self._replicas) == 0:  # nobody else would bring them up before the next step
            return await self._push_to_all(version)
        return report(time.perf_counter() - started, num_bytes, live, failed)

    async def _plans_of(
        self, members: Sequence[Replica], failed: dict[Replica, AtollError]
    ) -> dict[Replica, Plan]:
        """A replica with another model fails. Raises UserError if all have one at the first push."""
        plans: dict[Replica, Plan] = {}
        for replica in members:
            try:
                plans[replica] = await self._plans.of(replica)
            except UserError as error:
                failed[replica] = error
        if failed and not plans and self._num_pushes == 1:
            raise next(iter(failed.values()))
        return plans

    def _leave(self, failed: Mapping[Replica, AtollError]) -> None:
        for replica, error in failed.items():
            log.warning("%s did not get the weights: %s", replica.entry.name, error)
            self._seats = {}
            self._have_plan.discard(replica.entry.incarnation)  # which begins anew with it
            if isinstance(error, CanaryError):
                self._replicas.hold(replica)
            else:
                self._replicas.suspend(replica, error)

    async def _transfer(
        self, version: Version, plans: Mapping[Replica, Plan], failed: dict[Replica, AtollError]
    ) -> int:
        """Epoch after epoch until every member that has not failed has staged the version whole.

        Each epoch has fewer members than the one before, but for one that all of them may try again. Returns
        the bytes that the trainer sent.
        """
        num_bytes, tried_again = 0, False
        going = {r: plan for r, plan in plans.items() if self._stays_readable or r.version != version}
        while going or self._stays_readable:
            left: dict[Replica, AtollError] = {}
            num_bytes += await self._stage(version, self._epoch_of(going), left)
            out = left if tried_again else self._to_blame(left, len(going))
            failed |= out
            if left:
                self._seats = {}
            going = {replica: plan for replica, plan in going.items() if replica not in out}
            if not left or (out and self._stays_readable):
                break
            tried_again |= not out
            log.warning("%s goes on in a new epoch: %s", version, _causes(left))
        return num_bytes

    def _to_blame(self, left: Mapping[Replica, AtollError], num_members: int) -> Mapping[Replica, AtollError]:
        """Whom a push goes on without, of those that have left an epoch.

        A transport's error may be another's fault: a replica that is gone takes its whole class with it, and
        where nobody got through, the fault may be the trainer's.
        """
        gone = {r: error for r, error in left.items() if not isinstance(error, WeightPushError)}
        if gone and not self._stays_readable:
            return gone
        return left if gone or len(left) < num_members else {}

    def _epoch_of(self, plans: Mapping[Replica, Plan]) -> Mapping[Replica, _Seat]:
        """The one that these replicas are in, or a new one."""
        if plans.keys() != self._seats.keys():
            self._epoch += 1
            sizes = Counter(plan.id for plan in plans.values())
            numbers: dict[str, Iterator[int]] = defaultdict(count)
            self._seats = {
                replica: _Seat(plan, Membership(self._epoch, sizes[plan.id], next(numbers[plan.id])))
                for replica, plan in plans.items()
            }
        return self._seats

    async def _stage(
        self, version: Version, members: Mapping[Replica, _Seat], left: dict[Replica, AtollError]
    ) -> int:
        """One epoch: replicas receive one part while the trainer sends the next. Returns bytes sent.

        Ends with the last part, or with the first that a member misses where the others wait for it.
        """
        num_bytes, self._parts = 0, []
        ahead = asyncio.create_task(self._publish(version, members, 0))
        try:
            for part in count(1):
                published = await ahead
                if published.last:
                    self._ask_trainer()  # which has nothing else to do
                else:
                    ahead = asyncio.create_task(self._publish(version, members, part))
                num_bytes += published.num_bytes
                self._parts.append(published.streams)
                receive = partial(self._receive, version, published.streams, members)
                await self._each(members, left, receive, together=not self._stays_readable)
                if published.last or (left and not self._stays_readable):
                    break
        except WeightPushError as error:  # the trainer's: nobody gets the part
            if not members:
                raise
            left.update(dict.fromkeys(members.keys() - left.keys(), error))
        finally:
            ahead.cancel()
        return num_bytes

    async def _publish(self, version: Version, members: Mapping[Replica, _Seat], part: int) -> Published:
        nobody = Membership(self._epoch, 0)
        classes = {
            seat.plan.id: Membership(self._epoch, seat.membership.num_members) for seat in members.values()
        }
        plans = [p for p in self._plans if p.id in classes or self._stays_readable]
        new = [plan for plan in plans if plan.id not in self._trainer_has]
        try:
            published = await self._trainer().publish_weights(
                PublishRequest(
                    version, self._dtype, {p.id: classes.get(p.id, nobody) for p in plans}, new, part
                )
            )
        except AtollError:
            self._trainer_has.clear()  # it may be a new process
            raise
        self._trainer_has |= {plan.id for plan in new}
        return published

    async def _receive(
        self,
        version: Version,
        streams: Sequence[StreamManifest],
        members: Mapping[Replica, _Seat],
        replica: Replica,
    ) -> None:
        """One part. Raises ServiceUnavailableError where it takes longer than parts do."""
        seat, incarnation = members[replica], replica.entry.incarnation
        mine = [stream for stream in streams if stream.plan_id == seat.plan.id]
        new_plan = None if incarnation in self._have_plan else seat.plan
        receiving = replica.client.receive_weights(PushPart(version, mine, new_plan, seat.membership))
        await self._in_time(receiving, f"a part of {version}")
        self._have_plan.add(incarnation)

    async def _roll_back(self, version: Version, replica: Replica) -> None:
        await self._in_time(replica.client.rollback_weights(version), f"the rollback of {version}")

    async def _in_time(self, call: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._deadline_s + ANSWER_S):
                return await call
        except TimeoutError:
            raise ServiceUnavailableError(
                f"no answer to {what} within weights.deadline_s = {self._deadline_s:g} s and "
                f"{ANSWER_S:g} s more"
            ) from None

    async def _go_live(self, version: Version, replica: Replica) -> Live:
        """Commits, and routes to the replica once it computes what the trainer does. Raises CanaryError where
        it does not: what it was generating is generated anew elsewhere.

        Neither has a deadline, since running sequences may have to end first, but one of silence.
        """
        self._replicas.hold(replica)
        client, silence_s = replica.client, self._deadline_s + ANSWER_S
        with replica.commits(version):
            committing = client.commit_weights(version, finish_running=self._finish_running)
            stall_s = await while_it_progresses(committing, client.progress, silence_s)
        difference = None
        if self._expected:
            asking = self._canary.ask_replica(client, replica.info.max_length)
            got = await while_it_progresses(asking, client.progress, silence_s)
            try:
                difference = self._canary.compare(await self._expected, got)
            except CanaryError as error:
                await replica.abort_all(error)
                raise
        await self._replicas.route(replica)
        return Live(stall_s, difference)

    def _ask_trainer(self) -> None:
        """Once for a version, where the canary is due."""
        if not self._is_asked:
            self._is_asked = True
            self._expected = asyncio.create_task(self._canary.ask_trainer(self._trainer()))

    async def _forget_version(self) -> None:
        self._version, self._parts = None, []
        if self._expected:
            self._expected.cancel()
            await asyncio.gather(self._expected, return_exceptions=True)
            self._expected = None

    # Beside the pushes

    def _join(self, replica: Replica) -> asyncio.Task[None]:
        task = asyncio.create_task(self._bring_up(replica))
        self._joining.add(task)
        task.add_done_callback(self._joined)
        return task

    def _joined(self, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it hears of it, and the log has it

    async def _take_over_joining(self) -> None:
        tasks = list(self._joining)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _bring_up(self, replica: Replica) -> None:
        """Consumes the version's parts as the trainer keeps them; ends where the replica fails, or with the
        next push, which includes it."""
        version, parts = self._version, tuple(self._parts)
        assert version is not None
        try:
            plan = await self._plans.of(replica)
            if any(stream.plan_id == plan.id for streams in parts for stream in streams):
                seats = {replica: _Seat(plan, Membership(self._epoch, 1))}
                for streams in parts:
                    await self._receive(version, streams, seats, replica)
                await self._go_live(version, replica)
        except AtollError as error:
            self._leave({replica: error})
            if not isinstance(error, CanaryError):
                raise

    async def _each(
        self,
        members: Iterable[Replica],
        failed: dict[Replica, AtollError],
        action: Callable[[Replica], Awaitable[T]],
        *,
        together: bool = False,
    ) -> dict[Replica, T]:
        """Runs the action at once for all members that have not failed; notes those for which it fails.

        `together`: each waits for all others in it. Once one is gone, the others' calls are given up, neither
        failed nor done.
        """
        results: dict[Replica, T] = {}

        async def attempt(replica: Replica) -> None:
            try:
                results[replica] = await action(replica)
            except AtollError as error:
                failed[replica] = error
                self._have_plan.discard(replica.entry.incarnation)
                if together and not isinstance(error, WeightPushError):
                    for other in attempts:
                        if other is not asyncio.current_task():
                            other.cancel()

        attempts = [asyncio.create_task(attempt(replica)) for replica in members if replica not in failed]
        try:
            for outcome in await asyncio.gather(*attempts, return_exceptions=True):
                if isinstance(outcome, Exception):  # given up is no Exception
                    raise outcome
        finally:
            for task in attempts:
                task.cancel()
        return results


def _causes(failed: Mapping[Replica, AtollError]) -> str:
    return "; ".join(f"{replica.entry.name}: {error}" for replica, error in failed.items())
