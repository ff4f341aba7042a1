"""Orders weight pushes: who is given which version, when, and by what."""

import asyncio
import time

from atoll.config.schema import WeightsSection
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.weight_sync.canary import Canary, CanaryCheck
from atoll.coordinator.weight_sync.catch_up import CatchUp
from atoll.coordinator.weight_sync.delivery import Delivery
from atoll.coordinator.weight_sync.epochs import Epochs
from atoll.coordinator.weight_sync.plans import Plans
from atoll.coordinator.weight_sync.push import WeightPush, causes
from atoll.coordinator.weight_sync.push_report import PushReport, report
from atoll.coordinator.weight_sync.trainer_end import TrainerEnd
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import AtollError, ServiceUnavailableError, WeightPushError
from atoll.wire.types import Version


class WeightSync:
    """Brings replicas to the trainer's version and routes to those that hold it.

    Replicas with equal catalogs form a class: one plan, one set of streams, numbered members. An epoch lasts
    for as long as its members stay the same and none fails; what was begun in one that is over is void.

    A push takes over whoever is catching up, so a replica never holds half of two versions.
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
    ) -> None:
        """`finish_running`: a replica ends its running sequences before it commits; else they go on with the
        new weights from one token to the next. `first_epoch` is above all that the services may have seen."""
        self._replicas = replicas
        self._canary = canary
        self._dtype = dtype
        self._stays_readable = weights.stays_readable
        self._plans = Plans(dtype, weights.bucket_mb)
        self._epochs = Epochs(first_epoch)
        self._delivery = Delivery(replicas, self._epochs, weights.deadline_s, finish_running=finish_running)
        self._catch_up = CatchUp(self._plans, self._delivery)
        self._trainer: TrainerEnd | None = None  # before `use_trainer`
        self._check: CanaryCheck | None = None  # of the version that was pushed last
        self._last: WeightPush | None = None  # that ended well; none: nobody catches up
        self._num_pushes = 0
        self._lock = asyncio.Lock()

    async def use_trainer(self, trainer: TrainerClient | None) -> None:
        """Its first incarnation, or the next, which has no plan and no streams; None: the last is gone. No
        replica gets traffic before it has pushed: theirs are versions of a lineage that is left."""
        async with self._lock:
            await self._catch_up.stop()
            await self._forget_version()
            self._trainer = TrainerEnd(trainer, self._dtype) if trainer else None
            self._plans.trainer = trainer
            self._epochs.end()
            for replica in self._replicas:
                self._replicas.hold(replica)

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
        if self._last is None or self._lock.locked():
            return
        if self._stays_readable:
            joining = self._catch_up.begin(replica, self._last)
            await asyncio.wait([joining])
            if not joining.cancelled():  # else a push has taken it over
                joining.result()
        elif len(self._replicas) == 0:
            await self.push(self._last.version)

    async def _push_to_all(self, version: Version) -> PushReport:
        started = time.perf_counter()
        await self._catch_up.stop()
        push = await self._begin(version)
        await push.plan([*self._replicas, *self._replicas.waiting])
        if push.failed and not push.members and self._num_pushes == 1:
            raise next(iter(push.failed.values()))  # all replicas have another model
        try:
            await push.transfer()
            live = await push.commit()
        except AtollError:
            await self._forget_version()
            await push.roll_back()
            raise
        self._last = push
        for replica, error in push.failed.items():
            self._delivery.drop(replica, error)
        if push.failed and not live and all(isinstance(e, WeightPushError) for e in push.failed.values()):
            raise WeightPushError(f"no replica takes the weights {version}: {causes(push.failed)}")
        joined = self._replicas.waiting - push.failed.keys()  # meanwhile
        if self._stays_readable:
            for replica in joined:
                self._catch_up.begin(replica, push)
        elif joined and len(self._replicas) == 0:  # nobody else would bring them up before the next step
            return await self._push_to_all(version)
        return report(time.perf_counter() - started, push.num_bytes, live, push.failed)

    async def _begin(self, version: Version) -> WeightPush:
        """The version's first push, or another one."""
        if self._trainer is None:
            raise ServiceUnavailableError("the actor is gone")
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
    """In runs without a trainer: each replica generates with the weights that it has loaded."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def catch_up(self, replica: Replica) -> None:
        await self._replicas.route(replica)
