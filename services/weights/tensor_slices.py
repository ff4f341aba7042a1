"""Slices of canonical (Hugging Face named) tensors held by a process's parameters. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.wire.types import BOX, ShardLayout


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows [row, row + rows) and columns [column, column + columns) of a canonical tensor.

    The slices of a parameter are stored one after another, row-major. A one-dimensional tensor of n elements
    is n rows of one column.
    """

    tensor: str
    row: int
    rows: int
    column: int
    columns: int


def shard_layout_of(held: Iterable[Sequence[TensorSlice]]) -> ShardLayout:
    """The shard layout of a process whose n-th buffer holds the n-th slices, one after another."""
    numbers: dict[str, int] = {}
    boxes = []
    for buffer, parts in enumerate(held):
        offset = 0
        for piece in parts:
            number = numbers.setdefault(piece.tensor, len(numbers))
            place = (piece.row, piece.rows, piece.column, piece.columns)
            boxes.append((number, *place, buffer, offset, piece.columns))
            offset += piece.rows * piece.columns
    return ShardLayout(tuple(numbers), np.array(boxes, BOX))
