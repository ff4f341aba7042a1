"""Which boxes of the canonical tensors this rank holds, and where in its memory."""

from collections.abc import Iterator

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from services.runtime.model_spec import ModelSpec
from services.trainer.names import pieces
from services.weights.boxes import box_view
from services.wire.types import BOX, Catalog


def catalog(model: torch.nn.Module, spec: ModelSpec) -> tuple[Catalog, list[Tensor]]:
    """The boxes of this rank, and the flat buffers that they index: one view per parameter.

    A tensor that all tensor-parallel ranks hold whole (the norms) is in every rank's catalog.
    The views stay valid until the parameters' storage is replaced.
    """
    parameters = dict(model.named_parameters())
    held = pieces(
        spec,
        rank=parallel_state.get_tensor_model_parallel_rank(),
        size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    assert held.keys() == parameters.keys(), held.keys() ^ parameters.keys()
    tensors = tuple(dict.fromkeys(piece.tensor for name in held for piece in held[name]))
    number = {tensor: i for i, tensor in enumerate(tensors)}
    boxes = []
    for buffer, name in enumerate(held):
        offset = 0
        for piece in held[name]:
            boxes.append(
                (
                    number[piece.tensor],
                    piece.row,
                    piece.rows,
                    piece.column,
                    piece.columns,
                    buffer,
                    offset,
                    piece.columns,
                )
            )
            offset += piece.rows * piece.columns
        assert offset == parameters[name].numel(), name
    buffers = [parameters[name].detach().view(-1) for name in held]
    return Catalog(tensors, np.array(boxes, BOX)), buffers


def boxes_of(model: torch.nn.Module, spec: ModelSpec) -> Iterator[tuple[str, NDArray[np.void], Tensor]]:
    """Each box of this rank with its tensor's name and the parameter's memory [rows, columns] it names."""
    listing, buffers = catalog(model, spec)
    for box in listing.boxes:
        _, _, rows, _, columns, buffer, offset, stride = box.item()
        yield listing.tensors[box["tensor"]], box, box_view(buffers[buffer], rows, columns, offset, stride)
