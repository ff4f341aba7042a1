"""How weights travel to each class of replicas: planned once, when the first replica of it is seen."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from services.coordinator.replicas import Replica
from services.runtime.clients import TrainerClient
from services.runtime.errors import UserError
from services.runtime.memory import BYTES
from services.weights.plan import plan
from services.wire.types import Catalog, Plan


class Plans:
    """Those of one trainer. Replicas with equal catalogs are a class and share one."""

    def __init__(self, trainer: Callable[[], TrainerClient], dtype: str, bucket_mb: int) -> None:
        """`bucket_mb`: MiB, in `dtype`, of what one rank sends to another in one round, at most."""
        self._trainer = trainer
        self._part_elements = (bucket_mb << 20) // BYTES[dtype]
        self._sources: Sequence[Catalog] = ()
        self._plans: dict[tuple[tuple[tuple[str, ...], bytes], ...], Plan] = {}  # by the catalogs' content

    def __iter__(self) -> Iterator[Plan]:
        return iter(tuple(self._plans.values()))

    async def of(self, replica: Replica) -> Plan:
        """Raises UserError where replica and trainer have not the same model."""
        catalogs = replica.info.catalogs
        key = tuple((catalog.tensors, catalog.boxes.tobytes()) for catalog in catalogs)
        if key not in self._plans:
            if not self._sources:
                self._sources = (await self._trainer().info()).shards
            try:
                self._plans[key] = await asyncio.to_thread(
                    plan, self._sources, catalogs, part_elements=self._part_elements, turn=len(self._plans)
                )
            except ValueError as error:
                raise UserError(f"{replica.entry.name} and the trainer do not fit: {error}") from error
        return self._plans[key]
