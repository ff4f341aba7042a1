"""A rollout service on SGLang in a process of its own: its engine dies, and then the service."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from atoll.config.load import write_resolved
from atoll.coordinator.control import RunControl
from atoll.coordinator.fleet.registry import Registry, ServiceJoined, ServiceLeft
from atoll.coordinator.service import CoordinatorService
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.errors import ServiceUnavailableError
from atoll.runtime.server import Server
from atoll.runtime.store import Store, run_embedded_server
from atoll.wire.types import FinishReason, Sampling, ServiceEntry, Trajectory, TurnRequest
from tests.builders import group_id, run_config, turn_request
from tests.contract.engines import ENDLESS, reference_logits
from tests.tokens import TOKEN

START_S = 240.0  # for a server of SGLang on a machine that does other things, too
END_S = 20.0
NO_SERVERS = SimpleNamespace(health=tuple)
PROMPT = [7, 30, 12]

pytestmark = [pytest.mark.long, pytest.mark.rerun_once]


def config_file(folder: Path, model: Path) -> Path:
    config = run_config(
        model={"path": model},
        rollout={
            "engine": "sglang",
            "max_restarts": 1,
            "sglang": {"log_level": "error", "max_running_requests": 16},
        },
    )
    path = folder / "config.json"
    write_resolved(config, path)
    return path


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[Registry]:
    with run_embedded_server(tmp_path / "store") as server:
        store = Store(server.url, "toy")
        await store.take_epoch()
        yield Registry(store, lease_s=60)
        await store.close()


async def joined(changes: AsyncIterator[ServiceJoined | ServiceLeft]) -> ServiceEntry:
    change = await asyncio.wait_for(anext(changes), START_S)
    assert isinstance(change, ServiceJoined)
    return change.entry


def ask(prompt: int, max_new_tokens: int) -> TurnRequest:
    sampling = Sampling(max_new_tokens, temperature=0.0)
    return turn_request(PROMPT, group=group_id(prompt), indices=(0, 1), sampling=sampling)


async def generated(client: RolloutClient, request: TurnRequest) -> list[Trajectory]:
    async with aclosing(client.generate("actor", [request])) as arrivals:
        return [sample async for arrival in arrivals for sample in arrival.samples]


async def check_ends_by_length(client: RolloutClient, request: TurnRequest) -> None:
    samples = await generated(client, request)
    assert [sample.finish_reason for sample in samples] == [FinishReason.LENGTH] * 2


async def check_both_cuts(client: RolloutClient, model: Path) -> None:
    """SGLang's meaning of top_k beside top_p: either leaves tokens out, each of the whole distribution."""
    sampling = Sampling(20, temperature=0.7, top_k=12, top_p=0.5)
    request = turn_request(PROMPT, group=group_id(5), indices=(0, 1), sampling=sampling)
    for sample in await generated(client, request):
        (node,) = sample.nodes
        logits_TV = reference_logits(model, PROMPT, node.token_ids) / sampling.temperature
        weights_TV = np.exp(logits_TV - logits_TV.max(axis=1, keepdims=True))
        weights_TV /= weights_TV.sum(axis=1, keepdims=True)
        for weights_V, token, logprob in zip(weights_TV, node.token_ids, node.logprobs, strict=True):
            order = np.argsort(-weights_V)[: sampling.top_k]
            before = np.cumsum(weights_V[order]) - weights_V[order]
            left = order[before <= sampling.top_p]
            assert token in left
            assert logprob == pytest.approx(np.log(weights_V[token] / weights_V[left].sum()), abs=1e-4)


async def test_an_engine_that_is_killed_comes_back_and_goes_with_its_service(
    registry: Registry, tiny_qwen3: Path, tmp_path: Path
) -> None:
    coordinator = await Server.start(
        "atoll.v1.Coordinator",
        CoordinatorService("toy", registry, NO_SERVERS, RunControl(trains=False)).add_to,
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        setting="coordinator.port",
    )
    service = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll.rollout", "--config", str(config_file(tmp_path, tiny_qwen3))),
        *("--name", "rollout-0", "--coordinator", coordinator.address),
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        changes = registry.changes()
        first = await joined(changes)
        client = RolloutClient(first.address, Caller(registry.epoch, TOKEN), timeout_s=60)
        await check_ends_by_length(client, ask(0, 5))
        await check_both_cuts(client, tiny_qwen3)
        running = asyncio.create_task(generated(client, ask(1, ENDLESS)))
        async with asyncio.timeout(END_S):
            while (await client.info()).running == 0:
                pass
        schedulers = [p for p in descendants(service.pid) if p.name().startswith("sglang::sched")]
        assert len(schedulers) == 1
        schedulers[0].send_signal(signal.SIGKILL)
        with pytest.raises(ServiceUnavailableError, match="ended"):
            await asyncio.wait_for(running, END_S)
        await client.close()

        assert await asyncio.wait_for(anext(changes), END_S) == ServiceLeft(first)
        second = await joined(changes)
        assert second.name == first.name
        assert second.incarnation != first.incarnation
        client = RolloutClient(second.address, Caller(registry.epoch, TOKEN), timeout_s=60)
        assert (await client.info()).incarnation == second.incarnation
        await check_ends_by_length(client, ask(1, 480))
        await client.close()

        processes = descendants(service.pid)
        assert len(processes) >= 3  # HTTP server, scheduler, detokenizer
        service.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=END_S)
        assert alive == []
    finally:
        if service.returncode is None:
            service.kill()
            await service.wait()
        await coordinator.stop(0)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
