"""Transfer plans for each class of replicas, made when its first replica joins."""

import asyncio
from collections.abc import Iterator, Sequence
from hashlib import sha256

from atoll.coordinator.fleet.replicas import Replica
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import UserError
from atoll.runtime.memory import BYTES
from atoll.weights.plan import plan
from atoll.wire.types import Plan, ShardLayout


class PushPlans:
    """Replicas with equal shard layouts form a class and share a plan."""

    def __init__(self, dtype: str, bucket_mb: int, max_senders: int) -> None:
        """`bucket_mb`: MiB, in `dtype`, of what one rank sends to another in one round, at most.
        `max_senders`: a trait of the transport, see config/transports.py."""
        self.trainer: TrainerClient | None = None  # any incarnation: their layouts are the same
        self._part_elements = (bucket_mb << 20) // BYTES[dtype]
        self._max_senders = max_senders
        self._sources: Sequence[ShardLayout] = ()
        self._plans: dict[bytes, Plan] = {}  # by class
        self._classes: dict[str, bytes] = {}  # by the replica's name and incarnation

    def __iter__(self) -> Iterator[Plan]:
        return iter(tuple(self._plans.values()))

    async def of(self, replica: Replica) -> Plan:
        """Raises UserError if replica and trainer have different models."""
        shard_layouts, key = replica.info.shard_layouts, self._class_of(replica)
        if key not in self._plans:
            if not self._sources:
                assert self.trainer is not None, "a plan before there is a trainer"
                self._sources = (await self.trainer.info()).shard_layouts
            try:
                self._plans[key] = await asyncio.to_thread(
                    plan,
                    self._sources,
                    shard_layouts,
                    part_elements=self._part_elements,
                    max_senders=self._max_senders,
                    tie_break=len(self._plans),
                )
            except ValueError as error:
                raise UserError(f"{replica.entry.name} and the trainer do not fit: {error}") from error
        return self._plans[key]

    def _class_of(self, replica: Replica) -> bytes:
        """A digest of its shard layouts, cached since it takes milliseconds for a large model."""
        name = replica.load.name
        if name not in self._classes:
            digest = sha256()
            for shard_layout in replica.info.shard_layouts:
                digest.update("\0".join((*shard_layout.tensors, "")).encode())
                digest.update(shard_layout.boxes.tobytes())
            self._classes[name] = digest.digest()
        return self._classes[name]
