"""Host memory for copies of what is on a GPU."""

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory


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
