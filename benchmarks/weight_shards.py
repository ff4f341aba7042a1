"""What reaches each rank of a replica when a trainer of another layout pushes: its own shard, once."""

from typing import Any

import torch

from atoll.cli.plan_weights import replica_shard_layouts, trainer_shard_layouts
from atoll.config.schema import ParallelConfig
from atoll.rollout.refit import Refit
from atoll.runtime.model_spec import ModelSpec
from atoll.trainer.publish import Publisher
from atoll.weights.plan import plan
from atoll.weights.transport import shm
from atoll.wire.types import Membership, PublishRequest, PushPart, ShardLayout, Version

SPEC = ModelSpec(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=2048,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    rope_theta=1e6,
    norm_eps=1e-6,
    max_positions=4096,
    head="language",
    tied=False,
    qkv_bias=True,
    qk_norm=False,
)
TRAINER = ParallelConfig(tensor=2, sequence=True, pipeline=2, data=2)
PART_ELEMENTS = 1 << 20
ALONE = Membership(epoch=1, num_members=1)
VERSION = Version("bench", 1)


def run() -> dict[str, Any]:
    """By the replica's tensor-parallel ranks: bytes that each got, and that its shard has."""
    return {f"tp{size}": _push(size) for size in (1, 2, 4)}


def _push(tp_size: int) -> dict[str, list[int]]:
    sources, targets = trainer_shard_layouts(SPEC, TRAINER), replica_shard_layouts(SPEC, tp_size)
    found = plan(sources, targets, part_elements=PART_ELEMENTS)
    publishers = [
        Publisher(rank, _buffers(shard_layout), shm.ShmSender, stays_readable=True)
        for rank, shard_layout in enumerate(sources)
    ]
    refits = [
        Refit(_buffers(shard_layout), Version("", 0), shm.ShmReceiver(), rank)
        for rank, shard_layout in enumerate(targets)
    ]
    got = [0] * tp_size
    for part in range(int(found.transfers["round"].max()) + 1):
        for publisher in publishers:
            streams = publisher.publish(
                PublishRequest(VERSION, "float32", {found.id: ALONE}, [found], part)
            ).streams
            for rank, refit in enumerate(refits):
                got[rank] += refit.receive(PushPart(VERSION, streams, found, ALONE))
    for refit in refits:
        refit.commit(VERSION)  # raises if a slice is missing
    own = [_num_elements(shard_layout) * 4 for shard_layout in targets]
    assert got == own, (got, own)
    return {"received": got, "shard": own}


def _buffers(shard_layout: ShardLayout) -> list[torch.Tensor]:
    sizes = [0] * (int(shard_layout.boxes["buffer"].max()) + 1)
    for box in shard_layout.boxes:
        sizes[box["buffer"]] += int(box["rows"] * box["columns"])
    return [torch.rand(size) for size in sizes]


def _num_elements(shard_layout: ShardLayout) -> int:
    return int((shard_layout.boxes["rows"] * shard_layout.boxes["columns"]).sum())
