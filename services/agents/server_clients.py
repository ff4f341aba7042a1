"""Clients of the servers that sessions were lent, shared by all sessions of the process."""

from collections.abc import Sequence
from typing import TypeVar, cast
from zlib import crc32

from atoll.external.base import EnvServer, ExternalClient, ToolServer
from atoll.external.protocols import connect
from atoll.wire.types import ServerAccess

T = TypeVar("T")


class ServerClients:
    """Belongs to the event loop of the agents. A server's `concurrency` limits the calls of this process, and
    connections last as long as the process."""

    def __init__(self) -> None:
        self._clients: dict[str, ExternalClient] = {}  # by server and token, of which none changes

    def tools(self, access: ServerAccess) -> ToolServer:
        return cast(ToolServer, self._client(access))

    def environment(self, access: ServerAccess) -> EnvServer:
        return cast(EnvServer, self._client(access))

    def _client(self, access: ServerAccess) -> ExternalClient:
        key = repr((access.server, access.token))
        if key not in self._clients:
            self._clients[key] = connect(access.server, access.token)
        return self._clients[key]


def choose(servers: Sequence[T], session: str) -> T:
    """One of several alike, the same in each call for a session."""
    return servers[crc32(session.encode()) % len(servers)]
