"""The agent processes of a run, and the choice of one for each session."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from atoll.runtime.clients.agents import AgentsClient


class AgentHosts:
    """Counts the sessions that this coordinator has at each process."""

    def __init__(self) -> None:
        self._hosts: dict[AgentsClient, Mapping[str, int]] = {}  # its concurrency, by agent
        self._taken: Counter[tuple[AgentsClient, str]] = Counter()
        self._changed = asyncio.Condition()

    async def add(self, client: AgentsClient, concurrency: Mapping[str, int]) -> None:
        async with self._changed:
            self._hosts[client] = concurrency
            self._changed.notify_all()

    async def drain(self, client: AgentsClient) -> None:
        """It gets no new sessions; returns once all of its own have ended."""
        self.remove(client)
        async with self._changed:
            await self._changed.wait_for(lambda: not any(host is client for host, _ in self._taken))

    def remove(self, client: AgentsClient) -> None:
        """Its calls fail once the client is closed."""
        self._hosts.pop(client, None)

    @asynccontextmanager
    async def place(self, agent: str) -> AsyncIterator[AgentsClient]:
        """A place for one session, at the least busy process of the agent; waits until there is one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._choose(agent))
            client = self._choose(agent)
            assert client is not None
            self._taken[client, agent] += 1
        try:
            yield client
        finally:
            async with self._changed:
                self._taken[client, agent] -= 1
                if not self._taken[client, agent]:
                    del self._taken[client, agent]
                self._changed.notify_all()

    def _choose(self, agent: str) -> AgentsClient | None:
        """The process with the smallest share of its places taken; None if no place is free."""
        shares = [
            (self._taken[client, agent] / concurrency[agent], client)
            for client, concurrency in self._hosts.items()
            if agent in concurrency and self._taken[client, agent] < concurrency[agent]
        ]
        return min(shares, key=lambda share: share[0])[1] if shares else None
