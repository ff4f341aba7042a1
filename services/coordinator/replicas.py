"""The rollout replicas of a run: who is there, who may get work, how much each has."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.coordinator.groups import PendingGroup
from services.runtime.clients import Caller, RolloutClient, RolloutInfo
from services.runtime.errors import ServiceUnavailableError
from services.wire.types import ServiceEntry, Version

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Replica:
    entry: ServiceEntry
    client: RolloutClient
    info: RolloutInfo
    version: Version  # that it has committed
    outstanding: int = 0  # samples that it has been sent and not answered


class Replicas:
    """Only replicas that hold the current weights are routed to."""

    def __init__(self, caller: Caller, request_timeout_s: float) -> None:
        self._caller = caller
        self._timeout_s = request_timeout_s
        self._routed: dict[str, Replica] = {}
        self._waiting: set[Replica] = set()  # to be given the current weights by the next push
        self._changed = asyncio.Condition()

    async def connect(self, entry: ServiceEntry) -> Replica:
        """A client and the replica's description. Raises ServiceUnavailableError."""
        client = RolloutClient(entry.address, self._caller, self._timeout_s)
        info = await client.info()
        return Replica(entry, client, info, info.version)

    @property
    def waiting(self) -> frozenset[Replica]:
        return frozenset(self._waiting)

    def hold(self, replica: Replica) -> None:
        """No traffic before the next push."""
        if self._routed.get(replica.entry.name) is replica:
            del self._routed[replica.entry.name]
        self._waiting.add(replica)

    async def route(self, replica: Replica) -> None:
        self._waiting.discard(replica)
        async with self._changed:
            self._routed[replica.entry.name] = replica
            self._changed.notify_all()

    def lose(self, replica: Replica, why: object) -> None:
        """No more traffic; a later incarnation of the same name is another replica."""
        self._waiting.discard(replica)
        if self._routed.get(replica.entry.name) is replica:
            del self._routed[replica.entry.name]
            log.warning("%s leaves the routing: %s", replica.entry.name, why)

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._routed.values()))

    def __len__(self) -> int:
        return len(self._routed)

    async def wait_for(self, count: int, timeout_s: float) -> None:
        """Raises ServiceUnavailableError where fewer than `count` replicas are there in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: len(self._routed) >= count)
        except TimeoutError:
            raise ServiceUnavailableError(
                f"{len(self._routed)} of {count} rollout replicas are ready after {timeout_s:g} s; "
                "see logs/rollout-*.log of the run"
            ) from None

    def share(self, groups: Sequence[PendingGroup]) -> dict[Replica, list[PendingGroup]]:
        """Each group goes whole to the replica with the fewest samples in hand."""
        shares: dict[Replica, list[PendingGroup]] = {}
        for group in groups:
            replica = min(self._routed.values(), key=lambda r: r.outstanding)
            replica.outstanding += len(group.missing)
            shares.setdefault(replica, []).append(group)
        return shares
