"""Offloads a model's memory to the host while other models use the device.

Storages are freed and refilled in place, so that all views stay valid: parameters in a gradient buffer, and
those held by the optimizer or a Publisher.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from atoll.trainer.megatron.model import MegatronModel
from atoll.trainer.step import Learner


class MemoryKind(Enum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"


class ModelOffloader:
    """Offloads the memory of one model on this rank, with gradients and optimizer state. Everything starts on
    the device.
    """

    def __init__(self, model: MegatronModel, learner: Learner | None) -> None:
        self._parts = {MemoryKind.PARAMETERS: _Storages(lambda: model.parameters)}
        if learner is not None:
            self._parts[MemoryKind.GRADIENTS] = _Storages(
                lambda: _gradients(learner), worth_keeping=learner.has_gradients
            )
            self._parts[MemoryKind.OPTIMIZER] = _Storages(lambda: _optimizer_state(learner))

    def offload(self, *, keep_parameters: bool = False) -> int:
        """Moves everything to the host, or all but the parameters; returns the freed bytes, 0 if already
        there."""
        freed = sum(
            storages.offload()
            for kind, storages in self._parts.items()
            if not (keep_parameters and kind is MemoryKind.PARAMETERS)
        )
        torch.cuda.empty_cache()  # frees PyTorch's cache for other processes
        return freed

    def onload(self, *parts: MemoryKind) -> None:
        """Moves `parts` back to the device, bit for bit, if they are not there."""
        for part in parts:
            self._parts[part].onload()

    def locate(self, tensor: Tensor) -> Tensor:
        """What has a tensor's values: itself, or the same view of the host's copy."""
        storage = tensor.untyped_storage()
        for part in self._parts.values():
            if (copy := part.find(storage)) is not None:
                place = tensor.storage_offset(), tensor.shape, tensor.stride()
                return copy.new_empty(0, dtype=tensor.dtype).set_(copy.untyped_storage(), *place)
        return tensor


class HostMemory:
    """Copies tensors to the host, if they are on a GPU to pinned memory, which is several times faster.

    The pinned memory has exactly the size of the copies (PyTorch's own is rounded up to a power of two). It
    is kept for the next copies, since pinning takes longer than a copy, and ends with this object.
    """

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """A copy of each tensor. Those of an earlier call are void."""
        if not any(tensor.is_cuda for tensor in tensors):
            yield from (tensor.to("cpu", copy=True) for tensor in tensors)
            return
        sizes = [-(-tensor.nbytes // 8) * 8 for tensor in tensors]  # aligned for every dtype
        self._pin(sum(sizes))
        for tensor, room in zip(tensors, self._pinned.split_with_sizes(sizes), strict=True):
            yield room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _pin(self, num_bytes: int) -> None:
        if len(self._pinned) != num_bytes:
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8)
            pin_memory(self._pinned.data_ptr(), num_bytes)
            weakref.finalize(self._pinned, unpin_memory, self._pinned.data_ptr()).atexit = False


class _Storages:
    """The storages of some tensors, listed at each call: an optimizer creates its state at its first step."""

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], worth_keeping: Callable[[], bool] = lambda: True
    ) -> None:
        self._tensors, self._worth_keeping = tensors, worth_keeping
        self._host = HostMemory()
        # by storage: itself, its size, and the copy; none: zeros
        self._away: dict[int, tuple[torch.UntypedStorage, int, Tensor | None]] = {}

    def offload(self) -> int:
        by_address = {storage._cdata: storage for storage in (t.untyped_storage() for t in self._tensors())}
        storages = [storage for storage in by_address.values() if storage.nbytes()]
        copies = self._host.copy([_bytes(storage) for storage in storages]) if self._worth_keeping() else None
        freed = 0
        for storage in storages:
            num_bytes = storage.nbytes()
            self._away[storage._cdata] = storage, num_bytes, next(copies) if copies else None
            storage.resize_(0)
            freed += num_bytes
        return freed

    def onload(self) -> None:
        for storage, num_bytes, copy in self._away.values():
            storage.resize_(num_bytes)
            _bytes(storage).zero_() if copy is None else _bytes(storage).copy_(copy)
        self._away.clear()

    def find(self, storage: torch.UntypedStorage) -> Tensor | None:
        """The copy of a storage that is off-loaded with its values."""
        _, _, copy = self._away.get(storage._cdata, (storage, 0, None))
        return copy


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _gradients(learner: Learner) -> Iterator[Tensor]:
    for chunk in learner.chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            yield buffer.grad_data


def _optimizer_state(learner: Learner) -> Iterator[Tensor]:
    """Moments, and the float32 copies of bfloat16 weights; not weights that it updates where they are."""
    weights = {parameter.untyped_storage()._cdata for parameter in learner.model.parameters}
    for part in learner.optimizer.chained_optimizers:
        if part.optimizer is None:  # this rank has nothing for it to update
            continue
        for group in part.optimizer.param_groups:
            yield from (p for p in group["params"] if p.untyped_storage()._cdata not in weights)
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
