"""Shared memory of one host: a trainer rank writes, every replica maps the same pages.

A segment is an anonymous memory file that others open by /proc/PID/fd/N. It has no name in /dev/shm:
the kernel frees it with the last process that has it mapped, however that process ends.
"""

import mmap
import os

import torch


class Segment:
    """Memory that this process writes. Its pages are allocated and touched here, once."""

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("atoll-weights")
        os.posix_fallocate(self._fd, 0, num_bytes)
        self.location = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.memory = _map(self._fd)

    def close(self) -> None:
        """No process can map it any more; those that did keep their pages."""
        os.close(self._fd)


def attach(location: str) -> torch.Tensor:
    """uint8 [bytes] of another process's segment; mapped as long as the tensor lives.

    Raises OSError where the writer is gone or runs as another user or on another host.
    """
    fd = os.open(location, os.O_RDWR)
    try:
        return _map(fd)
    finally:
        os.close(fd)


def _map(fd: int) -> torch.Tensor:
    # readers map it writable too: torch has no read-only tensors
    return torch.frombuffer(mmap.mmap(fd, 0, mmap.MAP_SHARED | mmap.MAP_POPULATE), dtype=torch.uint8)
