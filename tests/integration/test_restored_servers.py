"""Registered servers in the real store: the next coordinator finds them, the last one can change nothing."""

from dataclasses import replace

import pytest

from atoll.coordinator.rewards.servers import Servers
from atoll.runtime.errors import StaleFenceError
from atoll.runtime.store import EmbeddedServer, Store
from atoll.wire.types import ExternalServer, ServerHealth
from tests.fake_servers import ADDRESS, Fake, World


def server(url: str, **settings: object) -> ExternalServer:
    return ExternalServer("reward", "judge", url, "http", **settings)  # type: ignore[arg-type]


def servers(store: Store) -> Servers:
    world = World(a=Fake(), b=Fake(), c=Fake())
    world.servers._store = store
    return world.servers


async def test_the_next_coordinator_finds_what_was_registered_and_the_one_before_is_fenced(
    store: Store,
    store_server: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "sesame-4711")
    before = servers(store)
    first = server("a", options={"preset": "slime"}, auth="env:JUDGE_TOKEN", concurrency=3, timeout_s=30.5)
    for entry in (first, server("b"), server("c")):
        await before.add(entry)
    assert await before.remove("reward", "judge", "b") == 1

    later_store = Store(store_server.url, request.node.name)
    await later_store.take_epoch()
    later = servers(later_store)
    await later.restore(resume=True)
    assert [health.server for health in later.health()] == [
        replace(first, address=ADDRESS),
        server("c", address=ADDRESS),
    ]
    assert not any(health.healthy for health in later.health())
    kept = await later_store.read("HVALS", "servers")
    assert all(b"4711" not in content for content in kept)
    with pytest.raises(StaleFenceError):
        await before.add(server("b"))
    with pytest.raises(StaleFenceError):
        await before.remove("reward", "judge", "a")

    await servers(later_store).restore(resume=False)
    anew = servers(later_store)
    await anew.restore(resume=True)
    assert anew.health() == ()
    await anew.open([server("b")])
    assert anew.health() == (ServerHealth(server("b"), True),)
    await later_store.close()
