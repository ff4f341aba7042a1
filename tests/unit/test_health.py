"""`atoll health` against a server with and without its health service."""

import argparse
import asyncio

import pytest

from atoll.cli import health
from atoll.cli.main import main
from atoll.coordinator.control import RunControl
from atoll.runtime.errors import ServiceUnavailableError
from atoll.runtime.ports import reserve_port
from tests.coordinator_server import serve_coordinator


async def check(address: str) -> int:
    """In a thread, since the server answers in this one."""
    return await asyncio.to_thread(health.run, argparse.Namespace(address=address))


async def test_a_service_is_healthy_without_a_token_until_it_stops(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = await serve_coordinator(RunControl(trains=False))
    assert await check(server.address) == 0
    assert capsys.readouterr().out == f"{server.address} is SERVING\n"
    await server._health.enter_graceful_shutdown()
    with pytest.raises(ServiceUnavailableError, match=f"^{server.address} is NOT_SERVING, expected SERVING$"):
        await check(server.address)
    await server.stop(0)


def test_a_service_that_is_not_there_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with reserve_port() as port:
        assert main(["health", f"127.0.0.1:{port}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"atoll health: 127.0.0.1:{port} does not answer: UNAVAILABLE: ")
    assert len(said.splitlines()) == 1


async def test_a_service_that_stands_still_costs_the_timeout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, and never answers."""
    monkeypatch.setattr(health, "TIMEOUT_S", 0.2)
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    host, port = silent.sockets[0].getsockname()
    with pytest.raises(ServiceUnavailableError, match=f"^{host}:{port} does not answer: DEADLINE_EXCEEDED: "):
        await check(f"{host}:{port}")
    silent.close()
