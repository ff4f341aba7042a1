"""Where a model's memory lies: on the device while the model works, in host memory while others do.

Storages are freed and filled again in place. So every view of them stays what it was: parameters inside a
gradient buffer, those that the optimizer or a Publisher holds.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum

import torch
from torch import Tensor

from atoll.trainer.megatron.model import Model
from atoll.trainer.step import Learner


class Part(Enum):
    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"


class Residency:
    """The memory of one model on this rank, and of what it learns with. Everything begins on the device."""

    def __init__(self, model: Model, learner: Learner | None) -> None:
        self._parts = {Part.PARAMETERS: _Storages(lambda: model.parameters)}
        if learner is not None:
            self._parts[Part.GRADIENTS] = _Storages(
                lambda: _gradients(learner), worth_keeping=learner.has_gradients
            )
            self._parts[Part.OPTIMIZER] = _Storages(lambda: _optimizer_state(learner))

    def offload(self) -> int:
        """Moves everything to the host; returns the bytes that this has freed. Again: nothing, 0."""
        freed = sum(storages.leave() for storages in self._parts.values())
        torch.cuda.empty_cache()  # what PyTorch keeps for itself, other processes cannot use
        return freed

    def bring(self, *parts: Part) -> None:
        """Puts `parts` back on the device, bit by bit what they were, where they are not there."""
        for part in parts:
            self._parts[part].come_back()


class _Storages:
    """Those of some tensors, which may be others each time: an optimizer makes its state when it steps."""

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], worth_keeping: Callable[[], bool] = lambda: True
    ) -> None:
        self._tensors, self._worth_keeping = tensors, worth_keeping
        self._away: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []  # size, copy; none: zeros

    def leave(self) -> int:
        storages = {storage._cdata: storage for storage in (t.untyped_storage() for t in self._tensors())}
        keep, freed = self._worth_keeping(), 0
        for storage in storages.values():
            if num_bytes := storage.nbytes():
                self._away.append((storage, num_bytes, _host_copy(storage) if keep else None))
                storage.resize_(0)
                freed += num_bytes
        return freed

    def come_back(self) -> None:
        for storage, num_bytes, copy in self._away:
            storage.resize_(num_bytes)
            _bytes(storage).zero_() if copy is None else _bytes(storage).copy_(copy)
        self._away.clear()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_copy(storage: torch.UntypedStorage) -> Tensor:
    """Pinned where there is a GPU: several times as fast both ways."""
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_bytes(storage))


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
