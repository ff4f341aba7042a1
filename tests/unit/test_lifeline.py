"""A connection that breaks, on a virtual clock, and over loopback."""

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from atoll.coordinator.fleet import lifeline
from atoll.coordinator.fleet.lifeline import Lifeline
from atoll.runtime.server import Server
from tests.tokens import TOKEN
from tests.virtual_clock import run

# An error, silence (None), or a connection that ends after so many seconds, perhaps by an error
Attempt = OSError | None | float | tuple[float, OSError]


class Network:
    """What becomes of each attempt to connect."""

    def __init__(self, *attempts: Attempt) -> None:
        self._attempts = list(attempts)
        self.tried: list[tuple[float, tuple[str, int]]] = []

    async def open_connection(self, host: str, port: int) -> Any:
        self.tried.append((asyncio.get_running_loop().time(), (host, port)))
        outcome = self._attempts.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        if outcome is None:
            await asyncio.Event().wait()
        return Reader(*outcome) if isinstance(outcome, tuple) else Reader(outcome or 0.0), Writer()


class Reader:
    def __init__(self, seconds: float, error: OSError | None = None) -> None:
        self._seconds, self._error = seconds, error

    async def read(self, size: int) -> bytes:
        await asyncio.sleep(self._seconds)
        if self._error:
            raise self._error
        return b""


class Writer:
    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("10.0.0.7", 4711), "sockname": ("10.0.0.1", 999), "socket": self}[name]

    def setsockopt(self, *option: int) -> None: ...

    def close(self) -> None: ...


def lost_after(
    monkeypatch: pytest.MonkeyPatch,
    *attempts: Attempt,
    is_patient: Callable[[], bool] = lambda: False,
) -> tuple[float, str, list[tuple[float, tuple[str, int]]]]:
    network = Network(*attempts)
    monkeypatch.setattr(lifeline.asyncio, "open_connection", network.open_connection)

    async def scene() -> tuple[float, str]:
        why = await Lifeline("rollout-0:4711").wait_for_loss(is_patient)
        return asyncio.get_running_loop().time(), why

    return *run(scene()), network.tried


def test_an_address_that_refuses_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    when, why, tried = lost_after(monkeypatch, 120.0, 120.0, ConnectionRefusedError())
    assert (when, why) == (240.0, "it refuses connections: its process has ended")
    assert tried == [
        (0.0, ("rollout-0", 4711)),
        (120.0, ("10.0.0.7", 4711)),  # gRPC closes what stays silent; the name is not looked up again
        (240.0, ("10.0.0.7", 4711)),
    ]


def test_a_host_that_does_not_answer_a_new_connection_is_lost_after_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    when, why, _ = lost_after(monkeypatch, 50.0, None)
    assert (when, why) == (51.0, "its host does not answer: timeout")


def test_a_host_that_does_not_answer_the_kernel_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    idle_s, interval_s, count = (
        lifeline.KEEPALIVE[option]
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle_s + count * interval_s == 2
    when, why, tried = lost_after(monkeypatch, (50.0, TimeoutError("Connection timed out")))
    assert (when, why, len(tried)) == (50.0, "its host does not answer: Connection timed out", 1)


def test_a_connection_that_is_reset_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    when, why, _ = lost_after(monkeypatch, (50.0, ConnectionResetError()), 20.0, ConnectionRefusedError())
    assert (when, why) == (70.0, "it refuses connections: its process has ended")


def test_a_trainers_host_may_be_silent_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = OSError("no route to host")
    when, why, _ = lost_after(
        monkeypatch,
        *((50.0, TimeoutError()), gone, gone, 50.0, gone, None, gone, gone),
        is_patient=lambda: asyncio.get_running_loop().time() < 104.5,
    )
    assert (when, why) == (105.0, "its host does not answer: no route to host")


def test_nothing_is_concluded_from_an_address_that_was_never_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC has reached it, perhaps by another of its addresses."""
    when, _, tried = lost_after(monkeypatch, OSError(), None, OSError(), 5.0, ConnectionRefusedError())
    assert (when, len(tried)) == (8.0, 5)


def test_a_connection_that_is_closed_at_once_is_not_opened_without_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    when, _, tried = lost_after(monkeypatch, 0.0, 0.0, 0.0, ConnectionRefusedError())
    assert (when, len(tried)) == (3.0, 4)


async def test_a_process_that_ends_as_soon_as_it_is_connected_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The connection is reset before its other end's name is read."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_connection = asyncio.open_connection

    async def open_and_be_reset(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.create_connection((host, port))
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by RST
        accepted.close()
        listener.close()
        assert select.select([connection], [], [], 60)[0]  # the reset has come
        monkeypatch.setattr(lifeline.asyncio, "open_connection", open_connection)
        return await open_connection(sock=connection)

    monkeypatch.setattr(lifeline.asyncio, "open_connection", open_and_be_reset)
    port = listener.getsockname()[1]
    why = await Lifeline(f"127.0.0.1:{port}").wait_for_loss(lambda: False)
    assert why == "it refuses connections: its process has ended"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_a_listener_that_closes_ends_it(host: str) -> None:
    connected, closes = asyncio.Event(), asyncio.Event()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"settings")
        connected.set()
        await closes.wait()
        writer.close()

    server = await asyncio.start_server(greet, host.strip("[]"), 0)
    line = Lifeline(f"{host}:{server.sockets[0].getsockname()[1]}")
    waiting = asyncio.create_task(line.wait_for_loss(lambda: True))
    await asyncio.wait_for(connected.wait(), 30)
    assert not waiting.done()
    server.close()
    closes.set()
    assert await asyncio.wait_for(waiting, 30) == "it refuses connections: its process has ended"
    assert not line.held.is_set()


async def test_a_server_that_stops_does_not_wait_for_it() -> None:
    server = await Server.start(
        "atoll.v1.Rollout", lambda server: None, host="127.0.0.1", port=0, token=TOKEN, setting="--port"
    )
    line = Lifeline(server.address)
    waiting = asyncio.create_task(line.wait_for_loss(lambda: True))
    await asyncio.wait_for(line.held.wait(), 30)
    await asyncio.wait_for(server.stop(3600), 30)
    assert await asyncio.wait_for(waiting, 30) == "it refuses connections: its process has ended"
