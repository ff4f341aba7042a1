"""Rollout replicas over real gRPC, in this process and in their own."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.config.load import write_resolved
from atoll.rollout.engines.local import LocalEngine
from atoll.rollout.service import AS_IN_FOLDER, RolloutService
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.errors import AtollError, EngineDiedError, ServiceUnavailableError, UserError
from atoll.runtime.process import EXIT_RESTARTS_EXHAUSTED, ServiceContext
from atoll.runtime.server import Server
from atoll.weights.transport import shm
from atoll.wire.codec.values import encode_version
from atoll.wire.types import (
    FinishReason,
    PauseMode,
    Sampling,
    Trajectory,
    TurnRequest,
    Version,
    VersionSpan,
)
from atoll.wire.v1 import rollout_pb2 as pb
from tests.builders import group_id, run_config, turn_request
from tests.conftest import write_model
from tests.tokens import CALLER, TOKEN

GREEDY = Sampling(8, temperature=0.0)


def ask(row: int, indices: Sequence[int] = (0, 1), prompt: Sequence[int] = (7, 30, 12)) -> TurnRequest:
    return turn_request(prompt, group=group_id(row), indices=indices, sampling=GREEDY)


async def collect(client: RolloutClient, sampling: Sampling, *requests: TurnRequest) -> list[Trajectory]:
    stream = client.generate("actor", [replace(request, sampling=sampling) for request in requests])
    return [sample async for arrival in stream for sample in arrival.samples]


async def eventually_idle(client: RolloutClient) -> None:
    async with asyncio.timeout(10):
        while True:
            info = await client.info()
            if info.running == info.queued == 0:
                return


def start_engine(model: Path) -> LocalEngine:
    return LocalEngine(
        model, dtype=torch.float32, slots=4, max_length=512, version=AS_IN_FOLDER, receiver=shm.ShmReceiver()
    )


@pytest.fixture
async def client(tiny_qwen2: Path) -> AsyncIterator[RolloutClient]:
    service = RolloutService(start_engine(tiny_qwen2), "rollout-0", "a1")
    server = await Server.start(
        "atoll.v1.Rollout", service.add_to, host="127.0.0.1", port=0, token=TOKEN, setting="--port"
    )
    client = RolloutClient(server.address, CALLER, timeout_s=30)
    yield client
    await client.close()
    await server.stop(0)
    await service.close()


async def test_samples_cross_the_wire_whole(client, tiny_qwen2):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32)
    samples = await collect(client, GREEDY, ask(3), ask(4, (5,), (20, 21)))
    assert sorted(str(sample.id) for sample in samples) == ["toy/0/3/0", "toy/0/3/1", "toy/0/4/5"]
    for sample in samples:
        prompt = [7, 30, 12] if sample.id.group.prompt == 3 else [20, 21]
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        (node,) = sample.nodes
        assert node.token_ids.tolist() == expected[0, len(prompt) :].tolist()
        logits = model(expected).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        np.testing.assert_allclose(
            node.logprobs, logits.gather(1, expected[0, len(prompt) :, None])[:, 0].detach(), atol=1e-4
        )
        assert node.loss_mask.all()
        assert node.spans == (VersionSpan(AS_IN_FOLDER, 0, 8),)
        assert sample.finish_reason is FinishReason.LENGTH
        assert (sample.turns[0].origin.replica, sample.turns[0].origin.incarnation) == ("rollout-0", "a1")
        assert sample.turns[0].started <= sample.turns[0].finished


async def test_a_repeated_call_generates_nothing_twice(client):
    at_once = await asyncio.gather(*(collect(client, GREEDY, ask(1)) for _ in range(3)))
    again = await collect(client, GREEDY, ask(1))
    tokens = [
        sorted((s.id.index, tuple(s.nodes[0].token_ids)) for s in samples) for samples in [*at_once, again]
    ]
    assert tokens == [tokens[0]] * 4
    assert (await client.info()).tokens_generated == 2 * 8


async def test_a_new_lineage_gets_no_samples_of_the_old_one_though_its_first_commit_was_given_up(
    tiny_qwen2, monkeypatch
):
    engine = start_engine(tiny_qwen2)
    service = RolloutService(engine, "rollout-0", "a1")
    version, live = Version("b7c1", 4), asyncio.Event()
    commit = pb.CommitWeightsRequest(version=encode_version(version))

    async def commit_unheard(version: Version) -> float:
        if version != engine.version:
            engine._decoder.set_version(version)
            live.set()
            await asyncio.Event().wait()
        return 0.0

    async def spans() -> set[VersionSpan]:
        batches = service._generator.generate([ask(1)])
        return {span async for samples in batches for sample in samples for span in sample.nodes[0].spans}

    monkeypatch.setattr(engine, "commit", commit_unheard)
    assert await spans() == {VersionSpan(AS_IN_FOLDER, 0, 8)}
    given_up = asyncio.create_task(service.CommitWeights(commit, None))
    await live.wait()
    given_up.cancel()
    await asyncio.wait([given_up])
    await service.CommitWeights(commit, None)
    assert await spans() == {VersionSpan(version, 0, 8)}
    await service.close()


async def test_progress_is_made_while_tokens_are_produced(client):
    before = await client.progress()
    await collect(client, Sampling(8), ask(1))
    assert await client.progress() > before


async def test_samples_of_one_step_come_in_one_message(client):
    stream = client.generate("actor", [ask(1), ask(2)])
    batches = [len(arrival.samples) async for arrival in stream]
    assert batches == [4]


async def test_expired_and_cancelled_calls_free_their_slots(client, monkeypatch):
    endless = Sampling(500)
    impatient = RolloutClient(client.address, CALLER)
    monkeypatch.setattr("atoll.runtime.clients.rollout.CEILING_S", 0.2)
    with pytest.raises(ServiceUnavailableError, match="no answer within"):
        await collect(impatient, endless, *(ask(row, range(8)) for row in range(20)))
    await impatient.close()
    monkeypatch.undo()
    await eventually_idle(client)
    call = asyncio.create_task(collect(client, endless, *(ask(row, range(8)) for row in range(20, 40))))
    async with asyncio.timeout(10):
        while not (await client.info()).queued:
            pass
    call.cancel()
    await eventually_idle(client)


async def test_abort_and_pause(client):
    await client.pause(PauseMode.IN_PLACE)
    call = asyncio.create_task(collect(client, Sampling(100), ask(1), ask(2)))
    async with asyncio.timeout(10):
        while (await client.info()).queued < 4:
            pass
    assert await client.abort("toy/0/2/") == 2
    await client.resume()
    samples = {str(sample.id): sample for sample in await call}
    assert samples["toy/0/2/1"].finish_reason is FinishReason.ABORT
    assert samples["toy/0/2/1"].num_produced == 0
    assert samples["toy/0/1/1"].num_produced == 100


async def test_requests_at_fault_are_the_callers_errors(client):
    with pytest.raises(UserError, match="token id 64, expected 0 to 63"):
        await collect(client, GREEDY, ask(1, prompt=(3, 64)))
    with pytest.raises(UserError, match="serves 'actor'"):
        [s async for s in client.generate("critic", [ask(1)])]
    with pytest.raises(AtollError, match="nothing is staged"):
        await client.commit_weights(AS_IN_FOLDER.__class__("a3f0", 1), finish_running=True)
    assert len(await collect(client, GREEDY, ask(1))) == 2  # a failed commit leaves no pause behind


@asynccontextmanager
async def replica(model: Path, folder: Path, log: int | None = None) -> AsyncIterator[tuple[Process, str]]:
    """`python -m atoll.rollout` as the launcher starts it, and its address."""
    config = run_config(
        run={"dir": folder},
        model={"path": model},
        rollout={
            "sampling": {"max_new_tokens": 8},
            "dtype": "bfloat16",
            "local": {"slots": 3, "max_length": 64},
            "max_restarts": 1,
        },
    )
    write_resolved(config, folder / "config.json")
    ready, ready_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll.rollout", "--config", folder / "config.json"),
        *("--name", "rollout-3", "--ready-fd", str(ready_fd)),
        pass_fds=[ready_fd],
        stderr=log,
    )
    try:
        os.close(ready_fd)
        with os.fdopen(ready) as pipe:
            async with asyncio.timeout(90):
                line = await asyncio.to_thread(pipe.readline)
        yield process, json.loads(line)["address"]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_replica_is_a_process(tiny_qwen2, tmp_path):
    async with replica(tiny_qwen2, tmp_path) as (process, address):
        client = RolloutClient(address, CALLER, timeout_s=30)
        info = await client.info()
        assert (info.name, info.dtype, info.slots, info.max_length) == ("rollout-3", "bfloat16", 3, 64)
        assert info.vocab_size == 64
        assert len(await collect(client, GREEDY, ask(1, range(7)))) == 7
        await client.close()
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_a_replica_whose_engine_breaks_builds_another_and_gives_up_in_the_end(diverged_qwen2, tmp_path):
    addresses = []
    async with replica(diverged_qwen2, tmp_path, PIPE) as (process, _), asyncio.timeout(60):
        for _ in range(2):
            address = await line_with(process, "serves rollout at ")
            client = RolloutClient(address, CALLER, timeout_s=30)
            calls = [collect(client, Sampling(8), ask(row)) for row in range(3)]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            # a call that comes when the service has begun to end is not told why
            assert all(isinstance(error, ServiceUnavailableError) for error in errors)
            died = [str(error) for error in errors if isinstance(error, EngineDiedError)]
            assert died
            assert all("the model's logits are not finite" in error for error in died)
            await client.close()
            addresses.append(address)
        _, log = await process.communicate()
    assert len(set(addresses)) == 2
    assert process.returncode == EXIT_RESTARTS_EXHAUSTED
    assert "Traceback" in log.decode()
    assert "the model's logits are not finite" in log.decode().splitlines()[-1]


async def line_with(process: Process, text: str) -> str:
    """What follows the text in the next line of the log that has it."""
    assert process.stderr is not None
    while text not in (line := (await process.stderr.readline()).decode()):
        assert line, "the log ended"
    return line.partition(text)[2].strip()


@pytest.mark.parametrize(("positions", "taken"), [(64, 64), (4096, 2048)])
async def test_a_local_engine_takes_what_the_model_does_up_to_2048(
    tmp_path: Path, positions: int, taken: int
) -> None:
    model = write_model(tmp_path, "qwen2", max_position_embeddings=positions)
    config = run_config(model={"path": model})
    service = await RolloutService.build(ServiceContext(config, "rollout", "rollout-0", "a1", "127.0.0.1"))
    info = await service.Info(pb.RolloutInfoRequest(), None)
    await service.close()
    assert info.max_length == taken
