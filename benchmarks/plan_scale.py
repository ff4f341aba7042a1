"""The plan of a push from 1,024 trainer ranks to replicas of TP8, for models of more than 100,000 tensors.

`dense`: TP8 x PP8 x DP16, a square matrix per tensor, every third one cut by columns. `experts`: PP8 x EP64 x
DP2, 64 layers of 576 experts. Each is planned in a process of its own, whose peak memory is read before and
after. The number of replicas does not matter: a class is planned once.
"""

import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from typing import Any

import numpy as np

from atoll.weights.plan import plan
from atoll.wire.codec.weights import encode_plan, encode_shard_layout
from atoll.wire.types import BOX, ShardLayout
from benchmarks.memory import peak_mib

RANKS, TP, PP = 1024, 8, 8
PART_ELEMENTS = 32 << 20 >> 1  # the default bucket in bfloat16
HIDDEN, FFN = 4096, 1536

# name, rows, columns, and the axis that tensor parallelism cuts
Tensor = tuple[str, int, int, int]


def run() -> dict[str, Any]:
    """By layout: CPU seconds, MiB above the inputs, MiB of the plan and of the trainer's shard layouts as
    they are sent, and counts.
    """
    with get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        return {kind: processes.apply(measure, (kind,)) for kind in LAYOUTS}


def measure(kind: str) -> dict[str, float]:
    sources, targets = LAYOUTS[kind]()
    peak_before, started = peak_mib(), time.process_time()
    found = plan(sources, targets, part_elements=PART_ELEMENTS)
    seconds, mib = time.process_time() - started, peak_mib() - peak_before
    transfers = found.transfers
    pairs = np.unique(transfers[["source", "target"]])
    parts = np.unique(transfers[["source", "target", "round"]])
    busiest = max(int(np.bincount(parts[side]).max()) for side in ("source", "target"))
    shard_layouts = [
        encode_shard_layout(shard_layout) for shard_layout in {id(c): c for c in sources}.values()
    ]
    return {
        "cpu_s": seconds,
        "mib_above_inputs": mib,
        "wire_mib": encode_plan(found).ByteSize() / 2**20,
        "catalogs_wire_mib": sum(shard_layout.ByteSize() for shard_layout in shard_layouts) / 2**20,
        "ranks": len(sources),
        "tensors": len(found.tensors),
        "transfers": len(transfers),
        "rounds": int(transfers["round"].max()) + 1,
        "parts_of_busiest_rank": busiest,
        "max_senders": int(np.bincount(pairs["target"]).max()),
    }


def _dense() -> tuple[list[ShardLayout], list[ShardLayout]]:
    tensors = [
        (f"model.layers.{i // 7}.matrix_{i % 7}.weight", 2048, 2048, i % 3 == 2) for i in range(100_002)
    ]
    stages = [tensors[len(tensors) * p // PP : len(tensors) * (p + 1) // PP] for p in range(PP)]
    sources = [_shard_layout(stage, rank, TP) for stage in stages for rank in range(TP)]
    return sources * (RANKS // len(sources)), [_shard_layout(tensors, rank, TP) for rank in range(TP)]


def _experts(
    layers: int = 64, experts: int = 576, groups: int = 64
) -> tuple[list[ShardLayout], list[ShardLayout]]:
    def of(held_layers: range, held_experts: range) -> Iterator[Tensor]:
        for layer in (f"model.layers.{i}" for i in held_layers):
            for name in ("q_proj", "k_proj", "v_proj"):
                yield f"{layer}.self_attn.{name}.weight", HIDDEN, HIDDEN, 0
            yield f"{layer}.self_attn.o_proj.weight", HIDDEN, HIDDEN, 1
            for expert in (f"{layer}.mlp.experts.{i}" for i in held_experts):
                yield f"{expert}.gate_proj.weight", FFN, HIDDEN, 0
                yield f"{expert}.up_proj.weight", FFN, HIDDEN, 0
                yield f"{expert}.down_proj.weight", HIDDEN, FFN, 1

    size = experts // groups
    sources = [
        _shard_layout(
            list(of(range(layers * p // PP, layers * (p + 1) // PP), range(g * size, (g + 1) * size))), 0, 1
        )
        for p in range(PP)
        for g in range(groups)
    ]
    whole = list(of(range(layers), range(experts)))
    return sources * (RANKS // len(sources)), [_shard_layout(whole, rank, TP) for rank in range(TP)]


def _shard_layout(tensors: Sequence[Tensor], rank: int, ranks: int) -> ShardLayout:
    """A buffer per tensor, cut evenly."""
    names, rows, columns, axes = zip(*tensors, strict=True)
    boxes = np.zeros(len(names), BOX)
    boxes["tensor"] = boxes["buffer"] = np.arange(len(names))
    for axis, (at, size, whole) in enumerate((("row", "rows", rows), ("column", "columns", columns))):
        boxes[size] = np.where(np.array(axes) == axis, np.array(whole) // ranks, whole)
        boxes[at] = np.where(np.array(axes) == axis, boxes[size] * rank, 0)
    boxes["stride"] = boxes["columns"]
    return ShardLayout(names, boxes)


LAYOUTS = {"dense": _dense, "experts": _experts}
