"""What reaches each rank of a replica when a trainer of another layout pushes: its own shard, once."""

from typing import Any

import torch

from atoll.cli.plan_weights import replica_catalogs, trainer_catalogs
from atoll.config.schema import ParallelConfig
from atoll.rollout.refit import Refit
from atoll.runtime.model_spec import ModelSpec
from atoll.trainer.publish import Publisher
from atoll.weights.plan import plan
from atoll.weights.transport import shm
from atoll.wire.types import Catalog, Membership, PublishRequest, PushPart, Version

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
    sources, targets = trainer_catalogs(SPEC, TRAINER), replica_catalogs(SPEC, tp_size)
    found = plan(sources, targets, part_elements=PART_ELEMENTS)
    publishers = [
        Publisher(rank, _buffers(catalog), shm.Sender, stays_readable=True)
        for rank, catalog in enumerate(sources)
    ]
    refits = [
        Refit(_buffers(catalog), Version("", 0), shm.Receiver(), rank) for rank, catalog in enumerate(targets)
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
        refit.commit(VERSION)  # raises where a slice is missing
    own = [_num_elements(catalog) * 4 for catalog in targets]
    assert got == own, (got, own)
    return {"received": got, "shard": own}


def _buffers(catalog: Catalog) -> list[torch.Tensor]:
    sizes = [0] * (int(catalog.boxes["buffer"].max()) + 1)
    for box in catalog.boxes:
        sizes[box["buffer"]] += int(box["rows"] * box["columns"])
    return [torch.rand(size) for size in sizes]


def _num_elements(catalog: Catalog) -> int:
    return int((catalog.boxes["rows"] * catalog.boxes["columns"]).sum())
