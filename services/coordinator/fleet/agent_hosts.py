"""The agent processes of a run, and the choice of one for each session."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from atoll.runtime.clients.agents import AgentsClient


class AgentHosts:
    """Counts the sessions that this coordinator has at each process."""

    def __init__(self) -> None:
        self._hosts: dict[AgentsClient, Mapping[str, int]] = {}  # its concurrency, by agent
        self._taken: Counter[tuple[AgentsClient, str]] = Counter()
        # By agent, the oldest first. A free place wakes one: thousands of sessions may wait.
        self._waiting: defaultdict[str, deque[asyncio.Future[AgentsClient]]] = defaultdict(deque)
        self._freed = asyncio.Event()

    def add(self, client: AgentsClient, concurrency: Mapping[str, int]) -> None:
        self._hosts[client] = concurrency
        for agent in concurrency:
            self._serve(agent)

    async def drain(self, client: AgentsClient) -> None:
        """It gets no new sessions; returns once all of its own have ended."""
        self.remove(client)
        while any(host is client for host, _ in self._taken):
            self._freed.clear()
            await self._freed.wait()

    def remove(self, client: AgentsClient) -> None:
        """Its calls fail once the client is closed."""
        self._hosts.pop(client, None)

    @asynccontextmanager
    async def place(self, agent: str) -> AsyncIterator[AgentsClient]:
        """A place for one session, at the least busy process of the agent. Waits until there is one; places
        go to sessions in the order in which they asked."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[agent].append(waiter)
        self._serve(agent)
        try:
            yield await waiter
        finally:
            if not waiter.cancelled():
                self._give_back(waiter.result(), agent)

    def _serve(self, agent: str) -> None:
        waiting = self._waiting[agent]
        while waiting and (client := self._choose(agent)):
            waiter = waiting.popleft()
            if not waiter.cancelled():
                self._taken[client, agent] += 1
                waiter.set_result(client)

    def _give_back(self, client: AgentsClient, agent: str) -> None:
        self._taken[client, agent] -= 1
        if not self._taken[client, agent]:
            del self._taken[client, agent]
        self._freed.set()
        self._serve(agent)

    def _choose(self, agent: str) -> AgentsClient | None:
        """The process with the smallest share of its places taken; None if no place is free."""
        shares = [
            (self._taken[client, agent] / concurrency[agent], client)
            for client, concurrency in self._hosts.items()
            if agent in concurrency and self._taken[client, agent] < concurrency[agent]
        ]
        return min(shares, key=lambda share: share[0])[1] if shares else None
