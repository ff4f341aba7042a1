"""Shared memory of one host: a trainer rank writes, every replica maps the same pages.

A segment is an anonymous memory file that others open as /proc/PID/fd/N. It has no name in /dev/shm, so the
kernel frees it when the last process that maps it ends, however it ends.
"""

import mmap
import os
import secrets
from collections.abc import Sequence

import torch

from atoll.runtime.errors import WeightPushError
from atoll.weights.transport.double_buffer import DoubleBuffer
from atoll.wire.types import Membership, StreamManifest


class ShmSender:
    """A segment of two halves."""

    def __init__(self, part_bytes: Sequence[int]) -> None:
        self._double_buffer = DoubleBuffer(part_bytes)
        self._segment = SharedSegment(self._double_buffer.num_bytes)

    def begin(self, membership: Membership) -> None:
        self._double_buffer.swap()

    def room(self, part: int) -> torch.Tensor:
        return self._segment.memory[self._double_buffer.slot(part)]

    def send(self, part: int, target: int, num_bytes: int) -> tuple[str, int]:
        return self._segment.location, self._double_buffer.slot(part).start

    def close(self) -> None:
        self._segment.close()


class ShmReceiver:
    """Maps each trainer rank's segment once."""

    def __init__(self) -> None:
        self._segments: dict[int, tuple[str, torch.Tensor]] = {}  # by trainer rank

    def take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor:
        location, memory = self._segments.get(stream.source, ("", torch.empty(0)))
        if location != stream.location:
            try:
                memory = attach(stream.location)
            except OSError as error:
                raise WeightPushError(
                    f"cannot map the weights of trainer rank {stream.source} ({error}): it must run on this "
                    "host, in the same process namespace, as the same user; else set weights.transport"
                ) from error
            self._segments[stream.source] = (stream.location, memory)
        return memory[stream.offset : stream.offset + stream.num_bytes]

    def close(self) -> None:
        self._segments.clear()


class SharedSegment:
    """Memory that this process writes. Its pages are allocated and touched here, once."""

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("atoll-weights")
        os.posix_fallocate(self._fd, 0, num_bytes)
        # the token distinguishes it from earlier segments, since descriptors are reused
        self.location = f"/proc/{os.getpid()}/fd/{self._fd}#{secrets.token_hex(8)}"
        self.memory = _map(self._fd)

    def close(self) -> None:
        """No process can map it any more; those that have keep their pages."""
        os.close(self._fd)


def attach(location: str) -> torch.Tensor:
    """uint8 [bytes] of another process's segment; mapped as long as the tensor lives.

    Raises OSError if the writer is gone or runs as another user or on another host.
    """
    fd = os.open(location.partition("#")[0], os.O_RDWR)
    try:
        return _map(fd)
    finally:
        os.close(fd)


def _map(fd: int) -> torch.Tensor:
    # readers map it writable too: torch has no read-only tensors
    return torch.frombuffer(mmap.mmap(fd, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
