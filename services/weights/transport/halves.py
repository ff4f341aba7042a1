"""Where parts lie in memory that keeps a version while the next is written."""

from collections.abc import Sequence
from itertools import accumulate

ALIGNMENT = 64  # bytes; of the two halves


class Halves:
    """Two places for all parts, written in turn, so that the last version stays whole."""

    def __init__(self, part_bytes: Sequence[int]) -> None:
        self._starts = [0, *accumulate(part_bytes)]
        self._half_bytes = (self._starts[-1] // ALIGNMENT + 1) * ALIGNMENT
        self._half = 1
        self.num_bytes = 2 * self._half_bytes

    def turn(self) -> None:
        self._half = 1 - self._half

    def place(self, part: int) -> slice:
        """Its bytes, in the half that is written."""
        begin, end = (self._half * self._half_bytes + start for start in self._starts[part : part + 2])
        return slice(begin, end)
