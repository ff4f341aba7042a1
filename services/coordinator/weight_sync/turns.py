"""Whose turn it is, if models and replicas take turns on the same devices."""

import asyncio
import time

from atoll.coordinator.algorithm.models import Models
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.runtime.errors import AtollError
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import EngineMemory


class DeviceTurns:
    """The models' turn begins when a step's groups are taken, and ends within the push.

    A push hands the devices over in two parts. While weights are transferred, models keep only the actor's
    parameters, and replicas have memory for weights. Once the trainer has answered the canary, models keep
    nothing; a replica takes memory for keys and values when it has committed.
    """

    def __init__(self, replicas: Replicas, *, shared: bool) -> None:
        """`shared`: whether there are turns; otherwise replicas have devices of their own, and nothing here
        does anything."""
        self._replicas = replicas
        self.shared = shared
        self._models: Models = {}
        self._are_models = shared  # a replica that joins first waits for the first push
        self._timer = StepTimer()  # since `take_metrics`
        self._restoring: dict[Replica, float] = {}  # seconds since `take_metrics`

    def use_models(self, models: Models) -> None:
        """The run's models from now on, by role; none while a trainer is lost."""
        self._models = models

    async def to_models(self) -> None:
        """Replicas end what they still run, which nobody waits for, and release their memory. One that does
        not is suspended, and asked again before it may rejoin."""
        if not self.shared:
            return
        self._are_models = True
        with self._timer.phase("release"):
            for replica in self._replicas:
                self._replicas.hold(replica)
            await asyncio.gather(*(self._put_to_sleep(replica) for replica in self._replicas.everyone))

    async def make_room_for_weights(self) -> None:
        """The actor keeps its parameters, to publish them; gradients, optimizer state and all other models
        leave the devices."""
        if not self.shared:
            return
        with self._timer.phase("offload"):
            for role, model in self._models.items():
                await model.offload(keep_parameters=role == "actor")

    async def to_replicas(self) -> None:
        """The models leave the devices, which are shared."""
        with self._timer.phase("offload"):
            for model in self._models.values():
                await model.offload()
        self._are_models = False

    async def restore(self, replica: Replica, memory: EngineMemory) -> None:
        """Has the replica take memory that it has released. Raises AtollError if it fails."""
        if memory in replica.released:
            started = time.perf_counter()
            await replica.restore(memory)
            seconds = time.perf_counter() - started
            self._restoring[replica] = self._restoring.get(replica, 0.0) + seconds

    async def may_generate(self, replica: Replica) -> bool:
        """Whether a replica without traffic can be probed. In the models' turn, it has to release its memory
        instead. Raises AtollError if it fails."""
        if self._are_models:
            await replica.release()
        return not replica.released

    def take_metrics(self) -> dict[str, float]:
        """Seconds of the hand-overs since the last call; of restoring, the slowest replica's."""
        metrics, self._timer = self._timer.metrics(), StepTimer()
        if self._restoring:
            metrics["timing_s/resume"] = max(self._restoring.values())
            self._restoring = {}
        return metrics

    async def _put_to_sleep(self, replica: Replica) -> None:
        try:
            await replica.release()
        except AtollError as error:
            self._replicas.suspend(replica, error)
