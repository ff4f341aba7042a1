"""Optimizer and weight state for checkpoints, in tensors whose names, shapes and offsets do not depend on the
parallel layout.

Of each parameter that is trained: the fp32 values that the optimizer steps (those that bf16 weights are
rounded from) and, after the first update, its two moments. The distributed optimizer gives each
data-parallel rank a flat range of every parameter; such a range of a matrix is a few boxes of it, so ranks
write and read their own parts and exchange nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import DistributedOptimizer, MegatronOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from atoll.trainer.megatron.adapters.lora import adapter_state
from atoll.trainer.step import Learner

Place = tuple[int, ...]
Locate = Callable[[Tensor], Tensor]  # what has a tensor's values; see ModelOffloader.locate
BITS = {2: torch.int16, 4: torch.int32}  # by the bytes of an element
MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim.AdamW and TransformerEngine's FusedAdam name them


@dataclass(frozen=True, eq=False)
class TensorBoxes:
    """This rank's boxes of one tensor of the checkpoint, as torch.distributed.checkpoint asks for them."""

    shape: Place  # of the whole tensor
    parts: dict[Place, Tensor]  # by the box's first element

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in self.parts.items()]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


@dataclass(frozen=True, eq=False)
class _Owned:
    """The part of a parameter updated by this rank's optimizer."""

    stepped: Tensor  # fp32
    state: dict[str, Any]  # of the optimizer
    start: int  # of `stepped` among the parameter's elements
    is_range: bool  # other data-parallel ranks step other elements, else the same

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Flat."""
        moments = {name: self.state[name].view(-1) for name in MOMENTS if name in self.state}
        return {"weight": self.stepped.detach().view(-1)} | moments


def at_place(tensor: Tensor) -> Tensor:
    """Of a learner that is not off-loaded."""
    return tensor


def snapshot(
    learner: Learner, locate: Locate, copy_to_host: Callable[[Sequence[Tensor]], Iterator[Tensor]]
) -> dict[str, TensorBoxes]:
    """A copy in host memory of what this rank is to write; all ranks together write everything once."""
    state = _state(learner, locate, is_saving=True)
    copies = copy_to_host([part for boxes in state.values() for part in boxes.parts.values()])
    return {
        name: replace(boxes, parts={at: next(copies) for at in boxes.parts}) for name, boxes in state.items()
    }


def allocate_state(learner: Learner, num_updates: int) -> dict[str, TensorBoxes]:
    """Where to load the state after `num_updates` updates; `loaded` comes next."""
    for part in learner.optimizer.chained_optimizers:
        for owned in _owned_ranges(part).values():
            owned.state.clear()
            if num_updates:
                owned.state.update({name: torch.zeros_like(owned.stepped) for name in MOMENTS})
                _count(part, owned, num_updates)
    return _state(learner, at_place, is_saving=False)


def apply_loaded_state(learner: Learner) -> None:
    """Copies loaded values to all copies of the weights. Every rank calls it."""
    for part in learner.optimizer.chained_optimizers:
        if not isinstance(part, FP32Optimizer):
            part._copy_main_params_to_model_params()
    for chunk in learner.chunks:
        if chunk.ddp_config.use_distributed_optimizer:
            chunk.start_param_sync(force_sync=True)


def frozen_checksum(learner: Learner, group: dist.ProcessGroup, locate: Locate) -> int | None:
    """Of the weights that are not trained and therefore not saved, on all ranks: the sum of their bits, the
    same on every layout. None if every weight is trained. Every rank calls it."""
    if learner.model.lora is None:
        return None
    total = torch.zeros((), dtype=torch.int64)
    for network in learner.model.chunks:
        for parameter, whole, _ in _places(network.sharded_state_dict(), locate):
            if not parameter.requires_grad and not any(whole.replica_id):
                bits = locate(parameter.detach()).view(BITS[parameter.element_size()])
                total += bits.sum(dtype=torch.int64).cpu()
    dist.all_reduce(total, group=group)
    return int(total)


def boxes_of_range(shape: Place, start: int, end: int) -> Iterator[tuple[Place, Place]]:
    """The elements [start, end) of a row-major tensor as boxes in ascending order: (first element, shape)."""
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    size = prod(shape[1:])
    while start < end:
        row, first = divmod(start, size)
        if first or end - start < size:
            stop = min(end, (row + 1) * size)
            for at, lengths in boxes_of_range(shape[1:], first, first + stop - start):
                yield (row, *at), (1, *lengths)
        else:
            num_rows = (end - start) // size
            stop = start + num_rows * size
            yield (row, *[0] * (len(shape) - 1)), (num_rows, *shape[1:])
        start = stop


def _state(learner: Learner, locate: Locate, *, is_saving: bool) -> dict[str, TensorBoxes]:
    owned = dict(
        chain.from_iterable(_owned_ranges(part).items() for part in learner.optimizer.chained_optimizers)
    )
    found: dict[str, TensorBoxes] = {}
    for network in learner.model.chunks:
        state = network.sharded_state_dict() if learner.model.lora is None else adapter_state(network)
        for parameter, whole, places in _places(state, locate):
            if (own := owned.get(parameter)) is None or (is_saving and not _writes(whole, own)):
                continue
            for name, values in own.tensors.items():
                for place in places:
                    shape = tuple(place.global_shape)
                    boxes = found.setdefault(f"{name}.{place.key}", TensorBoxes(shape, {}))
                    boxes.parts.update(_cut(place, parameter, own, locate(values)))
    return found


def _writes(whole: ShardedTensor | ShardedTensorFactory, own: _Owned) -> bool:
    """Whether no other rank writes the same: a replica's number is (stage, tensor, data rank)."""
    stage, tensor, data = whole.replica_id
    return stage == tensor == 0 and (own.is_range or data == 0)


def _cut(
    place: ShardedTensor, parameter: Tensor, own: _Owned, values: Tensor
) -> Iterator[tuple[Place, Tensor]]:
    """The boxes of `place` that lie in the range that this rank owns, as views of `values`."""
    first = place.data.storage_offset() - parameter.storage_offset()
    start, end = max(first, own.start), min(first + place.data.numel(), own.start + own.stepped.numel())
    if start >= end:
        return
    extra = place.prepend_axis_num  # the axis of the layers
    for at, lengths in boxes_of_range(tuple(place.local_shape), start - first, end - first):
        offset = tuple(a + b for a, b in zip(place.global_offset, (*[0] * extra, *at), strict=True))
        size = prod(lengths)
        part = values[start - own.start : start - own.start + size].view(*[1] * extra, *lengths)
        start += size
        yield offset, part


def _places(
    state: dict[str, Any], locate: Locate
) -> Iterator[tuple[Tensor, ShardedTensor | ShardedTensorFactory, list[ShardedTensor]]]:
    """Each parameter of what Megatron would save, as a whole and as the pieces that are apart from each other
    in the checkpoint's tensors (an MLP's gate and up)."""
    for whole in nested_values(state):
        if isinstance(whole, ShardedTensorFactory):
            located = replace(whole, data=locate(whole.data))  # it makes views, which need a storage
            yield whole.data, whole, list(nested_values(located.build()))
        elif isinstance(whole, ShardedTensor):
            yield whole.data, whole, [whole]


def _owned_ranges(part: MegatronOptimizer) -> dict[Tensor, _Owned]:
    """By parameter; none if this rank has nothing that the optimizer updates."""
    adam = part.optimizer
    if adam is None:
        return {}
    if isinstance(part, DistributedOptimizer):
        owned = {}
        for parameter, (group, number) in part.model_param_group_index_map.items():
            values = adam.param_groups[group]["params"][number]
            start = part._get_model_param_range_map(parameter)["param"].start
            owned[parameter] = _Owned(values, adam.state[values], start, is_range=True)
        return owned
    return {
        parameter: _Owned(values, adam.state[values], 0, is_range=False)
        for parameter, values in _stepped_parameters(part)
    }


def _stepped_parameters(part: MegatronOptimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters and what is stepped in their place."""
    if isinstance(part, FP32Optimizer):
        groups = [group["params"] for group in part.param_groups]
        pairs = zip(groups, groups, strict=True)
    else:
        stepped = [*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups]
        pairs = zip([*part.float16_groups, *part.fp32_from_fp32_groups], stepped, strict=True)
    for parameters, values in pairs:
        yield from zip(parameters, values, strict=True)


def _count(part: MegatronOptimizer, owned: _Owned, num_updates: int) -> None:
    """Tells AdamW how many updates were made: PyTorch's counts per parameter, FusedAdam per group."""
    if isinstance(part.optimizer, torch.optim.AdamW):
        owned.state["step"] = torch.tensor(float(num_updates), device=owned.stepped.device)
    else:
        for group in part.param_groups:
            group["step"] = num_updates
