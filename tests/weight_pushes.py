"""Checks that a weight push from a trainer fleet to rollout processes must pass, with any engine.

The trainer is a fleet of real ranks, replicas are processes of `atoll.rollout`, all calls go over gRPC;
outputs of replicas are compared with transformers on the weights that the trainer writes to disk.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atoll.config.load import write_resolved
from atoll.config.schema import ParallelConfig, WeightsSection
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.weight_sync.canary import Canary
from atoll.coordinator.weight_sync.push_report import PushReport
from atoll.coordinator.weight_sync.sync import WeightSync
from atoll.runtime.clients.trainer import TrainerClient
from atoll.wire.types import (
    Float32,
    GroupId,
    Int32,
    Prompt,
    SampleId,
    Sampling,
    ServiceEntry,
    Trajectory,
    Version,
)
from tests.builders import generation_without_agents, run_config, turn_request
from tests.fake_rewards import FakeService, rewards_of
from tests.tokens import CALLER
from tests.trainer_fleet import Fleet, read_line, update

PROMPT = np.array([5, 9, 14, 7, 16], np.int32)
LOCAL = {"local": {"slots": 8, "max_length": 256}, "sampling": {"max_new_tokens": 128}}
NUM_TOKENS = 150  # of a sample that a replica will lose
# Tokens of the samples of two calls, which are to be caught by a push: whenever it comes, some are
# unfinished, since neither the samples nor the calls end together.
CAUGHT = (range(90, 154, 4), range(70, 134, 4))
MOST_PUSHES = 8  # until one catches samples on every replica
# of the log-probability of a token; transformers itself, in bfloat16, is 0.01 off
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


class Rollouts:
    """Rollout services of one model, started and ended by the test alone."""

    def __init__(
        self, folder: Path, model: Path, trainer: Mapping[str, object], weights: Mapping[str, object]
    ) -> None:
        self._folder = folder
        self._model = model
        self._trainer = trainer
        self._weights = weights
        self.by_name: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, engines: Mapping[str, Mapping[str, object]]) -> list[ServiceEntry]:
        """Starts a service for each name, with that [rollout] table, all at once."""
        pipes = {name: self._popen(name, rollout) for name, rollout in engines.items()}
        entries = []
        for name, ready in pipes.items():
            line = read_line(ready)
            os.close(ready)
            assert line, (self._folder / f"{name}.log").read_text()
            entries.append(ServiceEntry("rollout", name, token_hex(4), json.loads(line)["address"]))
        return entries

    def _popen(self, name: str, rollout: Mapping[str, object]) -> int:
        config = run_config(
            run={"dir": self._folder},
            model={"path": self._model},
            rollout=rollout,
            trainer=self._trainer,
            weights=self._weights,
        )
        path = self._folder / f"{name}.json"
        write_resolved(config, path)
        ready, write_end = os.pipe()
        command = [config.rollout.python or sys.executable, "-m", "atoll.rollout", "--config", path]
        with (self._folder / f"{name}.log").open("ab") as log:
            self.by_name[name] = subprocess.Popen(
                [*command, "--name", name, "--ready-fd", str(write_end)],
                stdout=log,
                stderr=log,
                pass_fds=(write_end,),
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        os.close(write_end)
        return ready


@contextmanager
def rollouts(
    folder: Path, model: Path, trainer: Mapping[str, object] | None = None, **weights: object
) -> Iterator[Rollouts]:
    """They end with the test: first by SIGTERM, since a service ends its engine's processes, then by
    force."""
    services = Rollouts(folder, model, trainer or {}, weights)
    try:
        yield services
    finally:
        for process in services.by_name.values():
            process.terminate()
        for process in services.by_name.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True, slots=True)
class Run:
    """A coordinator's part, with every replica held for the first push."""

    trainer: TrainerClient
    replicas: Replicas
    members: Sequence[Replica]
    sync: WeightSync
    lineage: str

    def version(self, number: int) -> Version:
        return Version(self.lineage, number)

    async def join(self, entry: ServiceEntry) -> Replica:
        replica = await self.replicas.connect(entry)
        await self.sync.catch_up(replica)
        return replica


@asynccontextmanager
async def connected(
    running: Fleet,
    entries: Sequence[ServiceEntry],
    model: Path,
    *,
    finish_running: bool,
    dtype: torch.dtype = torch.float32,
    **weights: object,
) -> AsyncIterator[Run]:
    trainer, replicas = TrainerClient(running.address, CALLER, timeout_s=60), Replicas(CALLER, 60)
    sync = WeightSync(
        replicas,
        Canary(model, every=1, tolerance=TOLERANCE[dtype]),
        WeightsSection.model_validate({"transport": "shm"} | weights),
        str(dtype).removeprefix("torch."),
        finish_running=finish_running,
        first_epoch=time.time_ns(),  # above those of a run that the services have seen
    )
    await sync.use_trainer(trainer)
    run = Run(trainer, replicas, [], sync, token_hex(4))
    members = [await run.join(entry) for entry in entries]
    try:
        yield Run(trainer, replicas, members, sync, run.lineage)
    finally:
        for client in (trainer, *(replica.client for replica in members)):
            await client.close()


async def check_layout(
    running: Fleet,
    entries: Sequence[ServiceEntry],
    model: Path,
    folder: Path,
    layout: ParallelConfig,
    *,
    finish_running: bool = False,
    **weights: object,
) -> None:
    """All replicas get a version at once, while generating: they end up with the trainer's weights."""
    async with connected(running, entries, model, finish_running=finish_running, **weights) as run:
        info = await run.trainer.info()
        sizes = (info.tensor_parallel, info.pipeline_parallel, info.expert_parallel, info.data_parallel)
        assert sizes == (layout.tensor, layout.pipeline, layout.expert, layout.data)
        await push(run, 1)
        await update(run.trainer, 0)
        for number in range(2, 2 + MOST_PUSHES):
            if await push_while_generating(run, number, finish_running=finish_running):
                break
        else:
            raise AssertionError(f"none of {MOST_PUSHES} pushes came while every replica had sequences")
        await run.trainer.export_hf(folder / run.lineage)
        await assert_hold(run.members, folder / run.lineage, run.version(number))


async def push_while_generating(run: Run, number: int, *, finish_running: bool) -> bool:
    """Whether the commit came while every replica had sequences: on a busy machine they may have ended
    between its request and its arrival."""
    pushed = asyncio.Event()
    live = {
        replica: [asyncio.create_task(generate_until(pushed, replica, lengths)) for lengths in CAUGHT]
        for replica in run.members
    }
    for replica, tasks in live.items():
        await starts(replica, *tasks)
    produced = [asyncio.create_task(tokens_until_commit(replica)) for replica in run.members]
    before = await asyncio.gather(*map(tokens_of, run.members))
    await push(run, number)
    pushed.set()
    for replica, begun, at_commit in zip(run.members, before, await asyncio.gather(*produced), strict=True):
        if replica.info.slots == LOCAL["local"]["slots"]:  # SGLang counts a sequence when it has ended
            assert at_commit > begun  # with the old weights, while it received the new ones
    old, new = run.version(number - 1), run.version(number)
    caught = []
    for tasks in live.values():
        seen = [sample.versions() for samples in await asyncio.gather(*tasks) for sample in samples]
        assert set.union(*seen) <= {old, new}
        # a sequence caught by the commit ends with the weights that it began with, or continues
        continued = any(len(versions) > 1 for versions in seen)
        assert not (continued and finish_running)
        caught.append(set.union(*seen) == {old, new} and continued is not finish_running)
    return all(caught)


async def push(run: Run, number: int) -> PushReport:
    """Pushes to every member, which then computes what the trainer does."""
    report = await run.sync.push(run.version(number))
    assert report.failed == {}
    assert report.num_replicas == len(run.members)
    assert max(report.canary_diffs) < 1e-4
    return report


async def starts(replica: Replica, *tasks: asyncio.Task[list[Trajectory]]) -> None:
    """Returns once the replica runs sequences."""
    while (await replica.client.info()).running == 0:
        assert not any(task.done() for task in tasks), tasks


async def tokens_of(replica: Replica) -> int:
    return (await replica.client.info()).tokens_generated


async def unfinished(replica: Replica) -> int:
    """Number of sequences that it has received and not returned."""
    info = await replica.client.info()
    return info.running + info.queued


async def tokens_until_commit(replica: Replica) -> int:
    """Number of tokens that it has produced when its next commit is requested: during a group of which some
    sequences have ended, while the other call's group is present, too. It is not enough that the replica has
    sequences: SGLang may not have begun them."""
    commit, asked = replica.client.commit_weights, asyncio.get_running_loop().create_future()
    both = sum(map(len, CAUGHT))

    async def counted(version: Version, *, finish_running: bool) -> float:
        async with asyncio.timeout(60):
            while not both // 2 < await unfinished(replica) < both:
                pass
        asked.set_result(await tokens_of(replica))
        replica.client.commit_weights = commit
        return await commit(version, finish_running=finish_running)

    replica.client.commit_weights = counted
    return await asked


async def generate_until(end: asyncio.Event, replica: Replica, lengths: Sequence[int]) -> list[Trajectory]:
    """Generates group after group; the one running at the end is the last."""
    samples: list[Trajectory] = []
    while not end.is_set():
        group = await generate(replica, lengths)
        assert sorted(sample.num_produced for sample in group) == list(lengths)  # none is lost or cut
        samples += group
    return samples


async def generate(replica: Replica, lengths: Sequence[int]) -> list[Trajectory]:
    """Generates a group of sequences, none of which ends early."""
    group = GroupId(token_hex(4), 0, 0)
    requests = [
        turn_request(PROMPT, group=group, indices=[index], sampling=Sampling(length))
        for index, length in enumerate(lengths)
    ]
    stream = replica.client.generate("actor", requests)
    return [sample async for arrival in stream for sample in arrival.samples]


async def assert_hold(
    replicas: Sequence[Replica], exported: Path, version: Version, dtype: torch.dtype = torch.float32
) -> None:
    """Replicas hold, byte for byte, what the trainer wrote, cast to `dtype`; and their sampled and scored
    logprobs are those of transformers with it, in float32."""
    for replica in replicas:
        assert await replica.client.checksums() == (version, tensor_sums(exported, dtype)), replica.entry.name
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=dtype).float()
    for replica in replicas:
        [sample] = await generate(replica, [24])
        assert sample.versions() == {version}
        ids = np.concatenate([PROMPT, sample.nodes[0].token_ids])
        expected = by_transformers(model, ids)
        np.testing.assert_allclose(
            sample.nodes[0].logprobs, expected[len(PROMPT) - 1 :], atol=TOLERANCE[dtype]
        )
        [scored] = await replica.client.score_tokens([ids])
        np.testing.assert_allclose(scored, expected, atol=TOLERANCE[dtype])


def by_transformers(model: torch.nn.Module, ids: Int32) -> Float32:
    """[T-1] log-probability of each token but the first."""
    ids_T = torch.from_numpy(ids).long()
    with torch.no_grad():
        table = torch.log_softmax(model(input_ids=ids_T[None]).logits[0, :-1], -1)
    return table.gather(1, ids_T[1:, None])[:, 0].numpy()


def tensor_sums(exported: Path, dtype: torch.dtype = torch.float32) -> dict[str, int]:
    """Checksums of what is pushed: only the adapters if the folder has any."""
    adapters = exported / "adapter" / "adapter_model.safetensors"
    tensors = load_file(adapters if adapters.exists() else exported / "model.safetensors")
    return {
        name: xxhash.xxh3_64_intdigest(tensor.to(dtype).view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }


async def check_kill(run: Run, services: Rollouts, exported: Path, number: int) -> None:
    """rollout-1 is killed by SIGKILL in mid-push: the others get the version, and no sample is lost."""
    groups = [pending(prompt) for prompt in range(32)]
    samples = Samples(len(groups))
    generation = generation_without_agents(
        run.replicas,
        rewards_of(FakeService()),
        model="actor",
        max_attempts=3,
        sample_timeout_s=60,
        timeout_s=60,
    )
    generating = asyncio.create_task(generation.run())
    await update(run.trainer, number)
    await run.trainer.export_hf(exported)
    generation.submit(groups, samples)
    started = {
        replica.entry.name: asyncio.create_task(starts(replica, generating)) for replica in run.members
    }
    await started["rollout-1"]
    services.by_name["rollout-1"].send_signal(signal.SIGSTOP)  # before it has finished its samples
    await asyncio.gather(*started.values())
    pushing = asyncio.create_task(run.sync.push(run.version(number)))
    assert not (await asyncio.wait({pushing}, timeout=1))[0]  # it waits for the replica that does not answer
    services.by_name["rollout-1"].kill()
    report = await asyncio.wait_for(pushing, 30)
    assert report.failed.keys() == {"rollout-1"}
    survivors = [replica for replica in run.members if replica.entry.name != "rollout-1"]
    assert list(run.replicas) == survivors
    await asyncio.wait_for(samples.complete.wait(), 60)
    assert sorted(samples.finished_ids) == sorted(str(id) for group in groups for id in group.ids())
    assert {sample.num_produced for group in groups for sample in group.samples} == {NUM_TOKENS}
    assert samples.num_retried > 0
    generating.cancel()
    await assert_hold(survivors, exported, run.version(number))


def pending(prompt: int) -> PendingGroup:
    row = Prompt(GroupId("kill", 0, prompt), PROMPT, "", "", "toy")
    return PendingGroup(row, prompt, Sampling(NUM_TOKENS), [None, None], 0, False)


class Samples:
    """Counts a run's samples."""

    def __init__(self, num_groups: int) -> None:
        self.finished_ids: list[str] = []
        self.num_retried = 0
        self.complete = asyncio.Event()
        self._missing = num_groups

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        self.finished_ids += [str(sample.id) for sample in samples]

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None:
        assert "rollout-1" in reason
        self.num_retried += len(samples)

    async def on_completed(self, group: PendingGroup) -> None:
        self._missing -= 1
        if not self._missing:
            self.complete.set()

    async def on_dropped(self, group: PendingGroup, reason: str) -> None:
        raise AssertionError(reason)
