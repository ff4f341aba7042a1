"""Layers whose activations wait in host memory for the backward pass."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from atoll.trainer.megatron.attention import AttentionInputs
from atoll.trainer.megatron.layers import RoutedLayer

Restore = Callable[[], Tensor]


class OffloadedLayer(RoutedLayer):
    """Copies what its backward pass reads to the host, pinned if there is a GPU, and back when it is read.

    Weights, rotations and integers stay: all layers or micro-batches share them.
    """

    def forward(self, *args: Any, packed_seq_params: AttentionInputs, **kwargs: Any) -> Any:
        stays = {tensor.untyped_storage() for tensor in (*self.parameters(), *packed_seq_params.rotation)}
        # Tensors may share a storage, and its content may change before the next of them is packed: hence the
        # version. The keys hold the storages until the layer ends, so that no other one gets their address.
        copies: dict[tuple[UntypedStorage, int], HostCopy] = {}

        def pack(tensor: Tensor) -> Restore:
            storage = tensor.untyped_storage()
            if storage in stays or not tensor.is_floating_point():
                return lambda: tensor
            key = storage, tensor._version
            if key not in copies:
                copies[key] = HostCopy(storage, tensor.device)
            offset = int(tensor.storage_offset())
            return partial(copies[key].tensor, tensor.dtype, offset, tensor.shape, tensor.stride())

        with saved_tensors_hooks(pack, lambda restore: restore()):
            output = super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        copies.clear()  # autograd keeps `pack`
        return output


class HostCopy:
    """The bytes of a storage of the device."""

    def __init__(self, storage: UntypedStorage, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._host.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage), non_blocking=True)
        self._back: Callable[[], UntypedStorage | None] = lambda: None  # once for all tensors in it

    def tensor(
        self, dtype: torch.dtype, offset: int, size: tuple[int, ...], stride: tuple[int, ...]
    ) -> Tensor:
        storage = self._back()
        if storage is None:
            storage = self._host.to(self._device, non_blocking=True, copy=True).untyped_storage()
            self._back = weakref.ref(storage)
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, size, stride)
