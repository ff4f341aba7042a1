"""`python -m atoll.agents` over real gRPC, with a file of a user's own."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.directory import ServiceDirectory
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.fleet.replicas import Replicas
from atoll.coordinator.rewards.rewards import Rewards
from atoll.runtime.clients.agents import AgentsClient
from atoll.runtime.clients.base import Caller
from atoll.runtime.errors import ServiceUnavailableError, StaleFenceError, UserError
from atoll.runtime.store import Store
from atoll.wire.info import AgentsInfo
from atoll.wire.types import AgentOutcome, ServiceEntry
from tests.integration.test_directory import NobodyGenerates
from tests.tokens import CALLER, TOKEN
from tests.unit.test_agent_runner import session_id, task

MINE = """
import asyncio, os, time
from atoll import AgentSession

async def agent(session: AgentSession) -> float:
    return float(session.ground_truth) / 4

async def fails(session):
    raise LookupError("no such tool")

async def hangs(session):
    await asyncio.Event().wait()

async def sleeps(session):
    print("begun", flush=True)
    time.sleep(600)

async def looks(session):
    assert not [name for name, value in os.environ.items() if "token-of-the-tests" in value]
"""
NAMES = ("agent", "fails", "hangs", "sleeps", "looks")


@asynccontextmanager
async def serving(folder: Path, *arguments: str, source: str = MINE) -> AsyncIterator[tuple[Process, str]]:
    """A process of agents by the names of their functions, and its address; "": it did not start."""
    (folder / "mine.py").write_text(source)
    tree = {
        "run": {"name": "toy", "steps": 1},
        "model": {"path": "model"},
        "data": {"train": [{"path": "rows.jsonl", "agent": name} for name in NAMES]},
        "agents": [{"name": n, "function": f"{folder}/mine.py:{n}", "concurrency": 2} for n in NAMES],
    }
    (folder / "config.json").write_text(json.dumps(tree))
    read_end, write_end = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll.agents", "--config", str(folder / "config.json")),
        *("--name", "agents-0", "--ready-fd", str(write_end), *arguments),
        pass_fds=[write_end],
        stdout=PIPE,
        stderr=PIPE,
    )
    os.close(write_end)
    try:
        with os.fdopen(read_end) as ready:
            line = await asyncio.wait_for(asyncio.to_thread(ready.readline), 60)
        yield process, json.loads(line)["address"] if line else ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_functions_of_a_users_file_are_run_cancelled_and_fenced(tmp_path: Path) -> None:
    async with serving(tmp_path) as (process, address), asyncio.timeout(60):
        client, stranger = AgentsClient(address, CALLER), AgentsClient(address, Caller(token=TOKEN))
        assert await client.run(task(0, "agent")) == AgentOutcome(reward=0.5)
        assert await client.run(task(1, "fails")) == AgentOutcome("LookupError: no such tool")
        assert await client.run(task(2, "looks")) == AgentOutcome()
        hanging = [asyncio.create_task(client.run(task(index, "hangs"))) for index in (3, 4)]
        while (info := await stranger.info()).running < 2:  # a call of its own each time
            pass
        assert info == AgentsInfo(dict.fromkeys(NAMES, 2), 2)
        with pytest.raises(UserError, match="got a session for agent 'other', this process runs agent,"):
            await client.run(task(6, "other"))
        for forbidden in (stranger.run(task(7, "agent")), stranger.cancel(session_id(3))):
            with pytest.raises(StaleFenceError, match="only a coordinator may call it"):
                await forbidden
        await client.cancel(session_id(3))
        await client.cancel(session_id(4))
        assert await asyncio.gather(*hanging) == [AgentOutcome("cancelled")] * 2
        await client.close()
        await stranger.close()
        process.terminate()
        _, log = await process.communicate()
    assert process.returncode == 0
    assert 'raise LookupError("no such tool")' in log.decode()
    assert "session toy/0/7/1/0: agent fails failed" in log.decode()
    assert "-key" not in log.decode()


async def test_a_function_that_blocks_does_not_block_the_service(tmp_path: Path) -> None:
    async with serving(tmp_path, "--agent", "sleeps") as (process, address), asyncio.timeout(60):
        client = AgentsClient(address, CALLER)
        asked = asyncio.create_task(client.run(task(0, "sleeps")))
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        assert await client.info() == AgentsInfo({"sleeps": 2}, 1)
        await client.cancel(session_id(0))
        assert await asked == AgentOutcome("cancelled")
        await client.close()
        process.terminate()
        assert await process.wait() == 0


async def test_a_file_that_cannot_be_imported_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    async with serving(tmp_path, source=f"import absent_module\n{MINE}") as (process, address):
        _, log = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, address) == (1, "")
    assert "mine.py cannot be imported: ModuleNotFoundError: No module named 'absent_module'" in log.decode()


async def test_the_coordinator_finds_processes_of_agents_and_loses_them(store: Store, tmp_path: Path) -> None:
    registry, hosts = Registry(store, lease_s=60), AgentHosts()
    membership = ServiceDirectory(
        registry,
        Replicas(CALLER, 60),
        Rewards(0),
        hosts,
        Gateways(),
        CALLER,
        60,
        NobodyGenerates(),
        "actor",
        AsyncMock(),
    )
    async with serving(tmp_path, "--agent", "hangs") as (_, address), asyncio.timeout(60):
        following = asyncio.create_task(membership.follow())
        entry = ServiceEntry("agents", "agents-0", "0001-a", address)
        await registry.register(entry)
        await membership.wait_for({"agents": 1}, 60)
        async with hosts.place("hangs") as client:
            asked = asyncio.create_task(client.run(task(0, "hangs")))
            while (await client.info()).running == 0:  # a call of its own each time
                pass
            await registry.deregister(entry)
            with pytest.raises(ServiceUnavailableError):
                await asked
        following.cancel()
