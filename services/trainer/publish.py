"""A trainer rank's side of a weight push: cast, copy into shared memory and checksum, part by part."""

from collections.abc import Sequence

import numpy as np
import torch

from services.runtime.errors import WeightPushError
from services.weights.boxes import checksum, copy, side_views, stream_views
from services.weights.transport.shm import Segment
from services.wire.types import Plan, Published, StreamManifest, Version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PART_BYTES = 32 << 20  # replicas read one part while the next is written
ALIGNMENT = 64  # bytes; of the two halves of a segment


class Publisher:
    """Writes this rank's transfers. Calls come one at a time, from the rank's compute thread."""

    def __init__(self, rank: int, buffers: Sequence[torch.Tensor]) -> None:
        """`buffers` are those that the rank's catalog indexes; their storage must not be replaced."""
        self._rank = rank
        self._buffers = buffers
        self._streams: dict[tuple[str, str], _Stream] = {}

    def publish(
        self, version: Version, dtype: str, plan_ids: Sequence[str], new_plans: Sequence[Plan], part: int
    ) -> Published:
        """Writes part `part` of the live weights for each plan; parts come in order from 0.

        Repeating a call answers from its record. Where every byte equals the last version's, nothing
        is written. Raises WeightPushError for a plan that this rank was never sent, or a part out of order.
        """
        for plan in new_plans:
            if (plan.id, dtype) not in self._streams:
                self._streams[plan.id, dtype] = _Stream(self._rank, plan, self._buffers, DTYPES[dtype])
        if unknown := [plan_id for plan_id in plan_ids if (plan_id, dtype) not in self._streams]:
            raise WeightPushError(f"trainer rank {self._rank} has no plan {unknown[0]}: send the plan again")
        return merged([self._streams[plan_id, dtype].write(version, part) for plan_id in plan_ids])

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def merged(parts: Sequence[Published]) -> Published:
    """One answer out of several plans' or several ranks'."""
    return Published(
        tuple(stream for part in parts for stream in part.streams),
        sum(part.num_bytes for part in parts),
        all(part.last for part in parts),
    )


class _Stream:
    """What this rank writes for one replica class: a segment of two halves, written in turn, so that
    the last version stays whole while the next is written."""

    def __init__(self, rank: int, plan: Plan, buffers: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        transfers = plan.transfers[plan.transfers["source"] == rank]
        starts = transfers["stream"] * dtype.itemsize
        num_bytes = int((transfers["rows"] * transfers["columns"]).sum()) * dtype.itemsize
        _, first = np.unique(starts // PART_BYTES, return_index=True)
        self._borders: list[int] = [*first.tolist(), len(transfers)]  # transfers of part i: [i] to [i+1]
        self._sizes = np.diff(starts, append=num_bytes)  # bytes
        self._rank, self._plan_id, self._dtype = rank, plan.id, dtype
        self._sources = side_views(buffers, transfers, "source")
        self._half_bytes = (num_bytes // ALIGNMENT + 1) * ALIGNMENT
        self._segment = Segment(2 * self._half_bytes)
        self._halves = [
            stream_views(self._segment.memory[half * self._half_bytes :], transfers, dtype)
            for half in range(2)
        ]
        self._half = 0
        self._checksums = np.zeros(len(transfers), np.uint64)  # of what the current half holds
        self._version: Version | None = None
        self._parts_written = 0

    def write(self, version: Version, part: int) -> Published:
        if part + 1 >= len(self._borders):  # other ranks have more parts
            return Published((), 0, True)
        if version != self._version and part == 0:
            self._begin(version)
        if version != self._version or part > self._parts_written:
            raise WeightPushError(
                f"trainer rank {self._rank}: part {part} of {version} is asked for after part "
                f"{self._parts_written - 1} of {self._version}: ask for the parts in order, from 0"
            )
        first, end = self._borders[part : part + 2]
        num_bytes = 0
        if part == self._parts_written:
            for i in range(first, end):
                self._checksums[i] = copy(self._halves[self._half][i], self._sources[i])
            num_bytes = int(self._sizes[first:end].sum())
            self._parts_written += 1
        manifest = StreamManifest(
            source=self._rank,
            location=self._segment.location,
            offset=self._half * self._half_bytes,
            plan_id=self._plan_id,
            first=first,
            checksums=self._checksums[first:end].copy(),
        )
        return Published((manifest,), num_bytes, part + 2 == len(self._borders))

    def _begin(self, version: Version) -> None:
        self._version = version
        if self._parts_written + 1 == len(self._borders):  # the current half holds a whole version
            if self._unchanged():
                return  # and the new one is the same
            self._half = 1 - self._half
        self._parts_written = 0

    def _unchanged(self) -> bool:
        """After a training step the first tensor differs, and the others are not looked at."""
        return all(
            checksum(source, self._dtype) == expected
            for source, expected in zip(self._sources, self._checksums.tolist(), strict=True)
        )

    def close(self) -> None:
        self._segment.close()
