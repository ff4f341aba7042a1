"""Double buffer: keeps a version while the next one is written."""

from collections.abc import Sequence
from itertools import accumulate

ALIGNMENT = 64  # bytes; of both halves


class DoubleBuffer:
    """Two copies of all parts, written alternately, so that the last version stays intact."""

    def __init__(self, part_bytes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(part_bytes)]
        self._half_bytes = (self._starts[-1] // ALIGNMENT + 1) * ALIGNMENT
        self._half = 1
        self.num_bytes = 2 * self._half_bytes

    def swap(self) -> None:
        self._half = 1 - self._half

    def slot(self, part: int) -> slice:
        """The part's bytes in the half being written."""
        begin, end = (self._half * self._half_bytes + start for start in self._starts[part : part + 2])
        return slice(begin, end)
