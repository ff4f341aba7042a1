"""Clients of the servers that sessions were lent, shared by all sessions of the process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar, cast
from zlib import crc32

from atoll.external.base import EnvServer, ExternalClient, Json, Tool, ToolResult, ToolServer, ToolSession
from atoll.external.grpc import GrpcTool
from atoll.external.protocols import connect
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.reward import RewardClient
from atoll.wire.types import ServerAccess

T = TypeVar("T")


class ServerClients:
    """A server's `concurrency` limits the calls of this process; connections last as long as the process.

    They belong to the agents' event loop. gRPC keeps to the service's, since it serves a second one badly.
    """

    def __init__(self) -> None:
        """Call it in the service's loop."""
        self._home = asyncio.get_running_loop()
        self._clients: dict[str, ExternalClient] = {}  # by server and token, of which none changes

    @asynccontextmanager
    async def tool_session(self, access: ServerAccess) -> AsyncIterator[ToolSession]:
        if access.server.protocol == "grpc":
            yield _ToolsAtHome(cast(GrpcTool, await self.at_home(self._client, access)), self)
            return
        async with cast(ToolServer, await self._client(access)).session() as session:
            yield session

    async def environment(self, access: ServerAccess) -> EnvServer:
        return cast(EnvServer, await self._client(access))

    async def sandbox(self, access: ServerAccess) -> RewardClient:
        """A new client of one of the run's reward services; its calls are to be made `at_home`."""

        async def connect_to_service() -> RewardClient:
            return RewardClient(access.server.url, Caller(token=access.token))

        return await self.at_home(connect_to_service)

    async def at_home(self, call: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """The call in the service's loop."""

        async def make() -> T:
            return await call(*arguments)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), self._home))

    async def _client(self, access: ServerAccess) -> ExternalClient:
        key = repr((access.server, access.token))
        if key not in self._clients:
            self._clients[key] = connect(access.server, access.token)
        return self._clients[key]


class _ToolsAtHome:
    """A tool session whose calls are made at home."""

    def __init__(self, client: GrpcTool, clients: ServerClients) -> None:
        self._client = client
        self._clients = clients

    async def tools(self) -> tuple[Tool, ...]:
        return await self._client.tools()

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        return await self._clients.at_home(self._client.call, name, arguments)


def choose(servers: Sequence[T], session: str) -> T:
    """Chooses one of several equivalent servers, always the same one for a session."""
    return servers[crc32(session.encode()) % len(servers)]
