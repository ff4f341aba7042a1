"""One weight push: transfers a version from the trainer to the replicas."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TypeVar

from atoll.coordinator.fleet.replicas import Replica, ReplicaState
from atoll.coordinator.weight_sync.canary import CanaryCheck
from atoll.coordinator.weight_sync.delivery import Delivery
from atoll.coordinator.weight_sync.epochs import EpochMember, Epochs
from atoll.coordinator.weight_sync.plans import PushPlans
from atoll.coordinator.weight_sync.push_report import LiveReplica
from atoll.coordinator.weight_sync.trainer_end import TrainerEnd
from atoll.runtime.errors import AtollError, UserError, WeightPushError
from atoll.wire.types import Membership, Plan, PublishedPart, StreamManifest, Version

T = TypeVar("T")
log = logging.getLogger(__name__)


class WeightPush:
    """Of `version` to `members`: plan, transfer, and commit or roll back.

    Failed members are recorded in `failed`; the others continue without them.
    """

    def __init__(
        self,
        version: Version,
        trainer: TrainerEnd,
        plans: PushPlans,
        epochs: Epochs,
        delivery: Delivery,
        check: CanaryCheck,
        *,
        stays_readable: bool,
    ) -> None:
        """`stays_readable`: the transport's trait, see config/transports.py."""
        self.version = version
        self.check = check
        self.members: dict[Replica, Plan] = {}
        self.failed: dict[Replica, AtollError] = {}
        self.parts: list[Sequence[StreamManifest]] = []  # that the trainer has sent, in the last epoch
        self.epoch = epochs.number  # the last one
        self.num_bytes = 0  # that the trainer has sent, in all epochs
        self._trainer = trainer
        self._plans = plans
        self._epochs = epochs
        self._delivery = delivery
        self._stays_readable = stays_readable

    async def plan(self, replicas: Iterable[Replica]) -> None:
        """Adds the replicas as members; one with a different model fails."""
        for replica in replicas:
            try:
                self.members[replica] = await self._plans.of(replica)
            except UserError as error:
                self.failed[replica] = error

    async def transfer(self) -> None:
        """Runs epochs until every member that has not failed has staged the whole version. Raises AtollError
        if the trainer fails.

        Each epoch has fewer members than the last, except for one that all may retry.
        """
        tried_again = False
        going = {
            replica: plan
            for replica, plan in self.members.items()
            if self._stays_readable or replica.version != self.version
        }
        while going or self._stays_readable:
            left = await self._stage(self._epochs.of(going))
            out = left if tried_again else self._to_blame(left, len(going))
            self.failed |= out
            if left:
                self._epochs.end()
            going = {replica: plan for replica, plan in going.items() if replica not in out}
            if not left or (out and self._stays_readable):
                break
            tried_again |= not out
            log.warning("%s continues in a new epoch: %s", self.version, causes(left))

    async def commit(self) -> Mapping[Replica, LiveReplica]:
        """Returns the members on which the version is live. Raises AtollError if the trainer fails, for which
        no replica is to blame.
        """
        self.check.ask_trainer()
        left = {replica for replica in self.members if replica.state is ReplicaState.DRAINING}
        staged = [replica for replica in self.members if replica not in self.failed.keys() | left]
        live, failed = await _all_at_once(staged, partial(self._delivery.go_live, self.version, self.check))
        self.failed |= failed
        await self.check.wait_for_trainer()
        return live

    async def roll_back(self) -> None:
        await _all_at_once(self.members, partial(self._delivery.roll_back, self.version))

    def _to_blame(self, left: Mapping[Replica, AtollError], num_members: int) -> Mapping[Replica, AtollError]:
        """Which replicas, of those that left an epoch, are excluded from the push.

        A transport error may be caused by others: a lost replica affects its whole class, and if nobody
        succeeded, the trainer may be the cause.
        """
        gone = {r: error for r, error in left.items() if not isinstance(error, WeightPushError)}
        if gone and not self._stays_readable:
            return gone
        return left if gone or len(left) < num_members else {}

    async def _stage(self, members: Mapping[Replica, EpochMember]) -> dict[Replica, AtollError]:
        """One epoch: replicas receive one part while the trainer sends the next. Returns the members that
        left it.

        Ends with the last part, or with the first one that a member misses and others wait for.
        """
        self.epoch, self.parts = self._epochs.number, []
        left: dict[Replica, AtollError] = {}
        ahead = asyncio.create_task(self._publish(members, 0))
        try:
            for part in count(1):
                published = await ahead
                if published.last:
                    self.check.ask_trainer()  # which has nothing else to do
                else:
                    ahead = asyncio.create_task(self._publish(members, part))
                self.num_bytes += published.num_bytes
                self.parts.append(published.streams)
                left |= await self._receive(published.streams, members, left)
                if published.last or (left and not self._stays_readable):
                    break
        except WeightPushError as error:  # the trainer failed: nobody gets the part
            if not members:
                raise
            left |= dict.fromkeys(members.keys() - left.keys(), error)
        finally:
            ahead.cancel()
        return left

    async def _publish(self, members: Mapping[Replica, EpochMember], part: int) -> PublishedPart:
        nobody = Membership(self.epoch, 0)
        classes = {
            member.plan.id: Membership(self.epoch, member.membership.num_members)
            for member in members.values()
        }
        plans = [plan for plan in self._plans if plan.id in classes or self._stays_readable]
        to = {plan.id: classes.get(plan.id, nobody) for plan in plans}
        return await self._trainer.publish(self.version, plans, to, part)

    async def _receive(
        self,
        streams: Sequence[StreamManifest],
        members: Mapping[Replica, EpochMember],
        left: Mapping[Replica, AtollError],
    ) -> dict[Replica, AtollError]:
        """Receives one part on all members; returns those that failed."""

        async def receive(replica: Replica) -> None:
            await self._delivery.receive(self.version, streams, members[replica], replica)

        staying = [replica for replica in members if replica not in left]
        _, failed = await _all_at_once(staying, receive, together=not self._stays_readable)
        return failed


async def _all_at_once(
    members: Iterable[Replica], action: Callable[[Replica], Awaitable[T]], *, together: bool = False
) -> tuple[dict[Replica, T], dict[Replica, AtollError]]:
    """Runs the action concurrently for all members; returns results and failures.

    `together`: members wait for each other. Once one fails, the others' calls are cancelled, neither failed
    nor done.
    """
    done: dict[Replica, T] = {}
    failed: dict[Replica, AtollError] = {}

    async def attempt(replica: Replica) -> None:
        try:
            done[replica] = await action(replica)
        except AtollError as error:
            failed[replica] = error
            if together and not isinstance(error, WeightPushError):
                for other in attempts:
                    if other is not asyncio.current_task():
                        other.cancel()

    attempts = [asyncio.create_task(attempt(replica)) for replica in members]
    try:
        for outcome in await asyncio.gather(*attempts, return_exceptions=True):
            if isinstance(outcome, Exception):  # cancellation is not an Exception
                raise outcome
    finally:
        for task in attempts:
            task.cancel()
    return done, failed


def causes(failed: Mapping[Replica, AtollError]) -> str:
    return "; ".join(f"{replica.entry.name}: {error}" for replica, error in failed.items())
