"""Synthetic models in random tensor-parallel layouts, for tests of weight pushes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atoll.wire.types import BOX, ShardLayout

SHAPES = {"embed": (40, 12), "qkv": (24, 12), "out": (12, 8), "norm": (12, 1), "down": (12, 16)}
AXES = {"embed": 0, "qkv": 0, "out": 1, "norm": None, "down": 1}  # split by tensor parallelism


@dataclass(frozen=True, eq=False)
class Shard:
    shard_layout: ShardLayout
    buffers: list[torch.Tensor]

    def fill(self, model: dict[str, torch.Tensor]) -> None:
        """Writes this shard's boxes of the model's tensors [rows, columns]."""
        for name, box, place in self._places():
            rows, columns = slice(box["row"], box["row"] + box["rows"]), slice(box["column"], None)
            place.copy_(model[name][rows, columns][:, : box["columns"]])

    def read_into(self, model: dict[str, torch.Tensor]) -> None:
        for name, box, place in self._places():
            for i in range(box["rows"]):
                for j in range(box["columns"]):
                    model[name][box["row"] + i, box["column"] + j] = place[i, j]

    def _places(self):
        for box in self.shard_layout.boxes:
            end = box["offset"] + box["rows"] * box["stride"]
            place = self.buffers[box["buffer"]][box["offset"] : end].view(
                int(box["rows"]), int(box["stride"])
            )
            yield self.shard_layout.tensors[box["tensor"]], box, place[:, : box["columns"]]


def random_model(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def shards(tensor: int, data: int = 1, dtype: torch.dtype = torch.float32, gap: int = 0) -> list[Shard]:
    """`gap` unused elements after each row. Ranks are numbered as in Megatron: the tensor axis is fastest."""
    return [_shard(rank % tensor, tensor, dtype, gap) for rank in range(tensor * data)]


def _shard(rank: int, ranks: int, dtype: torch.dtype, gap: int) -> Shard:
    boxes, sizes = [], [0, 0]
    for t, (name, (rows, columns)) in enumerate(SHAPES.items()):
        row = column = 0
        if AXES[name] == 0:
            rows //= ranks
            row = rank * rows
        elif AXES[name] == 1:
            columns //= ranks
            column = rank * columns
        buffer, stride = t % 2, columns + gap
        boxes.append((t, row, rows, column, columns, buffer, sizes[buffer], stride))
        sizes[buffer] += rows * stride
    return Shard(
        ShardLayout(tuple(SHAPES), np.array(boxes, BOX)), [torch.zeros(size, dtype=dtype) for size in sizes]
    )


def shard_layouts(parts: Sequence[Shard]) -> list[ShardLayout]:
    return [part.shard_layout for part in parts]
