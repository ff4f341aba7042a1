"""The servers that a session's built-in loop calls: an environment of its own, tools, sandboxes."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from atoll.config.schema import AgentConfig
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rewards.servers import Servers
from atoll.wire.types import SANDBOX, ExternalServer, ServerAccess


class SessionServers:
    """External servers are the coordinator's to choose and to watch; sessions call them themselves."""

    def __init__(self, servers: Servers, rewards: Rewards, token: str | None) -> None:
        """`token`: of the run, with which its own reward services are called."""
        self._servers = servers
        self._rewards = rewards
        self._token = token

    @asynccontextmanager
    async def lend(self, agent: AgentConfig) -> AsyncIterator[tuple[ServerAccess, ...]]:
        """Of one session; it occupies its environment until the context exits. Waits until each is there; for
        an environment also until it has a free place. Raises ServiceUnavailableError if that takes too long.
        """
        found = await self._servers.tools(agent.tool_servers)
        if agent.tools and agent.tools.functions:
            found += [
                ServerAccess(ExternalServer("tool", SANDBOX, address, "grpc"), self._token)
                for address in await self._rewards.addresses()
            ]
        if not agent.env_server:
            yield tuple(found)
            return
        async with self._servers.occupy(agent.env_server) as environment:
            yield (*found, environment)

    async def check(self, servers: Sequence[ServerAccess]) -> None:
        """One of them failed in a session: returns once the health of all is known, so that the next attempt
        does not go to the same one."""
        for access in servers:
            await self._servers.check(access)
