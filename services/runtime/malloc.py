"""How this process uses glibc's heap; see mallopt(3)."""

import ctypes

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # mallopt's numbers
MIB = 1 << 20

_libc = ctypes.CDLL(None)


def map_large_blocks() -> None:
    """For requests of many megabytes: their blocks return to the system and leave no holes in the heap."""
    _libc.mallopt(MMAP_THRESHOLD, MIB)


def keep_freed_memory() -> None:
    """For tensors of the same sizes again and again: up to 1 GiB of freed memory stays in the heap. Otherwise
    it returns to the system, and each page of the next tensor is a page fault."""
    _libc.mallopt(MMAP_THRESHOLD, 32 * MIB)  # the largest that mallopt takes
    _libc.mallopt(TRIM_THRESHOLD, 1024 * MIB)


def return_freed_memory() -> None:
    """To the system."""
    _libc.malloc_trim(0)
