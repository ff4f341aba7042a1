"""Merges low-rank adapters into a rank's matrices, if the trainer pushes only adapters.

SGLang then computes with plain weights, at full speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from atoll.rollout.engines.adapters import AdapterBuffer
from atoll.weights.boxes import box_view
from atoll.wire.types import ShardLayout


@dataclass(frozen=True, slots=True)
class _AdaptedBox:
    """A box of a matrix that has an adapter."""

    tensor: str
    rows: slice
    columns: slice
    live: torch.Tensor
    base: torch.Tensor  # as it was loaded


class MergedAdapters:
    def __init__(
        self, adapters: AdapterBuffer, parameters: Sequence[torch.Tensor], boxes: ShardLayout
    ) -> None:
        """`boxes` are those of the rank's flat parameters, which are the folder's now. Keeps a copy of the
        matrices that have adapters."""
        self._adapters = adapters
        self._parts = []
        for t, row, rows, column, columns, buffer, offset, stride in boxes.boxes.tolist():
            if boxes.tensors[t] in adapters.targets:
                live = box_view(parameters[buffer], rows, columns, offset, stride)
                place = slice(row, row + rows), slice(column, column + columns)
                self._parts.append(_AdaptedBox(boxes.tensors[t], *place, live, live.clone()))

    def merge(self, buffer: torch.Tensor) -> None:
        """Makes each matrix base + scale * B A, in float32 and rounded once, as the trainer merges."""
        held = self._adapters.of(buffer)
        for part in self._parts:
            a, b = held[part.tensor]
            inputs, outputs = a[:, part.columns].float(), b[part.rows].float()
            part.live.copy_(torch.addmm(part.base.float(), outputs, inputs, alpha=self._adapters.scale))
