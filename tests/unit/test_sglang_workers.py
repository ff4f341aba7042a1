"""Both ends of SGLang's receivers, with SGLang itself played by this file: two ranks of a model, and a server
whose /update_weights_from_tensor calls the ranks' receivers."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from atoll.rollout.engines.sglang.worker import Worker, outcome_path, refit, socket_path
from atoll.rollout.engines.sglang.workers import Workers
from atoll.rollout.refit import Refit
from atoll.runtime.errors import EngineDiedError, UserError, WeightPushError
from atoll.runtime.model_spec import read_spec
from atoll.runtime.server import Server
from atoll.trainer.publish import Publisher
from atoll.weights.plan import plan
from atoll.weights.transport import shm
from atoll.wire.types import (
    LoraSpec,
    Membership,
    PublishedPart,
    PublishRequest,
    PushPart,
    ReceiverSetup,
    Version,
)
from tests.unit.sglang_shards import State, random_state, shard, whole

V0, V1, V2 = (Version("a3f0", number) for number in range(3))
ALONE = Membership(0, 1)


def module_of(tensors: State) -> torch.nn.Module:
    """With the tensors as parameters of those names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        owner = root
        *path, leaf = name.split(".")
        for step in path:
            if step not in owner._modules:
                owner.add_module(step, torch.nn.Module())
            owner = owner.get_submodule(step)
        owner.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


@dataclass
class Replica:
    workers: Workers
    ranks: list[Worker]
    models: list[torch.nn.Module]
    state: State  # what the trainer pushes
    calls: list[str]
    in_place: bool
    deaf: int | None = None  # a rank whose receiver is not called
    _publisher: Publisher | None = None

    async def post(self, path: str, body: Mapping[str, Any]) -> object:
        self.calls.append(path)
        if path == "/update_weights_from_tensor":
            assert len(body["serialized_named_tensors"]) == len(self.ranks)
            for rank, worker in enumerate(self.ranks):
                if rank != self.deaf:
                    worker.commit_prepared()
        return {}

    def publish(self, version: Version) -> list[PublishedPart]:
        if self._publisher is None:
            self.plan = plan([whole(self.state)], self.workers.shard_layouts(), part_elements=1 << 12)
            buffers = [tensor.view(-1) for tensor in self.state.values()]
            self._publisher = Publisher(0, buffers, shm.ShmSender, stays_readable=True)
        parts: list[PublishedPart] = []
        while not parts or not parts[-1].last:
            parts.append(
                self._publisher.publish(
                    PublishRequest(version, "float32", {self.plan.id: ALONE}, [self.plan], len(parts))
                )
            )
        return parts

    async def receive(self, version: Version, parts: list[PublishedPart]) -> int:
        return sum(
            [await self.workers.receive(PushPart(version, part.streams, self.plan, ALONE)) for part in parts]
        )

    async def push(self, version: Version) -> None:
        await self.receive(version, self.publish(version))
        await self.commit(version)

    async def commit(self, version: Version) -> None:
        async with self.workers.prepare(version):
            await self.workers.commit(version, self.post)

    def train(self) -> None:
        for tensor in self.state.values():
            tensor.add_(torch.randn(tensor.shape))

    def live(self, rank: int) -> State:
        return dict(self.models[rank].named_parameters())


@pytest.fixture(params=[True, False], ids=["in_place", "exchanged"])
async def replica(tiny_qwen2: Path, request: pytest.FixtureRequest) -> AsyncIterator[Replica]:
    """Before Attach."""
    spec = replace(read_spec(tiny_qwen2), num_layers=2)
    state = random_state(spec)
    models = [module_of(shard(state, spec, rank, 2)) for rank in range(2)]
    workers = Workers(2, V0, ReceiverSetup("shm", 10.0, "device"))
    (folder,) = map(Path, workers.environment.values())
    ranks = [
        Worker(model, tiny_qwen2, rank, 2, outcome_path(folder, rank), in_place=request.param)
        for rank, model in enumerate(models)
    ]
    servers = [
        await Server.start_local("atoll.v1.Worker", worker.add_to, socket_path=socket_path(folder, rank))
        for rank, worker in enumerate(ranks)
    ]
    replica = Replica(workers, ranks, models, state, [], in_place=request.param)
    yield replica
    await workers.close()
    for server in servers:
        await server.stop(0)


@pytest.fixture
async def attached(replica: Replica) -> Replica:
    await replica.workers.attach(replica.post)
    replica.calls.clear()
    return replica


def equal(got: State, expected: State) -> bool:
    """Where padding is NaN, anything goes."""
    return got.keys() == expected.keys() and all(
        torch.equal(torch.where(tensor.isnan(), tensor, got[name]).nan_to_num(), tensor.nan_to_num())
        for name, tensor in expected.items()
    )


async def test_a_push_is_in_the_parameters_after_its_commit(attached: Replica, tiny_qwen2: Path) -> None:
    spec, old = read_spec(tiny_qwen2), {name: t.clone() for name, t in attached.state.items()}
    places = [[p.data_ptr() for p in attached.live(rank).values()] for rank in range(2)]
    attached.train()
    await attached.receive(V1, attached.publish(V1))
    assert all(equal(attached.live(rank), shard(old, spec, rank, 2)) for rank in range(2))
    await attached.commit(V1)
    assert all(equal(attached.live(rank), shard(attached.state, spec, rank, 2)) for rank in range(2))
    stayed = [[p.data_ptr() for p in attached.live(rank).values()] for rank in range(2)] == places
    assert stayed == attached.in_place
    assert attached.calls == ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


async def test_checksums_are_those_of_the_whole_tensors(attached: Replica, monkeypatch: Any) -> None:
    """Whether a tensor is cut by rows, by columns or not at all, and read in one piece or in several."""
    expected = {name: xxhash.xxh3_64_intdigest(t.numpy().tobytes()) for name, t in attached.state.items()}
    assert await attached.workers.checksums() == expected
    monkeypatch.setattr("atoll.rollout.engines.sglang.workers.READ_BYTES", 3 * 64 * 4)  # 3 rows
    assert await attached.workers.checksums() == expected


async def test_parts_that_did_not_change_are_not_copied_again(attached: Replica) -> None:
    attached.train()
    await attached.push(V1)
    attached.state["model.norm.weight"].add_(1)
    moves = attached.plan.transfers
    norm = moves["tensor"] == attached.plan.tensors.index("model.norm.weight")
    changed = moves[np.isin(moves["round"], moves["round"][norm])]
    assert len(set(changed["target"])) == 2
    num_bytes = 4 * int((changed["rows"] * changed["columns"]).sum())
    assert await attached.receive(V2, attached.publish(V2)) == num_bytes < 4 * 2 * (1 << 12) + 1
    await attached.commit(V2)
    assert torch.equal(attached.live(1)["model.norm.weight"], attached.state["model.norm.weight"])


async def test_a_corrupted_slice_is_never_committed(attached: Replica, tiny_qwen2: Path) -> None:
    old = {name: t.clone() for name, t in attached.state.items()}
    attached.train()
    parts = attached.publish(V1)
    stream = parts[-1].streams[0]
    wrong = replace(stream, checksum=stream.checksum ^ 1)
    parts[-1] = replace(parts[-1], streams=(wrong, *parts[-1].streams[1:]))
    with pytest.raises(WeightPushError, match="nothing was committed"):
        await attached.receive(V1, parts)
    with pytest.raises(WeightPushError, match="commit of a3f0:1"):
        await attached.commit(V1)
    assert attached.calls == []
    spec = read_spec(tiny_qwen2)
    assert all(equal(attached.live(rank), shard(old, spec, rank, 2)) for rank in range(2))
    await attached.push(V2)  # and it is ready for the next
    assert all(equal(attached.live(rank), shard(attached.state, spec, rank, 2)) for rank in range(2))


async def test_what_is_not_staged_whole_on_every_rank_is_refused(attached: Replica) -> None:
    with pytest.raises(WeightPushError, match="nothing is staged"):
        await attached.commit(V1)
    attached.train()
    parts = attached.publish(V1)
    await attached.receive(V1, parts[:-1])
    with pytest.raises(WeightPushError, match="have not arrived"):
        await attached.commit(V1)
    await attached.receive(V1, parts[-1:])
    await attached.workers.rollback(V1)
    with pytest.raises(WeightPushError, match="nothing is staged"):
        await attached.commit(V1)
    assert attached.calls == []


async def test_a_rank_that_does_not_follow_breaks_the_engine(attached: Replica) -> None:
    attached.train()
    attached.deaf = 1
    with pytest.raises(EngineDiedError, match="rank 1 should have committed a3f0:1; it says: nothing"):
        await attached.push(V1)


async def test_a_commit_that_fails_says_why(attached: Replica, monkeypatch: Any) -> None:
    def fail(self: Refit, version: Version) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(Refit, "commit", fail)
    attached.train()
    with pytest.raises(EngineDiedError, match="it says: a3f0:1: device lost"):
        await attached.push(V1)


def test_the_loader_never_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Outside of SGLang it can only fail."""
    refit(torch.nn.Module(), [])
    assert "weight receiver failed" in caplog.text


async def test_copies_that_differ_are_found(attached: Replica) -> None:
    attached.live(1)["model.layers.1.input_layernorm.weight"][3] += 1
    with pytest.raises(WeightPushError, match=r"ranks 0 and 1 hold different copies of 'model\.layers\.1"):
        await attached.workers.checksums()


async def test_adapters_alone_are_merged_into_the_folders_weights(replica: Replica, tiny_qwen2: Path) -> None:
    spec = replace(read_spec(tiny_qwen2), num_layers=2)
    base, targets = replica.state, ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    replica.workers._setup = ReceiverSetup("shm", 10.0, "device", LoraSpec(3, 5.0, targets))
    await replica.workers.attach(replica.post)
    shard_layout = replica.workers.shard_layouts()[0]
    shapes = dict(zip(shard_layout.tensors, shard_layout.boxes[["rows", "columns"]].tolist(), strict=True))
    replica.state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for version in (V1, V2):
        replica.train()
        await replica.push(version)
        expected = {name: tensor.clone() for name, tensor in base.items()}
        for name, tensor in expected.items():
            a = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
            if a in replica.state:
                b = replica.state[a.replace("lora_A", "lora_B")]
                assert tensor.shape == (len(b), replica.state[a].shape[1])
                tensor += 5 / 3 * b @ replica.state[a]
        for rank in range(2):
            for name, whole_tensor in shard(expected, spec, rank, 2).items():
                torch.testing.assert_close(
                    replica.live(rank)[name], whole_tensor, rtol=0, atol=1e-5, equal_nan=True
                )
    sums = {name: xxhash.xxh3_64_intdigest(t.numpy().tobytes()) for name, t in replica.state.items()}
    assert await replica.workers.checksums() == sums


@pytest.mark.parametrize("kind", ["mixed", "packed", "up_first"])
async def test_weights_that_are_not_kept_as_they_were_loaded_are_refused(replica: Replica, kind: str) -> None:
    layer = replica.models[1].get_submodule("model.layers.0.mlp.gate_up_proj")
    if kind == "mixed":
        layer.weight.data = layer.weight.to(torch.float8_e4m3fn)
    elif kind == "packed":
        layer.use_intel_amx_backend = True
    else:
        layer.quant_method = type("Method", (), {"load_up_proj_weight_first": True})()
    reasons = {
        "mixed": "only to float32 or bfloat16",
        "packed": "packed for AMX",
        "up_first": "up before gate",
    }
    with pytest.raises(UserError, match=reasons[kind]):
        await replica.workers.attach(replica.post)
