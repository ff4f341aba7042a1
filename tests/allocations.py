"""Which tensor memory is alive, byte by byte: on a CPU nobody else counts it."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Known = dict[int, weakref.ref[torch.UntypedStorage]]


class Allocations(TorchDispatchMode):
    """While it is entered, `live` is what operations have allocated and nobody has freed, `peak` its maximum.

    Storages are asked for their present size each time, since some are freed by resizing them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: Known = {}
        self._known: Known = {}
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for storage in _storages(args):  # what was there before
            if not _has(self._storages, storage):
                self._known[storage._cdata] = weakref.ref(storage)
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if not _has(self._known, storage):
                self._storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        """Bytes."""
        alive = {key: storage for key, ref in self._storages.items() if (storage := ref()) is not None}
        self._storages = {key: self._storages[key] for key in alive}
        return sum(storage.nbytes() for storage in alive.values())


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages that `tensors` lie in, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _storages(tree: Any) -> Iterable[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _has(known: Known, storage: torch.UntypedStorage) -> bool:
    """Its address alone would not do: another one may have lived there before."""
    ref = known.get(storage._cdata)
    return ref is not None and ref() is storage
