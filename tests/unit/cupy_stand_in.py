"""A stand-in for CUDA and CuPy: GPUs are host memory, and NCCL's ranks are threads.

Like NCCL, it refuses ranks with different versions or on one GPU, and waits for missing ranks forever. Like
CUDA, it refuses allocations that do not fit and handles of processes that ended; a new thread uses device 0.
It is stricter with handles: they must be opened on the device of their memory."""

import ctypes
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

NCCL_VERSION = 22907


class NcclError(RuntimeError):
    pass


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


@dataclass
class Group:
    """The ranks of a communicator."""

    barrier: threading.Barrier
    ranks: dict[int, tuple[str, int]] = field(default_factory=dict)  # GPU and NCCL version
    source: int = 0  # address of what rank 0 broadcasts


class Gpus:
    """Those that this process sees."""

    def __init__(self, *uuids: str) -> None:
        self.uuids = list(uuids)
        self.versions = dict.fromkeys(uuids, NCCL_VERSION)
        self.free = dict.fromkeys(uuids, 1 << 20)  # bytes
        self.groups: dict[bytes, Group] = {}
        self.memory: dict[int, tuple[str, Any]] = {}  # by address: GPU and bytes
        self.num_open = 0  # handles
        self.copies: list[tuple[int, int]] = []  # to which device, and bytes
        self.freed_in_use = False  # a communicator
        self._thread = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._thread, "device", 0)

    def use(self, device: int) -> None:
        self._thread.device = device

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before = self.current
        self.use(device)
        yield
        self.use(before)

    def allocate(self, num_bytes: int) -> int:
        uuid = self.uuids[self.current]
        if num_bytes > self.free[uuid]:
            raise CUDARuntimeError(2)
        memory = (ctypes.c_uint8 * num_bytes)()
        self.memory[ctypes.addressof(memory)] = uuid, memory
        return ctypes.addressof(memory)

    def open_handle(self, handle: bytes) -> int:
        address = int.from_bytes(handle, "little")
        if address not in self.memory:  # its process has ended
            raise CUDARuntimeError(201)
        assert self.memory[address][0] == self.uuids[self.current]
        self.num_open += 1
        return address

    def close_handle(self, address: int) -> None:
        assert self.memory[address][0] == self.uuids[self.current]
        self.num_open -= 1


class NcclCommunicator:
    """Each call waits until all ranks have made it, or one of them aborts."""

    def __init__(self, gpus: Gpus, num_ranks: int, unique_id: bytes, rank: int) -> None:
        assert isinstance(unique_id, bytes)  # a tuple before CuPy 14
        assert len(unique_id) == 128
        self._gpus, self._rank, self._in_use = gpus, rank, False
        self._group = gpus.groups.setdefault(unique_id, Group(threading.Barrier(num_ranks)))
        uuid = gpus.uuids[gpus.current]
        self._group.ranks[rank] = uuid, gpus.versions[uuid]
        self._wait()
        uuids, versions = zip(*self._group.ranks.values(), strict=True)
        if len(set(versions)) > 1 or len(set(uuids)) < num_ranks:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        assert (source, dtype, root) == (target, 1, 0)
        self._in_use = True
        if self._rank == root:
            self._group.source = source
        self._wait()
        if self._rank != root:
            ctypes.memmove(target, self._group.source, count)
        self._wait()
        self._in_use = False

    def abort(self) -> None:
        self._gpus.freed_in_use |= self._in_use
        self._group.barrier.abort()

    def check_async_error(self) -> None:
        pass

    def _wait(self) -> None:
        try:
            self._group.barrier.wait()
        except threading.BrokenBarrierError:
            raise NcclError("aborted") from None


@contextmanager
def simulated_gpus(*uuids: str) -> Iterator[Gpus]:
    """Inside, CuPy and torch.cuda are this stand-in; the transports' modules are imported with it. Asserts at
    the end that no communicator was freed in use."""
    gpus = Gpus(*uuids)
    stream = SimpleNamespace(ptr=0, record=lambda: SimpleNamespace(done=True), synchronize=lambda: None)
    nccl = SimpleNamespace(
        available=True,
        NCCL_UINT8=1,
        NcclError=NcclError,
        NcclCommunicator=partial(NcclCommunicator, gpus),
        get_unique_id=lambda: secrets.token_bytes(128),
        get_version=lambda: gpus.versions[gpus.uuids[gpus.current]],
    )
    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        malloc=gpus.allocate,
        free=gpus.memory.pop,
        ipcGetMemHandle=lambda address: address.to_bytes(64, "little"),
        ipcOpenMemHandle=gpus.open_handle,
        ipcCloseMemHandle=gpus.close_handle,
    )

    class Device:
        def __init__(self, number: int) -> None:
            self._number = number

        def use(self) -> None:
            gpus.use(self._number)

        def __enter__(self) -> None:
            self._before = gpus.current
            self.use()

        def __exit__(self, *_: object) -> None:
            gpus.use(self._before)

    cuda = SimpleNamespace(
        nccl=nccl,
        runtime=runtime,
        Device=Device,
        Stream=lambda non_blocking: stream,
        UnownedMemory=lambda address, *_: address,
        MemoryPointer=lambda address, offset: address + offset,
    )
    cupy = SimpleNamespace(
        cuda=cuda,
        uint8=np.uint8,
        ndarray=lambda shape, dtype, address: np.frombuffer(
            (ctypes.c_uint8 * shape[0]).from_address(address), dtype
        ),
    )
    to = torch.Tensor.to

    def copy(tensor: torch.Tensor, target: Any, *rest: Any, **options: Any) -> torch.Tensor:
        if not isinstance(target, torch.device) or target.type != "cuda":
            return to(tensor, target, *rest, **options)
        gpus.copies.append((target.index, tensor.nbytes))
        return tensor.clone()

    with pytest.MonkeyPatch.context() as patch:
        for name, module in {"cupy": cupy, "cupy.cuda": cuda}.items():
            patch.setitem(sys.modules, name, module)
        for name in ("cuda_ipc", "nccl"):
            patch.delitem(sys.modules, f"atoll.weights.transport.{name}", raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: gpus.current)
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        patch.setattr(torch.cuda, "device_count", lambda: len(gpus.uuids))
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus.uuids[device])
        )
        patch.setattr(torch.Tensor, "to", copy)
        yield gpus
        for name in ("cuda_ipc", "nccl"):
            sys.modules.pop(f"atoll.weights.transport.{name}", None)
    assert not gpus.freed_in_use
