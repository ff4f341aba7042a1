"""A coordinator that stood still takes nobody for lost: the real store's scripts, on a virtual clock."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from atoll.coordinator.fleet.registry import Registry, ServiceJoined, ServiceLeft
from atoll.runtime.store import EmbeddedServer, Script
from atoll.wire.types import ServiceEntry
from tests.virtual_clock import VirtualClock, run

LEASE_S = 8.0
ACTOR = ServiceEntry("actor", "actor", "a", "127.0.0.1:1000")
REPLICA = ServiceEntry("rollout", "rollout-0", "b", "127.0.0.1:2000")
OTHER = ServiceEntry("rollout", "rollout-1", "c", "127.0.0.1:3000")
Change = ServiceJoined | ServiceLeft


class ClockedStore:
    """The store's time is that of the event loop."""

    epoch = 1

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client = client
        self._run = run

    async def write(self, script: Script, keys: Sequence[str], *args: str | int) -> Any:
        ms = round(asyncio.get_running_loop().time() * 1000) + 1_000_000
        body = script.body.replace("redis.call('TIME')", f"{{{ms // 1000}, {ms % 1000 * 1000}}}")
        return self._client.eval(body, len(keys), *(f"{self._run}/{key}" for key in keys), *args)


@pytest.fixture
def store(store_server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[ClockedStore]:
    with redis.Redis(unix_socket_path=store_server.url.removeprefix("unix://"), protocol=2) as client:
        yield ClockedStore(client, request.node.name)


class Fleet:
    """Services that send heartbeats, and what a registry says of them."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.changes: list[tuple[float, Change]] = []
        self.alive: dict[ServiceEntry, asyncio.Task[None]] = {}

    async def follow(self) -> None:
        async for change in self.registry.changes():
            self.changes.append((asyncio.get_running_loop().time(), change))

    async def start(self, *entries: ServiceEntry) -> None:
        for entry in entries:
            await self.registry.register(entry)
            self.alive[entry] = asyncio.create_task(self._beat(entry))

    def kill(self, entry: ServiceEntry) -> None:
        self.alive.pop(entry).cancel()

    async def _beat(self, entry: ServiceEntry) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            if not await self.registry.renew(entry):
                await self.registry.register(entry)


@asynccontextmanager
async def fleet(store: ClockedStore, *entries: ServiceEntry) -> Any:
    registry = Registry(store, LEASE_S)  # type: ignore[arg-type]
    services = Fleet(registry)
    following = asyncio.create_task(services.follow())
    await services.start(*entries)
    yield services
    for task in (following, *services.alive.values()):
        task.cancel()


def stand_still(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClock)
    loop.stand_still(seconds)


@pytest.mark.parametrize("begun_s", [0.1, 1.9, 2.1, 2.7, 5.4])
def test_nobody_is_lost_by_the_coordinators_standstill_but_who_died_in_it(
    store: ClockedStore, begun_s: float
) -> None:
    """Whether heartbeats or the look at the leases come first after it."""

    async def scene() -> None:
        async with fleet(store, ACTOR, REPLICA) as services:
            await asyncio.sleep(begun_s)
            services.kill(REPLICA)
            stand_still(30.0)
            woken_s = asyncio.get_running_loop().time()
            await asyncio.sleep(60.0)
        joined = [change for _, change in services.changes[:2]]
        assert joined == [ServiceJoined(ACTOR), ServiceJoined(REPLICA)]
        [(when, left)] = services.changes[2:]
        assert left == ServiceLeft(REPLICA)
        assert left.lapsed
        assert LEASE_S <= round(when - woken_s, 3) <= 1.25 * LEASE_S

    run(scene())


def test_a_service_that_registers_after_the_standstill_ends_nobodys_lease(store: ClockedStore) -> None:
    """Its registration is what is processed first."""

    async def scene() -> None:
        async with fleet(store, ACTOR) as services:
            await asyncio.sleep(0.1)
            stand_still(30.0)
            await services.start(OTHER)
            assert await services.registry.renew(ACTOR)
            await asyncio.sleep(60.0)
        assert [change for _, change in services.changes] == [ServiceJoined(ACTOR), ServiceJoined(OTHER)]

    run(scene())


def test_a_successor_takes_the_name_also_after_a_standstill(store: ClockedStore) -> None:
    later = ServiceEntry(REPLICA.role, REPLICA.name, "d", "127.0.0.1:4000")

    async def scene() -> None:
        async with fleet(store, REPLICA) as services:
            await asyncio.sleep(0.1)
            services.kill(REPLICA)
            stand_still(30.0)
            await services.start(later)
            await asyncio.sleep(60.0)
        changes = [change for _, change in services.changes]
        assert changes == [ServiceJoined(REPLICA), ServiceLeft(REPLICA), ServiceJoined(later)]
        assert not changes[1].lapsed  # type: ignore[union-attr]

    run(scene())
