"""How weights travel to each class of replicas: planned once, when the first replica of it is seen."""

import asyncio
from collections.abc import Iterator, Sequence
from hashlib import sha256

from atoll.coordinator.fleet.replicas import Replica
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import UserError
from atoll.runtime.memory import BYTES
from atoll.weights.plan import plan
from atoll.wire.types import Catalog, Plan


class Plans:
    """Replicas with equal catalogs are a class and share one."""

    def __init__(self, dtype: str, bucket_mb: int) -> None:
        """`bucket_mb`: MiB, in `dtype`, of what one rank sends to another in one round, at most."""
        self.trainer: TrainerClient | None = None  # any incarnation of it: they keep their parts alike
        self._part_elements = (bucket_mb << 20) // BYTES[dtype]
        self._sources: Sequence[Catalog] = ()
        self._plans: dict[bytes, Plan] = {}  # by class
        self._classes: dict[str, bytes] = {}  # by the name of a replica's seat

    def __iter__(self) -> Iterator[Plan]:
        return iter(tuple(self._plans.values()))

    async def of(self, replica: Replica) -> Plan:
        """Raises UserError where replica and trainer have not the same model."""
        catalogs, key = replica.info.catalogs, self._class_of(replica)
        if key not in self._plans:
            if not self._sources:
                assert self.trainer is not None, "a plan before there is a trainer"
                self._sources = (await self.trainer.info()).shards
            try:
                self._plans[key] = await asyncio.to_thread(
                    plan, self._sources, catalogs, part_elements=self._part_elements, turn=len(self._plans)
                )
            except ValueError as error:
                raise UserError(f"{replica.entry.name} and the trainer do not fit: {error}") from error
        return self._plans[key]

    def _class_of(self, replica: Replica) -> bytes:
        """A digest of its catalogs, made once: for those of a large model it takes milliseconds."""
        name = replica.seat.name
        if name not in self._classes:
            digest = sha256()
            for catalog in replica.info.catalogs:
                digest.update("\0".join((*catalog.tensors, "")).encode())
                digest.update(catalog.boxes.tobytes())
            self._classes[name] = digest.digest()
        return self._classes[name]
