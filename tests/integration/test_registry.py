"""Leases against the real store. Times are short leases, never sleeps that hope."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from atoll.coordinator.fleet.registry import Registry, ServiceJoined, ServiceLeft
from atoll.runtime.errors import ReplacedError, RunEndedError, StaleFenceError, UserError
from atoll.runtime.store import EmbeddedServer, Store
from atoll.wire.types import ServiceEntry

OLD = ServiceEntry("rollout", "rollout-0", "0001-a", "127.0.0.1:1000")
NEW = ServiceEntry("rollout", "rollout-0", "0002-b", "127.0.0.1:2000")
OTHER = ServiceEntry("trainer", "trainer-0", "0001-c", "127.0.0.1:3000")


async def following(
    changes: AsyncIterator[ServiceJoined | ServiceLeft], count: int
) -> list[ServiceJoined | ServiceLeft]:
    async with asyncio.timeout(30):
        return [await anext(changes) for _ in range(count)]


async def test_services_join_are_listed_and_leave(store: Store) -> None:
    registry = Registry(store, lease_s=60)
    changes = registry.changes()
    assert await registry.register(OTHER) == 60
    await registry.register(OLD)
    assert await following(changes, 2) == [ServiceJoined(OLD), ServiceJoined(OTHER)]
    assert registry.services() == (OLD, OTHER)
    await registry.deregister(OLD)
    assert await following(changes, 1) == [ServiceLeft(OLD)]
    assert registry.services() == (OTHER,)


async def test_a_lease_without_heartbeats_lapses_and_one_with_them_does_not(store: Store) -> None:
    registry = Registry(store, lease_s=5.0)  # a pause of some seconds is no missed heartbeat
    changes = registry.changes()
    await registry.register(OLD)
    await registry.register(OTHER)
    await following(changes, 2)
    left = asyncio.create_task(following(changes, 1))
    while not left.done():
        assert await registry.renew(OTHER)
        await asyncio.wait((left,), timeout=0.2)
    assert left.result() == [ServiceLeft(OLD)]
    assert not await registry.renew(OLD)  # so its process registers again
    await registry.register(OLD)
    assert await following(changes, 1) == [ServiceJoined(OLD)]


async def test_a_newer_incarnation_replaces_an_older_one_and_never_the_reverse(store: Store) -> None:
    registry = Registry(store, lease_s=60)
    changes = registry.changes()
    await registry.register(OLD)
    await following(changes, 1)
    await registry.register(NEW)
    assert await following(changes, 2) == [ServiceLeft(OLD), ServiceJoined(NEW)]
    assert not await registry.renew(OLD)
    with pytest.raises(ReplacedError, match=r"rollout-0 is taken.*0002-b.*--name"):
        await registry.register(OLD)
    await registry.deregister(OLD)  # the goodbye of the replaced process takes nothing away
    assert await registry.renew(NEW)


async def test_who_registers_later_is_the_newer_one_whatever_the_clock_of_its_host_says(store: Store) -> None:
    """Incarnations once began with a time, and a restart on a host whose clock was behind was refused."""
    registry = Registry(store, lease_s=60)
    changes = registry.changes()
    behind = replace(OLD, incarnation="0000-d")
    await registry.register(NEW)
    await following(changes, 1)
    await registry.register(behind)
    assert await following(changes, 2) == [ServiceLeft(NEW), ServiceJoined(behind)]
    for _ in range(2):
        with pytest.raises(ReplacedError, match="0000-d"):
            await registry.register(NEW)
    await registry.register(behind)  # as after a coordinator that was away
    await registry.deregister(behind)
    with pytest.raises(ReplacedError):  # nobody has the name now, and it is still not the replaced one's
        await registry.register(NEW)
    await registry.register(replace(OLD, incarnation="0000-e"))


async def test_the_next_coordinator_finds_the_services_and_fences_the_last(
    store_server: EmbeddedServer, store: Store, request: pytest.FixtureRequest
) -> None:
    first = Registry(store, lease_s=60)
    await first.register(OLD)
    next_store = Store(store_server.url, request.node.name)
    await next_store.take_epoch()
    second = Registry(next_store, lease_s=60)
    assert await following(second.changes(), 1) == [ServiceJoined(OLD)]
    assert await second.renew(OLD)
    with pytest.raises(StaleFenceError):
        await first.register(OTHER)
    await next_store.close()


async def test_every_follower_sees_every_change(store: Store) -> None:
    registry = Registry(store, lease_s=60)
    started_from_warmup = [asyncio.create_task(following(registry.changes(), 2)) for _ in range(3)]
    await registry.register(OLD)
    await registry.register(OTHER)
    for follower in started_from_warmup:
        assert set(await follower) == {ServiceJoined(OLD), ServiceJoined(OTHER)}


async def test_an_entry_that_would_not_come_back_the_same_is_refused(store: Store) -> None:
    registry = Registry(store, lease_s=60)
    with pytest.raises(UserError, match="spaces"):
        await registry.register(ServiceEntry("rollout", "my rollout", "1", "127.0.0.1:1"))


async def test_services_of_an_ended_run_are_awaited_by_role_and_at_most_for_the_timeout(store: Store) -> None:
    registry = Registry(store, lease_s=0.01)
    going = asyncio.create_task(registry.send_home({"rollout": 1, "trainer": 1}, timeout_s=60))
    for entry in (OLD, NEW):  # the same service started twice counts once
        await asyncio.sleep(0)
        with pytest.raises(RunEndedError):
            await registry.register(entry)
    done, _ = await asyncio.wait((going,), timeout=0.1)  # ten leases
    assert not done
    with pytest.raises(RunEndedError):
        await registry.renew(OTHER)
    await asyncio.wait_for(going, 30)
    assert await store.read("ZCARD", "leases") == 0
    await asyncio.wait_for(registry.send_home({"rollout": 3}, timeout_s=0.01), 30)
