"""Unmerged low-rank adapters on the local engine's matrices, if the trainer pushes only adapters.

The adapters of matrices that the forward pass multiplies as one are one, too: their A side by side, their B
along a diagonal.
"""

from dataclasses import replace

import torch

from atoll.rollout.engines.adapters import AdapterBuffer
from atoll.rollout.engines.local_weights import BufferLayout, FlatTensor, LowRank, Weights
from atoll.wire.types import LoraSpec, ShardLayout


class AdapterLayout:
    """Replaces BufferLayout if only adapters are pushed."""

    def __init__(self, base: BufferLayout, weights: Weights, lora: LoraSpec) -> None:
        """`weights` are those that `base` has bound."""
        self._weights, self._layers = weights, base.layers
        self._adapters = AdapterBuffer(base.shard_layout, lora)

    @property
    def shard_layout(self) -> ShardLayout:
        return self._adapters.shard_layout

    def zeros(self) -> torch.Tensor:
        """A buffer whose adapters add nothing."""
        return self._adapters.zeros(self._weights.embedding)

    def bind(self, buffer: torch.Tensor) -> Weights:
        """The folder's weights with these adapters. Must be called again after the buffer has changed."""
        held = self._adapters.of(buffer)
        layers = [
            replace(layer, adapters=self._join_adapters(fields, held))
            for layer, fields in zip(self._weights.layers, self._layers, strict=True)
        ]
        return replace(self._weights, layers=tuple(layers))

    def _join_adapters(
        self, fields: dict[str, list[FlatTensor]], held: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> dict[str, LowRank]:
        """Of one layer, by the field of its matrix."""
        found = {}
        for field, pieces in fields.items():
            downs, ups = [], []
            for piece in pieces:
                if piece.name not in held:
                    ups.append(torch.zeros(0, piece.rows))
                    continue
                a, b = held[piece.name]
                downs.append(a.t())
                ups.append(b.t() * self._adapters.scale)
            if downs:
                up = torch.block_diag(*ups).to(downs[0].dtype)  # type: ignore[no-untyped-call]
                found[field] = LowRank(torch.cat(downs, 1), up)
        return found
