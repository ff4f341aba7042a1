"""The boxes of canonical tensors that this rank holds, and their positions in its memory."""

from collections.abc import Iterator

import numpy as np
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from atoll.runtime.errors import UserError
from atoll.trainer.megatron.adapters.adapter import is_adapter_parameter
from atoll.trainer.megatron.model import MegatronModel, Network
from atoll.trainer.megatron.names import Chunk, Flavour, tensor_slices
from atoll.weights.boxes import box_view
from atoll.weights.tensor_slices import TensorSlice, shard_layout_of
from atoll.wire.types import ShardLayout


def chunk_of(network: Network) -> Chunk:
    layers = network.decoder.layers
    first = layers[0].layer_number - 1 if len(layers) else 0
    num_experts = (
        network.config.num_moe_experts or 0
    ) // parallel_state.get_expert_model_parallel_world_size()
    first_expert = num_experts * parallel_state.get_expert_model_parallel_rank()
    return Chunk(
        range(first, first + len(layers)),
        network.pre_process,
        network.post_process,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        range(first_expert, first_expert + num_experts),
    )


def shard_layout(model: MegatronModel) -> tuple[ShardLayout, list[Tensor]]:
    """The boxes of this rank, and the flat buffers that they index: one view per parameter.

    Boxes held by several ranks (norms, copies of a tied embedding) are in each one's layout. The views stay
    valid until the parameters' storage is replaced. Raises UserError for a parameter that has no canonical
    name.
    """
    parameters: dict[str, Tensor] = {}
    held: dict[str, list[TensorSlice]] = {}
    for i, network in enumerate(model.chunks):
        parameters |= {
            f"{i}.{name}": parameter
            for name, parameter in network.named_parameters()
            if not is_adapter_parameter(name)
        }
        flavour: Flavour = (
            "transformer_engine" if any("layer_norm_weight" in name for name in parameters) else "local"
        )
        named = tensor_slices(model.spec, chunk_of(network), flavour)
        held |= {f"{i}.{name}": parts for name, parts in named.items()}
    if held.keys() != parameters.keys():
        name = min(held.keys() ^ parameters.keys())
        raise UserError(
            f"Megatron's parameter {name} "
            + ("has no Hugging Face name" if name in parameters else "is missing")
            + f": expected the {len(held)} of names.py; install the megatron-core that constraints.txt names"
        )
    for name, parts in held.items():
        assert sum(piece.rows * piece.columns for piece in parts) == parameters[name].numel(), name
    buffers = [parameters[name].detach().view(-1) for name in held]
    return shard_layout_of(held.values()), buffers


def boxes_of(model: MegatronModel) -> Iterator[tuple[str, NDArray[np.void], Tensor]]:
    """Each box of this rank with its tensor's name and its memory [rows, columns] in the parameter."""
    listing, buffers = shard_layout(model)
    for box in listing.boxes:
        _, _, rows, _, columns, buffer, offset, stride = box.item()
        yield listing.tensors[box["tensor"]], box, box_view(buffers[buffer], rows, columns, offset, stride)
