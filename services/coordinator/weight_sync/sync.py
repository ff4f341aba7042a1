"""Coordinates weight pushes: which replica gets which version, and when."""

import asyncio
import time
from collections.abc import Mapping

from atoll.config.schema import WeightsSection
from atoll.coordinator.algorithm.models import Models
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.weight_sync.canary import Canary, CanaryCheck
from atoll.coordinator.weight_sync.catch_up import CatchUp
from atoll.coordinator.weight_sync.delivery import Delivery
from atoll.coordinator.weight_sync.epochs import Epochs
from atoll.coordinator.weight_sync.plans import PushPlans
from atoll.coordinator.weight_sync.push import WeightPush, causes
from atoll.coordinator.weight_sync.push_report import PushReport, summarize_push
from atoll.coordinator.weight_sync.trainer_end import TrainerEnd
from atoll.coordinator.weight_sync.turns import DeviceTurns
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import AtollError, ServiceUnavailableError, WeightPushError
from atoll.wire.types import Version


class WeightSync:
    """Brings replicas to the trainer's version and enables routing to those that hold it.

    Replicas with equal shard layouts form a class: one plan, one set of streams, numbered members. An epoch
    lasts while its members stay the same and none fails; whatever began in an earlier epoch is void.

    A push takes over replicas that are catching up, so that a replica never holds halves of two versions.
    """

    def __init__(
        self,
        replicas: Replicas,
        canary: Canary,
        weights: WeightsSection,
        dtype: str,
        *,
        finish_running: bool,
        first_epoch: int,
        takes_turns: bool = False,
    ) -> None:
        """`finish_running`: a replica ends its running sequences before it commits; otherwise they continue
        with the new weights. `first_epoch` is above all that the services may have seen.
        `takes_turns`: with the models, on the same devices.
        """
        self._replicas = replicas
        self._canary = canary
        self._dtype = dtype
        self._stays_readable = weights.stays_readable
        self._plans = PushPlans(dtype, weights.bucket_mb, weights.max_senders)
        self._epochs = Epochs(first_epoch)
        self._turns = DeviceTurns(replicas, shared=takes_turns)
        self._delivery = Delivery(
            replicas, self._turns, self._epochs, weights.deadline_s, finish_running=finish_running
        )
        self._catch_up = CatchUp(self._plans, self._delivery)
        self._trainer: TrainerEnd | None = None  # before `use_trainer`
        self._check: CanaryCheck | None = None  # of the last pushed version
        self._last: WeightPush | None = None  # last successful push; None: nobody can catch up
        self._num_pushes = 0
        self._lock = asyncio.Lock()

    async def use_trainer(self, trainer: TrainerClient | None, models: Models | None = None) -> None:
        """Sets a new incarnation of the trainer, which has no plans and no streams; None if it is lost. No
        replica gets traffic until it has pushed: their versions belong to an abandoned lineage. `models`: all
        of the run's, by role.
        """
        async with self._lock:
            await self._catch_up.stop()
            await self._forget_version()
            self._trainer = TrainerEnd(trainer, self._dtype) if trainer else None
            self._plans.trainer = trainer
            self._epochs.end()
            for replica in self._replicas:
                self._replicas.hold(replica)
            self._turns.use_models(models or {})
            await self._turns.to_models()

    async def release(self) -> None:
        """If models and replicas take turns: begins the models', which lasts until the next push. Replicas
        have nothing to do until then.
        """
        if self._turns.shared:
            async with self._lock:
                await self._catch_up.stop()
                self._last = None
                await self._turns.to_models()

    async def may_generate(self, replica: Replica) -> bool:
        """Whether a replica that is not routed has its memory; after a hand-over in progress."""
        if not self._turns.shared:
            return True
        async with self._lock:
            return await self._turns.may_generate(replica)

    async def wait_for_push(self) -> None:
        """If one of its members left in its midst, the others might have to begin it again."""
        async with self._lock:
            pass

    def take_metrics(self) -> dict[str, float]:
        """Seconds of the hand-overs since the last call."""
        return self._turns.take_metrics()

    async def push(self, version: Version) -> PushReport:
        """Publishes the trainer's weights as `version` and commits them on every replica.

        A failing replica leaves the routing and this push; the others continue. It catches up once it
        generates again, or is held for the next push if its canary differs. Raises AtollError if the trainer
        fails, or if all replicas respond and none accepts the version: then none gets traffic.
        """
        async with self._lock:
            return await self._push_to_all(version)

    async def push_and_measure(self, version: Version) -> Mapping[str, float]:
        """As `push`; returns the metrics of the push, and of the hand-overs since the last one."""
        return (await self.push(version)).metrics() | self.take_metrics()

    async def catch_up(self, replica: Replica) -> None:
        """Gives a replica that generates the current version, unless it has kept that, and routes to it.

        This needs no work of the trainer, unless the transport does not keep versions: then the replica is
        held for the next push, or, if no other gets traffic, pushed to at once. It is also held before the
        first push, if it is the first of its class, and during a push, which picks it up at its end. Raises
        UserError if it does not fit the trainer, AtollError if it fails.
        """
        self._replicas.hold(replica)
        if self._last is None or self._lock.locked():
            return
        if self._stays_readable or replica.has_kept(self._last.version):
            joining = self._catch_up.begin(replica, self._last)
            await asyncio.wait([joining])
            if not joining.cancelled():  # otherwise a push has taken it over
                joining.result()
        elif len(self._replicas) == 0:
            await self.push(self._last.version)

    async def _push_to_all(self, version: Version) -> PushReport:
        started = time.perf_counter()
        await self._catch_up.stop()
        push = await self._begin(version)
        await self._turns.make_room_for_weights()
        await push.plan([*self._replicas, *self._replicas.waiting])
        if push.failed and not push.members and self._num_pushes == 1:
            raise next(iter(push.failed.values()))  # all replicas have a different model
        try:
            await push.transfer()
            if self._turns.shared:
                await push.check.wait_for_trainer()
                await self._turns.to_replicas()
            live = await push.commit()
        except AtollError:
            await self._forget_version()
            await push.roll_back()
            raise
        self._last = push
        for replica, error in push.failed.items():
            self._delivery.drop(replica, error)
        if push.failed and not live and all(isinstance(e, WeightPushError) for e in push.failed.values()):
            raise WeightPushError(f"no replica accepted the weights {version}: {causes(push.failed)}")
        joined = self._replicas.waiting - push.failed.keys()  # joined during the push
        if self._stays_readable:
            for replica in joined:
                self._catch_up.begin(replica, push)
        elif joined and len(self._replicas) == 0:  # otherwise they would wait until the next step
            return await self._push_to_all(version)
        return summarize_push(time.perf_counter() - started, push.num_bytes, live, push.failed)

    async def _begin(self, version: Version) -> WeightPush:
        """Begins the version's first push, or repeats it."""
        if self._trainer is None:
            raise ServiceUnavailableError("the actor was lost")
        self._last = None
        if self._check is None or self._check.version != version:
            await self._forget_version()
            is_due = self._canary.is_due(self._num_pushes)
            self._check = CanaryCheck(self._canary, version, self._trainer.client, is_due=is_due)
            self._num_pushes += 1
        return WeightPush(
            version,
            self._trainer,
            self._plans,
            self._epochs,
            self._delivery,
            self._check,
            stays_readable=self._stays_readable,
        )

    async def _forget_version(self) -> None:
        self._last = None
        if self._check is not None:
            await self._check.cancel()
            self._check = None


class OwnWeights:
    """For runs without a trainer: each replica keeps the weights that it has loaded."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def may_generate(self, replica: Replica) -> bool:
        return True

    async def catch_up(self, replica: Replica) -> None:
        await self._replicas.route(replica)

    async def wait_for_push(self) -> None: ...
