"""What becomes of an answer: whether its client was there to read it."""

import asyncio
import socket
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from atoll.gateway.http_server import BoundedConnection, HttpServer, Receive, Scope, Send

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class Reset:
    """The callback of a connection."""

    def __init__(self, outcomes: asyncio.Queue[str]) -> None:
        self._outcomes = outcomes

    def __call__(self) -> None:
        self._outcomes.put_nowait("reset")


class Answering:
    """An app whose answers have `size` bytes; what became of each is put into `outcomes`."""

    def __init__(self, size: int) -> None:
        self._body = b"x" * size
        self.outcomes: asyncio.Queue[str] = asyncio.Queue()
        self.connections: list[BoundedConnection] = []
        self.resets: list[weakref.ref[Reset]] = []  # callbacks that were given to connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % len(self._body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})
        connection: BoundedConnection = scope["connection"]
        reset = Reset(self.outcomes)
        self.connections.append(connection)
        self.resets.append(weakref.ref(reset))
        delivered = await connection.has_delivered(reset)
        self.outcomes.put_nowait("delivered" if delivered else "undelivered")


@asynccontextmanager
async def serving(app: Answering) -> AsyncIterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = await HttpServer.start(app, listener)
    try:
        yield listener.getsockname()[1]
    finally:
        await server.stop()


def on_both_loops(test: Callable[[], object]) -> None:
    for loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(test())  # type: ignore[arg-type]


def test_an_answer_that_is_read_is_delivered() -> None:
    async def read_it() -> None:
        app = Answering(100)
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(REQUEST)
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(100)
                assert await app.outcomes.get() == "delivered"
            writer.close()
            await writer.wait_closed()
        assert app.outcomes.empty()

    on_both_loops(read_it)


@pytest.mark.parametrize("size", [200, 20_000, 8 << 20])
@pytest.mark.parametrize("num_read", [0, 1, 100])
def test_a_client_that_leaves_within_an_answer_did_not_get_it(size: int, num_read: int) -> None:
    async def leave() -> None:
        app = Answering(size)
        async with serving(app) as port:
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(REQUEST)
                if size < 1 << 20:  # the whole answer is with the kernel by then
                    assert await app.outcomes.get() == "delivered"
                client.setblocking(False)
                for _ in range(num_read):
                    await asyncio.get_running_loop().sock_recv(client, 1)
            assert await app.outcomes.get() == ("reset" if size < 1 << 20 else "undelivered")

    on_both_loops(leave)


def test_a_closed_connection_does_not_hold_the_session_of_its_last_answer() -> None:
    """A connection is part of a reference cycle, which is collected much later."""

    async def close() -> None:
        app = Answering(100)
        async with serving(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(100)
            assert await app.outcomes.get() == "delivered"
            assert [reset() is not None for reset in app.resets] == [True]
            writer.close()
            await writer.wait_closed()
        assert [reset() for reset in app.resets] == [None]
        assert len(app.connections) == 1

    on_both_loops(close)
