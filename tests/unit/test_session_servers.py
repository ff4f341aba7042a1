"""Servers that sessions are lent, on a virtual clock: places, failures, registrations."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from atoll.config.schema import AgentConfig
from atoll.coordinator.rollouts.session_servers import SessionServers
from atoll.runtime.errors import ServiceUnavailableError
from atoll.wire.types import SANDBOX, ExternalServer, ServerAccess
from tests.fake_servers import Fake, World, watched
from tests.virtual_clock import timed

AWAY = ServiceUnavailableError("connection refused")


def agent(**tables: Any) -> AgentConfig:
    return AgentConfig.model_validate({"name": "solver", **tables})


MAZE = agent(environment={"server": "maze"})
SUMS = agent(tools={"servers": ["sums", "search"]})


def maze(url: str, concurrency: int = 1) -> ExternalServer:
    return ExternalServer("env", "maze", url, "openenv", concurrency=concurrency)


def tool(name: str, url: str) -> ExternalServer:
    return ExternalServer("tool", name, url, "mcp")


def lending(world: World, **rewards: Any) -> SessionServers:
    return SessionServers(world.servers, MagicMock(**rewards), "run-token")


def urls(lent: tuple[ServerAccess, ...]) -> list[str]:
    return [access.server.url for access in lent]


@timed
async def test_sessions_wait_while_their_environment_is_full() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, maze("a", 2), maze("b", 1)):
        servers = lending(world)
        async with AsyncExitStack() as sessions:
            lent = [urls(await sessions.enter_async_context(servers.lend(MAZE))) for _ in range(3)]
            assert sorted(lent) == [["a"], ["a"], ["b"]]
            fourth = servers.lend(MAZE)
            waiting = asyncio.create_task(fourth.__aenter__())
            await asyncio.sleep(10_000)  # however long, while one is healthy
            assert not waiting.done()
        assert urls(await waiting) in (["a"], ["b"])
        await fourth.__aexit__(None, None, None)


@timed
async def test_a_server_that_is_registered_serves_sessions_that_wait() -> None:
    world = World(a=Fake(), s=Fake(), f=Fake())
    async with watched(world):
        servers = lending(world)

        async def hold(of: AgentConfig) -> list[str]:
            async with servers.lend(of) as lent:
                return urls(lent)

        first, second = asyncio.create_task(hold(MAZE)), asyncio.create_task(hold(SUMS))
        await asyncio.sleep(1)
        await world.servers.add(maze("a"))
        await world.servers.add(tool("sums", "s"))
        assert await first == ["a"]
        await asyncio.sleep(1)
        assert not second.done()
        await world.servers.add(tool("search", "f"))
        assert await second == ["s", "f"]


@timed
async def test_waiting_for_a_server_has_an_end() -> None:
    world = World()
    async with watched(world):
        for of in (MAZE, SUMS):
            with pytest.raises(ServiceUnavailableError, match=r"waited 100 s.*(maze|sums)"):
                await lending(world).lend(of).__aenter__()


@timed
async def test_the_next_attempt_does_not_go_where_the_last_one_failed() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, maze("a", 8), maze("b", 8)):
        servers = lending(world)
        async with servers.lend(MAZE) as lent:
            [failed] = urls(lent)
            world.fakes[failed].probe_fails = AWAY
            await servers.check(lent)
        assert world.unhealthy().keys() == {failed}
        for _ in range(3):
            async with servers.lend(MAZE) as lent:
                assert urls(lent) != [failed]


@timed
async def test_functions_are_called_at_the_runs_own_services() -> None:
    world = World()
    of = agent(tools={"functions": ["examples/coding.py:read_file"]})
    async with watched(world):
        servers = lending(world, addresses=AsyncMock(return_value=["h:1", "h:2"]))
        async with servers.lend(of) as lent:
            assert [(access.server.name, access.server.url, access.token) for access in lent] == [
                (SANDBOX, "h:1", "run-token"),
                (SANDBOX, "h:2", "run-token"),
            ]
            assert "run-token" not in repr(lent)
