"""Time limits of the gateway's HTTP server, in this process with short ones."""

import socket
from typing import Any

import pytest

from atoll.gateway import app as app_module
from atoll.gateway import http_server
from atoll.gateway.apis.chat import ChatApi
from atoll.gateway.app import GatewayApp
from atoll.gateway.http_server import HttpServer, Receive, Scope, Send
from tests.gateway.raw_http import CLOSED, Answer, connection, head, read_answer

CHAT = "/v1/chat/completions"


class AnySession:
    async def of_agent(self, key: str) -> None:
        return None


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("no request is complete")


async def slow(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> Answer:
    """What a client gets that sends no more."""
    monkeypatch.setattr(http_server, "HEADERS_TIMEOUT_S", 0.2)
    monkeypatch.setattr(app_module, "BODY_TIMEOUT_S", 0.2)
    unused: Any = None
    sessions: Any = AnySession()
    control: Any = nothing
    app = GatewayApp({CHAT: ChatApi()}, {}, control, sessions, unused, rules=frozenset(), max_body_bytes=100)
    listener = socket.create_server(("127.0.0.1", 0))
    server = await HttpServer.start(app, listener)
    try:
        async with connection(listener.getsockname()[1]) as (reader, writer):
            writer.write(sent)
            return await read_answer(reader)
    finally:
        await server.stop()


@pytest.mark.parametrize("sent", [b"", b"P", b"POST / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\nx: y\r\nauthor"])
async def test_slow_headers_close_the_connection(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    assert await slow(monkeypatch, sent) == CLOSED


@pytest.mark.parametrize("path", [CHAT, "/sessions/reward", "/nowhere"])
@pytest.mark.parametrize("body", ["content-length: 50", "transfer-encoding: chunked"])
async def test_a_slow_body_is_refused(monkeypatch: pytest.MonkeyPatch, path: str, body: str) -> None:
    answer = await slow(monkeypatch, head(f"POST {path} HTTP/1.1", "x-api-key: x", body) + b"1")
    assert answer.status == 408
    assert answer.json["error"]["type"] == "invalid_request_error"
