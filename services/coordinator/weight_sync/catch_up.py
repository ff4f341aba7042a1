"""Replicas that join between two pushes."""

import asyncio

from atoll.coordinator.fleet.replicas import Replica
from atoll.coordinator.weight_sync.canary import CanaryError
from atoll.coordinator.weight_sync.delivery import Delivery
from atoll.coordinator.weight_sync.epochs import EpochMember
from atoll.coordinator.weight_sync.plans import PushPlans
from atoll.coordinator.weight_sync.push import WeightPush
from atoll.runtime.errors import AtollError
from atoll.wire.types import Membership


class CatchUp:
    """Gives joining replicas the version of the last push, as far as it is still readable, without work of
    the trainer.
    """

    def __init__(self, plans: PushPlans, delivery: Delivery) -> None:
        self._plans = plans
        self._delivery = delivery
        self._joining: set[asyncio.Task[None]] = set()

    def begin(self, replica: Replica, push: WeightPush) -> asyncio.Task[None]:
        """Ends once the replica gets traffic, with its failure as exception, or cancelled by `stop`."""
        task = asyncio.create_task(self._bring_up(replica, push))
        self._joining.add(task)
        task.add_done_callback(self._joined)
        return task

    async def stop(self) -> None:
        """A push takes over all that have begun, so that none holds halves of two versions."""
        tasks = list(self._joining)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _joined(self, task: asyncio.Task[None]) -> None:
        self._joining.discard(task)
        if not task.cancelled():
            task.exception()  # the waiter raises it, and it is logged

    async def _bring_up(self, replica: Replica, push: WeightPush) -> None:
        """Consumes the version's parts, unless the replica has kept the version. The first replica of its
        class, for which nothing was packed, is held for the next push.
        """
        try:
            if replica.has_kept(push.version):
                await self._delivery.go_live(push.version, push.check, replica)
                return
            plan = await self._plans.of(replica)
            if any(stream.plan_id == plan.id for streams in push.parts for stream in streams):
                member = EpochMember(plan, Membership(push.epoch, 1))
                for streams in push.parts:
                    await self._delivery.receive(push.version, streams, member, replica)
                await self._delivery.go_live(push.version, push.check, replica)
        except AtollError as error:
            self._delivery.drop(replica, error)
            if not isinstance(error, CanaryError):
                raise
