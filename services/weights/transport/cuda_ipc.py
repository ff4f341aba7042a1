"""GPU memory of one host, shared by trainer and replicas: a rank writes, every replica reads.

A segment is device memory that others open by its handle, on the GPU where it lies. Readers on that GPU map
the writer's memory itself; readers on others copy each part to their own, from GPU to GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cupy
import torch
from cupy.cuda import runtime

from atoll.runtime.errors import MemoryExhaustedError, WeightPushError
from atoll.weights.transport.devices import device_uuid, find_device
from atoll.weights.transport.double_buffer import DoubleBuffer
from atoll.wire.types import Membership, StreamManifest

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CudaIpcSender:
    """A segment of two halves."""

    def __init__(self, part_bytes: Sequence[int]) -> None:
        self._double_buffer = DoubleBuffer(part_bytes)
        self._device = torch.cuda.current_device()
        self._pointer = _allocate(self._device, self._double_buffer.num_bytes)
        with cupy.cuda.Device(self._device):
            handle = runtime.ipcGetMemHandle(self._pointer)
        self._memory = _tensor(self._pointer, self._double_buffer.num_bytes, self._device)
        self._location = f"{device_uuid(self._device)}#{self._double_buffer.num_bytes}#{handle.hex()}"

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
        self._segments: dict[int, _Segment] = {}  # by trainer rank

    def take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor:
        segment = self._segments.get(stream.source)
        if segment is None or segment.location != stream.location:
            segment = self._open(stream)
        part = segment.memory[stream.offset : stream.offset + stream.num_bytes]
        return part if segment.device == self._device else part.to(torch.device("cuda", self._device))

    def close(self) -> None:
        for source in list(self._segments):
            self._close(source)

    def _open(self, stream: StreamManifest) -> "_Segment":
        self._close(stream.source)
        uuid, num_bytes, handle = stream.location.split("#")
        device = find_device(uuid)
        if device is None:
            raise WeightPushError(
                f"trainer rank {stream.source} keeps its weights on GPU {uuid}, which this replica does not "
                "see: add it to the replica's CUDA_VISIBLE_DEVICES if it is on this host (behind its own "
                'GPUs), or set weights.transport = "nccl"'
            )
        try:
            with cupy.cuda.Device(device):
                pointer = runtime.ipcOpenMemHandle(bytes.fromhex(handle))
        except runtime.CUDARuntimeError as error:
            raise WeightPushError(
                f"cannot open the memory of trainer rank {stream.source} ({error}): it must be alive, and "
                "run on this host; else set weights.transport"
            ) from error
        segment = _Segment(stream.location, device, pointer, _tensor(pointer, int(num_bytes), device))
        self._segments[stream.source] = segment
        return segment

    def _close(self, source: int) -> None:
        if source in self._segments:
            segment = self._segments.pop(source)
            with cupy.cuda.Device(segment.device):
                runtime.ipcCloseMemHandle(segment.pointer)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A trainer rank's memory, opened."""

    location: str
    device: int  # where it lies
    pointer: int
    memory: torch.Tensor  # uint8 [bytes]


def _allocate(device: int, num_bytes: int) -> int:
    """Address of memory of its own: a handle names a whole allocation, so it may not come from a pool. Raises
    MemoryExhaustedError."""
    torch.cuda.empty_cache()  # what torch holds in reserve is not free for others
    try:
        with cupy.cuda.Device(device):
            pointer: int = runtime.malloc(num_bytes)
    except runtime.CUDARuntimeError as error:
        if error.status != OUT_OF_MEMORY:
            raise
        raise MemoryExhaustedError(
            f'weights.transport = "cuda_ipc" needs {num_bytes / (1 << 30):.1f} GiB on GPU {device} for two '
            "copies of what this rank sends, and they are not free: give the trainer more ranks, lower "
            'trainer.max_tokens_per_microbatch, or set weights.transport = "nccl" or "shm"'
        ) from error
    return pointer


def _tensor(pointer: int, num_bytes: int, device: int) -> torch.Tensor:
    """uint8 [bytes] view that does not own the memory."""
    unowned = cupy.cuda.UnownedMemory(pointer, num_bytes, None, device)
    with cupy.cuda.Device(device):
        array = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(unowned, 0))
    return torch.utils.dlpack.from_dlpack(array)
