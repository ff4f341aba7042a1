"""Weights from a TP2 trainer fleet to rollout processes over gRPC: equal, whole, whoever dies."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from services.config.load import write_resolved
from services.config.schema import RunConfig
from services.coordinator.replicas import Replica, Replicas
from services.coordinator.sync import WeightSync
from services.runtime.clients import Caller, TrainerClient
from services.runtime.errors import ServiceUnavailableError
from services.wire.types import GroupId, GroupRequest, Sample, Sampling, ServiceEntry, Version
from tests.integration.test_trainer_service import Fleet, fleet, read_line, update

PROMPT = np.array([5, 9, 14, 7, 16], np.int32)
V1, V2, V3, V4 = (Version("a3f0", number) for number in range(1, 5))


class Processes:
    """Rollout services, started and ended by this test alone."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._config = folder / "rollout.json"
        self.by_name: dict[str, subprocess.Popen[bytes]] = {}
        rollout = {"local": {"slots": 8, "max_length": 256}}
        run = {"name": "toy", "steps": 1, "dir": folder}
        config = {"run": run, "model": {"path": model}, "data": {"train": [{"path": "unused"}]}}
        write_resolved(RunConfig.model_validate(config | {"rollout": rollout}), self._config)

    def start(self, *names: str) -> list[ServiceEntry]:
        pipes = {name: self._popen(name) for name in names}
        entries = []
        for name, ready in pipes.items():
            line = read_line(ready)
            os.close(ready)
            assert line, (self._folder / f"{name}.log").read_text()
            entries.append(ServiceEntry("rollout", name, f"{name}-incarnation", json.loads(line)["address"]))
        return entries

    def _popen(self, name: str) -> int:
        ready, write_end = os.pipe()
        command = [sys.executable, "-m", "services.rollout", "--config", str(self._config), "--name", name]
        with (self._folder / f"{name}.log").open("ab") as log:
            self.by_name[name] = subprocess.Popen(
                [*command, "--ready-fd", str(write_end)],
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        os.close(write_end)
        return ready


@contextmanager
def rollouts(folder: Path, model: Path) -> Iterator[Processes]:
    processes = Processes(folder, model)
    try:
        yield processes
    finally:
        for process in processes.by_name.values():
            process.kill()
            process.wait()


def test_push(tmp_path: Path, tiny_qwen3: Path) -> None:
    with fleet(tmp_path, tiny_qwen3, 2, 1) as running, rollouts(tmp_path, tiny_qwen3) as processes:
        asyncio.run(check_push(running, processes, tmp_path))


async def check_push(running: Fleet, processes: Processes, folder: Path) -> None:
    trainer = TrainerClient(running.address, Caller(fence=1), timeout_s=60)
    replicas = Replicas(Caller(fence=1), 60)
    sync = WeightSync(lambda: trainer, replicas, "float32", finish_running=False)
    first, second = [await replicas.connect(entry) for entry in processes.start("rollout-0", "rollout-1")]
    await sync.catch_up(first)
    await sync.catch_up(second)

    # both replicas hold what the trainer itself writes to disk
    await update(trainer, 0)
    assert (await sync.push(V1)).failed == {}
    await trainer.export_hf(folder / "1")
    for replica in (first, second):
        assert await replica.client.checksums() == (V1, tensor_sums(folder / "1"))
    assert_logprobs_are_of(folder / "1", await generate(first, 16))

    # a sequence that runs goes on with the new weights
    await update(trainer, 1)
    sample = asyncio.create_task(generate(first, 250))
    while (await first.client.info()).running == 0 and not sample.done():
        pass
    await sync.push(V2)
    assert (await sample).versions() == {V1, V2}

    # one replica dies in mid-push: the other gets the version
    await update(trainer, 2)
    await trainer.export_hf(folder / "3")
    processes.by_name["rollout-1"].send_signal(signal.SIGSTOP)
    push = asyncio.create_task(sync.push(V3))
    assert not (await asyncio.wait({push}, timeout=1))[0]  # it waits for the replica that does not answer
    processes.by_name["rollout-1"].kill()
    assert (await push).failed.keys() == {"rollout-1"}
    assert [replica.entry.name for replica in replicas] == ["rollout-0"]
    assert await first.client.checksums() == (V3, tensor_sums(folder / "3"))

    # one that joins gets it from what the trainer wrote then
    await update(trainer, 3)
    [late] = [await replicas.connect(entry) for entry in processes.start("rollout-2")]
    await sync.catch_up(late)
    assert await late.client.checksums() == (V3, tensor_sums(folder / "3"))
    assert_logprobs_are_of(folder / "3", await generate(late, 16))

    # the trainer dies: the replicas keep what they hold
    for rank in running.ranks:
        rank.kill()
    with pytest.raises(ServiceUnavailableError):
        await sync.push(V4)
    assert await first.client.checksums() == (V3, tensor_sums(folder / "3"))
    for client in (trainer, first.client, second.client, late.client):
        await client.close()


def tensor_sums(exported: Path) -> dict[str, int]:
    tensors = load_file(exported / "model.safetensors")
    return {name: xxhash.xxh3_64_intdigest(tensor.numpy()) for name, tensor in tensors.items()}


async def generate(replica: Replica, num_tokens: int) -> Sample:
    request = GroupRequest(GroupId("toy", 0, 0), PROMPT, (0,), (num_tokens,), Sampling(num_tokens))
    stream = replica.client.generate("actor", [request])
    [sample] = [sample async for arrival in stream for sample in arrival.samples]
    return sample


def assert_logprobs_are_of(exported: Path, sample: Sample) -> None:
    node = sample.nodes[0]
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    ids = torch.from_numpy(np.concatenate([PROMPT, node.token_ids])).long()
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0, len(PROMPT) - 1 : -1], -1)
    expected = table.gather(1, ids[len(PROMPT) :, None])[:, 0].numpy()
    np.testing.assert_allclose(node.logprobs, expected, atol=1e-4)
