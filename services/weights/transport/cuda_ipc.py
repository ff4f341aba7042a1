"""Memory of one GPU, shared by the trainer and the replicas on it: a rank writes, every replica reads.

A segment is device memory that others open by its handle. Readers map the writer's memory itself and copy
from it on the device.
"""

from collections.abc import Sequence

import cupy
import torch
from cupy.cuda import runtime

from atoll.runtime.errors import WeightPushError
from atoll.weights.transport.double_buffer import DoubleBuffer
from atoll.wire.types import Membership, StreamManifest


class CudaIpcSender:
    """A segment of two halves."""

    def __init__(self, part_bytes: Sequence[int]) -> None:
        self._double_buffer = DoubleBuffer(part_bytes)
        self._device = torch.cuda.current_device()
        with cupy.cuda.Device(self._device):
            # not from a pool: a handle names a whole allocation
            self._pointer = runtime.malloc(self._double_buffer.num_bytes)
            handle = runtime.ipcGetMemHandle(self._pointer)
        self._memory = _tensor(self._pointer, self._double_buffer.num_bytes, self._device)
        self._location = f"{_uuid(self._device)}#{self._double_buffer.num_bytes}#{handle.hex()}"

    def begin(self, membership: Membership) -> None:
        self._double_buffer.swap()

    def room(self, part: int) -> torch.Tensor:
        return self._memory[self._double_buffer.slot(part)]

    def send(self, part: int, target: int, num_bytes: int) -> tuple[str, int]:
        torch.cuda.current_stream(self._device).synchronize()  # finish packing: others read it from now on
        return self._location, self._double_buffer.slot(part).start

    def close(self) -> None:
        runtime.free(self._pointer)


class CudaIpcReceiver:
    """Opens each trainer rank's segment once."""

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        self._segments: dict[int, tuple[str, int, torch.Tensor]] = {}  # by trainer rank

    def take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor:
        location, _, memory = self._segments.get(stream.source, ("", 0, torch.empty(0)))
        if location != stream.location:
            memory = self._open(stream)
        return memory[stream.offset : stream.offset + stream.num_bytes]

    def close(self) -> None:
        for source in list(self._segments):
            self._close(source)

    def _open(self, stream: StreamManifest) -> torch.Tensor:
        self._close(stream.source)
        uuid, num_bytes, handle = stream.location.split("#")
        if uuid != _uuid(self._device):
            raise WeightPushError(
                f"trainer rank {stream.source} keeps its weights on GPU {uuid}, this replica's rank is on "
                f"{_uuid(self._device)}: place both on one GPU, or set weights.transport to nccl"
            )
        try:
            with cupy.cuda.Device(self._device):
                pointer = runtime.ipcOpenMemHandle(bytes.fromhex(handle))
        except runtime.CUDARuntimeError as error:
            raise WeightPushError(
                f"cannot open the memory of trainer rank {stream.source} ({error}): it must be alive, and "
                "run on this host; else set weights.transport"
            ) from error
        memory = _tensor(pointer, int(num_bytes), self._device)
        self._segments[stream.source] = stream.location, pointer, memory
        return memory

    def _close(self, source: int) -> None:
        if source in self._segments:
            _, pointer, _ = self._segments.pop(source)
            runtime.ipcCloseMemHandle(pointer)


def _tensor(pointer: int, num_bytes: int, device: int) -> torch.Tensor:
    """uint8 [bytes] view that does not own the memory."""
    unowned = cupy.cuda.UnownedMemory(pointer, num_bytes, None, device)
    with cupy.cuda.Device(device):
        array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(unowned, 0))
    return torch.utils.dlpack.from_dlpack(array)


def _uuid(device: int) -> str:
    """Identifies the GPU in all processes; device numbers depend on what a process may see."""
    return str(torch.cuda.get_device_properties(device).uuid)
