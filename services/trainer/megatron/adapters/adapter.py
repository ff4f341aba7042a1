"""Low-rank adapters on Megatron's linear layers: y = W x + alpha / rank * B A x (arXiv:2106.09685).

Each canonical projection has its own A and B, even if Megatron fuses several (q, k and v; gate and up), so
that adapters correspond to PEFT's.

Letters in shapes: T tokens, I inputs and O outputs of a layer on this rank, R rank of the adapters.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TypeAlias

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

from atoll.weights.tensor_slices import TensorSlice

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear


class Adapter(torch.nn.Module):
    """The adapter of one canonical projection: this rank's parts of A and B, and their positions in the whole
    matrices."""

    def __init__(self, tensor: str, a: TensorSlice, b: TensorSlice, scale: float, linear: Linear) -> None:
        super().__init__()
        self.tensor, self.a, self.b, self.scale = tensor, a, b, scale
        like = linear.weight
        self.lora_A = torch.nn.Parameter(like.new_empty(a.rows, a.columns))
        self.lora_B = torch.nn.Parameter(like.new_zeros(b.rows, b.columns))
        # The matrix on the split side of the layer is split like the layer; the other one is whole on every
        # rank, and with sequence parallelism its gradient covers only this rank's tokens, which Megatron sums
        # if the parameter is tagged.
        self._split = "lora_B" if isinstance(linear, ColumnParallelLinear) else "lora_A"
        for kind, _, parameter in self.parts:
            if self.is_split(kind):
                axis = 0 if kind == "lora_B" else 1
                set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=axis, stride=1)
            else:
                parameter.sequence_parallel = linear.config.sequence_parallel  # type: ignore[attr-defined]

    def is_split(self, kind: str) -> bool:
        """Whether this matrix is split over tensor-parallel ranks, instead of whole on each."""
        return kind == self._split

    @property
    def parts(self) -> tuple[tuple[str, TensorSlice, torch.nn.Parameter], ...]:
        return ("lora_A", self.a, self.lora_A), ("lora_B", self.b, self.lora_B)


class LayerAdapters(torch.nn.ModuleDict):
    """The adapters of one linear layer, by projection. Their output has the layout of the layer's own."""

    def __init__(self, linear: Linear, layout: Sequence[TensorSlice], adapters: Sequence[Adapter]) -> None:
        """`layout`: the rows of canonical tensors that the layer's outputs correspond to, in order."""
        super().__init__({each.tensor.split(".")[-2]: each for each in adapters})
        self._layout = layout
        self._is_column = isinstance(linear, ColumnParallelLinear)
        self._group, self._sequence_parallel = linear.tp_group, linear.config.sequence_parallel

    def forward(self, x_T1I: Tensor) -> Tensor:
        """[T, 1, O], to be added to the layer's output."""
        adapters: list[Adapter] = list(self.values())  # type: ignore[arg-type]
        low = self._exchange(x_T1I @ torch.cat([each.lora_A for each in adapters]).T)
        rows = {piece.tensor: piece.rows for piece in self._layout}
        parts: dict[str, Iterator[Tensor]] = {}
        for each, low_T1R in zip(adapters, low.chunk(len(adapters), -1), strict=True):
            delta = (low_T1R * each.scale) @ each.lora_B.T
            parts[each.tensor] = iter(torch.split(delta, rows[each.tensor], -1))
        for piece in self._layout:  # projections without an adapter
            if piece.tensor not in parts:
                parts[piece.tensor] = repeat(low.new_zeros(*low.shape[:-1], piece.rows))
        return torch.cat([next(parts[piece.tensor]) for piece in self._layout], -1)

    def _exchange(self, low: Tensor) -> Tensor:
        """Exchanges A x between tensor-parallel ranks as the layer does, but of size R instead of the hidden
        size. A column-parallel layer has all of A x and sums its gradient; a row-parallel one sums A x."""
        match self._is_column, self._sequence_parallel:
            case True, False:
                exchange = copy_to_tensor_model_parallel_region
            case True, True:
                exchange = gather_from_sequence_parallel_region
            case False, False:
                exchange = reduce_from_tensor_model_parallel_region
            case _:
                exchange = reduce_scatter_to_sequence_parallel_region
        return exchange(low, group=self._group)  # type: ignore[no-any-return]


def add_adapters(linear: Linear, adapters: LayerAdapters) -> None:
    """From now on the layer's output is the sum. Its own parameters keep their names."""
    linear.adapters = adapters
    linear.register_forward_hook(_add)


def _add(linear: Linear, inputs: tuple[Tensor], output: tuple[Tensor, Tensor | None]) -> object:
    result, bias = output
    return result + linear.adapters(inputs[0]), bias


def is_adapter_parameter(parameter: str) -> bool:
    """`parameter`: its name in the network."""
    return ".adapters." in parameter
