"""What people ask of a run, over gRPC: the service, the control and the loop together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.wire.info import RunStatus
from tests.coordinator_server import serve_coordinator
from tests.fakes import FakeRun, ListSource, batch
from tests.tokens import CALLER


@asynccontextmanager
async def client_of(run: FakeRun) -> AsyncIterator[CoordinatorClient]:
    server = await serve_coordinator(run.control)
    client = CoordinatorClient(server.address, CALLER)
    yield client
    await client.close()
    await server.stop(0)


async def reached(client: CoordinatorClient, state: str, step: int) -> RunStatus:
    status = await client.status()
    while (status.state, status.step) != (state, step):
        status = await client.status(status.revision)
    return status


async def test_a_run_is_paused_saved_resumed_and_stopped(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"run": {"steps": 1000}}, source=ListSource([batch(1)]))
    async with client_of(run) as client, asyncio.timeout(60):
        await client.pause_run()
        running = asyncio.create_task(run.run())
        await reached(client, "paused", 0)
        assert await client.checkpoint() == str(run.checkpoints.path(0))
        await client.resume_run()
        status = await reached(client, "training", 1)
        assert status.metrics["critic/score/mean"] == 0.5
        await client.stop_run()
        await running
        assert (await client.status()).state == "finished"
    assert run.summary()["steps"] == 1


async def test_a_note_is_shown_unless_there_is_an_error(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"run": {"steps": 1}}, source=ListSource([batch(1)]))
    async with client_of(run) as client, asyncio.timeout(60):
        await run.control.report(note="grading is slow")
        assert (await client.status()).error == "grading is slow"
        await run.control.report(error="waiting for a server")
        assert (await client.status()).error == "waiting for a server"
