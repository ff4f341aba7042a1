"""Runs uvicorn in the service's event loop, with limits on each connection."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, Self

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll.gateway.conversation import RequestError
from atoll.runtime.process import BACKLOG

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_HEADER_BYTES: Final = 64 << 10
HEADERS_TIMEOUT_S: Final = 30.0  # from a connection's beginning, or a later request's, to its headers' end
IDLE_TIMEOUT_S: Final = 600.0  # between two requests of a connection: an agent's tools take their time
STOP_GRACE_S: Final = 2.0

TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection whose headers are too long or take too long, behind a request that is being
    answered too. In an app's scope as "connection", which records whether an answer was delivered."""

    _is_lost = False  # the client left before it had all
    _in_body = False
    _header_bytes = 0
    _headers_due: asyncio.TimerHandle | None = None
    _on_reset: Callable[[], None] | None = None

    async def has_delivered(self, on_reset: Callable[[], None]) -> bool:
        """Once all that was sent is with the kernel: whether the client was still there. `on_reset` is called
        if the client then closes the connection with some of it unread, before its next request."""
        await self.flow.drain()
        if self._is_lost or (self.cycle.keep_alive and self.transport.is_closing()):
            return False
        self._on_reset = on_reset
        return True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that `drain` waits for the last byte
        self._begin_headers()

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._begin_headers()
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > MAX_HEADER_BYTES and self._headers_due is not None:
            self.transport.write(TOO_LARGE)
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers of a chunked body are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_headers()
        self._on_reset = None
        self._in_body = True
        self.scope["connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        has_all = self.cycle is None or (self.cycle.response_complete and not self.flow.write_paused)
        self._is_lost = exc is not None or not has_all
        self._end_headers()
        super().connection_lost(exc)
        if exc is not None and self._on_reset is not None:
            self._on_reset()
        self._on_reset = None  # it holds its session, and this connection is part of a reference cycle

    def _begin_headers(self) -> None:
        if self._headers_due is None:
            self._headers_due = self.loop.call_later(HEADERS_TIMEOUT_S, self.transport.close)

    def _end_headers(self) -> None:
        self._header_bytes = 0
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None


class HttpServer(uvicorn.Server):
    """Serves until `stop`. Signals stay with the process that it is a part of."""

    @classmethod
    async def start(cls, app: App, listener: socket.socket) -> Self:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(IDLE_TIMEOUT_S),
            timeout_graceful_shutdown=int(STOP_GRACE_S),
            backlog=BACKLOG,
        )
        server = cls(config)
        server._serving = asyncio.create_task(server.serve([listener]))
        return server

    _serving: asyncio.Task[None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def stop(self) -> None:
        self.should_exit = True
        await self._serving


def header(scope: Scope, name: bytes) -> str:
    """ "" if there is none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def bearer_key(scope: Scope) -> str:
    """Of the header `authorization` or `x-api-key`. Raises RequestError if there is none."""
    scheme, _, key = header(scope, b"authorization").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else header(scope, b"x-api-key")
    if not key:
        raise RequestError(
            401,
            "authentication",
            "no key: send the session's as `Authorization: Bearer KEY` or `x-api-key: KEY`",
        )
    return key
