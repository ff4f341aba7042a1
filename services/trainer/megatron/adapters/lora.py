"""Attaches, describes and merges low-rank adapters, for training only them. Their maths is in adapter.py.

Outside the trainer, a canonical matrix is the sum W + alpha / rank * B A.

Letters in shapes: R rows and C columns of a box, K rank of an adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from atoll.config.schema import LoraConfig
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import ModelSpec
from atoll.trainer.megatron.adapters.adapter import Adapter, LayerAdapters, add_adapters
from atoll.trainer.megatron.model import MegatronModel, Network
from atoll.trainer.megatron.names import shapes, tensor_slices
from atoll.trainer.megatron.shards import boxes_of, chunk_of, shard_layout
from atoll.weights.adapters import adapter_names, is_target
from atoll.weights.boxes import box_view
from atoll.weights.tensor_slices import TensorSlice
from atoll.wire.types import BOX, ShardLayout

EXPERTS = ("gate_proj", "up_proj", "down_proj")  # in a mixture of experts


def attach_adapters(model: MegatronModel, lora: LoraConfig, seed: int) -> None:
    """Freezes the model and adds adapters to its target layers, initially without effect: B is 0.

    A is drawn as in PEFT, uniform within 1 / sqrt(inputs), from `seed` and its own name: the same in every
    parallel layout.
    """
    whole = shapes(model.spec)
    for network in model.chunks:
        network.requires_grad_(False)
        modules = dict(network.named_modules())
        for name, layout in tensor_slices(model.spec, chunk_of(network)).items():
            tensors = dict.fromkeys(p.tensor for p in layout if is_target(p.tensor, lora.targets))
            if not tensors:
                continue
            linear = modules[name.removesuffix(".weight")]
            adapters = []
            for tensor in tensors:
                parts = _parts([piece for piece in layout if piece.tensor == tensor], lora.rank)
                adapter = Adapter(tensor, *parts, lora.alpha / lora.rank, linear)
                _draw(adapter, seed, num_inputs=whole[tensor][1])
                adapters.append(adapter)
            add_adapters(linear, LayerAdapters(linear, layout, adapters))
        if network.pre_process and network.config.recompute_granularity == "full":
            # a recomputed layer gets gradients only if its input requires them; a frozen embedding's does not
            network.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())


def check_targets(spec: ModelSpec, lora: LoraConfig) -> None:
    """Raises UserError if the model has a target that does not support adapters."""
    if spec.experts is not None and (refused := [name for name in lora.targets if name in EXPERTS]):
        raise UserError(
            f"trainer.lora.targets has {', '.join(refused)}, which are in this model's experts: a "
            "model with experts supports adapters only on attention; remove these"
        )


def _parts(held: list[TensorSlice], rank: int) -> tuple[TensorSlice, TensorSlice]:
    """The slices of A and B that belong to this rank's part of a matrix."""
    a, b = adapter_names(held[0].tensor)
    first_row, rows = min(piece.row for piece in held), sum(piece.rows for piece in held)
    return TensorSlice(a, 0, rank, held[0].column, held[0].columns), TensorSlice(b, first_row, rows, 0, rank)


def _draw(adapter: Adapter, seed: int, num_inputs: int) -> None:
    a = adapter.a
    generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed} {a.tensor}".encode()))
    whole = torch.empty(a.rows, num_inputs).uniform_(-1, 1, generator=generator) / num_inputs**0.5
    with torch.no_grad():
        adapter.lora_A.copy_(whole[:, a.column : a.column + a.columns])


def adapters_of(network: Network) -> dict[str, Adapter]:
    """Adapters by their names in the network."""
    return {name: module for name, module in network.named_modules() if isinstance(module, Adapter)}


def adapters(model: MegatronModel) -> dict[str, Adapter]:
    """Adapters by their canonical matrices; empty if every weight is trained."""
    return {each.tensor: each for network in model.chunks for each in adapters_of(network).values()}


def adapter_shard_layout(model: MegatronModel) -> tuple[ShardLayout, list[Tensor]]:
    """The boxes of PEFT's tensors that this rank holds, and their memory, like `shards.shard_layout`."""
    parts = [part for each in adapters(model).values() for part in each.parts]
    boxes = [
        (i, piece.row, piece.rows, piece.column, piece.columns, i, 0, piece.columns)
        for i, (_, piece, _) in enumerate(parts)
    ]
    tensors = tuple(piece.tensor for _, piece, _ in parts)
    return ShardLayout(tensors, np.array(boxes, BOX)), [memory.detach().view(-1) for _, _, memory in parts]


def merge_adapter(adapter: Adapter | None, row: int, column: int, memory_RC: Tensor) -> Tensor:
    """The box [R, C] at `row` and `column` of a canonical tensor with its adapter merged, in new memory:
    merging in place and subtracting again would leave rounding errors."""
    if adapter is None:
        return memory_RC
    row, column = row - adapter.b.row, column - adapter.a.column
    b_RK = adapter.lora_B.detach()[row : row + memory_RC.shape[0]].float()
    a_KC = adapter.lora_A.detach()[:, column : column + memory_RC.shape[1]].float()
    return torch.addmm(memory_RC.float(), b_RK, a_KC, alpha=adapter.scale).to(memory_RC.dtype)


def adapter_state(network: Network) -> dict[str, ShardedTensor]:
    """The adapters in the form of Megatron's checkpoints: parameter name -> its position in PEFT's tensor.

    Names and positions do not depend on the parallel layout, so any other layout finds its own parts.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    copy = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    found = {}
    for name, adapter in adapters_of(network).items():
        for kind, piece, parameter in adapter.parts:
            axis, is_split = 0 if kind == "lora_B" else 1, adapter.is_split(kind)
            found[f"{name}.{kind}"] = ShardedTensor.from_rank_offsets(
                piece.tensor,
                parameter,
                *([(axis, group.rank(), group.size())] if is_split else []),
                replica_id=(0, 0 if is_split else group.rank(), copy),
            )
    return found


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """The weights that are pushed to replicas."""

    shard_layout: ShardLayout
    buffers: list[Tensor]  # indexed by the shard layout
    refresh: Callable[[], None] | None = None  # updates the buffers; None: they are the live weights


def weights_to_push(model: MegatronModel) -> PushedWeights:
    """All weights, merged, or only the adapters: see LoraConfig.push."""
    if model.lora is None:
        return PushedWeights(*shard_layout(model))
    if model.lora.push == "adapter":
        return PushedWeights(*adapter_shard_layout(model))
    listing, buffers = shard_layout(model)
    own = adapters(model)
    adapted = {int(box["buffer"]) for box in listing.boxes if listing.tensors[box["tensor"]] in own}
    for buffer in adapted:
        buffers[buffer] = torch.empty_like(buffers[buffer], device="cpu")

    def refresh() -> None:
        for tensor, box, memory in boxes_of(model):
            _, row, rows, column, columns, buffer, offset, stride = box.item()
            if buffer in adapted:
                view = box_view(buffers[buffer], rows, columns, offset, stride)
                view.copy_(merge_adapter(own.get(tensor), row, column, memory))

    return PushedWeights(listing, buffers, refresh)
