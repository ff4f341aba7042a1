"""A replica's side of a weight push: a second set of parameter buffers that a version arrives in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch

from services.runtime.errors import WeightPushError
from services.weights.boxes import copy, side_views, stream_views
from services.weights.transport import shm
from services.wire.types import TRANSFER, Plan, StreamManifest, Version


@dataclass(slots=True)
class _Side:
    """One of the two sets of buffers. Both dicts go by the transfer's number in the plan."""

    buffers: list[torch.Tensor]
    boxes: dict[int, torch.Tensor] = field(default_factory=dict)  # where this rank's transfers end
    checksums: dict[int, int] = field(default_factory=dict)  # of what is there, where that is known


class Refit:
    """Stages versions beside the live parameters and swaps them in. No engine; any target rank.

    `receive` writes only the staging side, so it may run in a thread while generation goes on;
    `commit` exchanges the two sides. Calls exclude one another: a receive that its caller has given
    up ends before the next call begins.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], version: Version, rank: int = 0) -> None:
        """`buffers` are those that the catalog indexes; `rank` is the tensor-parallel rank."""
        self.version = version
        self._rank = rank
        self._live = _Side(list(buffers))
        self._staging = _Side([buffer.clone() for buffer in buffers])  # touches the pages
        self._plan = Plan("", (), np.empty(0, TRANSFER))
        self._incoming: Version | None = None
        self._arrived: dict[int, int] = {}  # checksums of the incoming version, by transfer
        self._segments: dict[int, tuple[str, torch.Tensor]] = {}  # of each trainer rank: mapped once
        self._lock = Lock()

    def receive(self, version: Version, streams: Sequence[StreamManifest], plan: Plan | None) -> int:
        """Copies what the streams hold for this rank and checks it; returns bytes copied.

        A version comes in one call or in several; `plan` comes with the first stream that needs it.
        Boxes that already hold the expected bytes are not copied. Raises WeightPushError where a slice
        is wrong: nothing of the version counts as arrived then.
        """
        with self._lock:
            if plan is not None and plan.id != self._plan.id:
                self._use(plan)
            if version == self.version:
                return 0
            if version.lineage == self.version.lineage and version.number < self.version.number:
                raise WeightPushError(f"got {version}, but {self.version} is live: numbers only grow")
            if version != self._incoming:
                self._forget()
                self._incoming = version
            try:
                num_bytes = sum(self._receive_stream(stream) for stream in streams)
                self._fill_from_live()
                return num_bytes
            except BaseException:
                self._forget()
                raise

    def commit(self, version: Version) -> list[torch.Tensor]:
        """Makes the staged version live; returns the buffers that hold it, for the engine to bind to.

        The buffers that were live become the staging side: the next `receive` overwrites them.
        Repeating the call changes nothing. Raises WeightPushError where the version is not staged whole.
        """
        with self._lock:
            if version != self.version:
                self._check_staged(version)
                if self._arrived != self._live.checksums:
                    self._live, self._staging = self._staging, self._live
                self.version = version
                self._forget()
            return self._live.buffers

    def rollback(self, version: Version) -> None:
        """Forgets the version if it is the one staged."""
        with self._lock:
            if version == self._incoming:
                self._forget()

    def _use(self, plan: Plan) -> None:
        self._plan = plan
        mine = np.flatnonzero(plan.transfers["target"] == self._rank)
        for side in (self._live, self._staging):
            views = side_views(side.buffers, plan.transfers[mine], "target")
            side.boxes = dict(zip(mine.tolist(), views, strict=True))
            side.checksums = {}
        self._forget()

    def _forget(self) -> None:
        self._incoming = None
        self._arrived = {}

    def _receive_stream(self, stream: StreamManifest) -> int:
        if stream.plan_id != self._plan.id:
            raise WeightPushError(f"a stream of plan {stream.plan_id}, which was never sent: send the plan")
        transfers = self._plan.transfers
        first = int(np.searchsorted(transfers["source"], stream.source)) + stream.first
        run = transfers[first : first + len(stream.checksums)]
        assert run["source"].tolist() == [stream.source] * len(stream.checksums), "not a run of the plan"
        mine = np.flatnonzero(run["target"] == self._rank)
        pieces = stream_views(self._map(stream), run[mine], self._live.buffers[0].dtype)
        sums = stream.checksums[mine].tolist()
        return sum(
            self._receive_piece(*transfer)
            for transfer in zip((first + mine).tolist(), pieces, sums, strict=True)
        )

    def _receive_piece(self, number: int, piece: torch.Tensor, expected: int) -> int:
        """Returns the bytes copied: 0 where this rank holds them already."""
        self._arrived[number] = expected
        if expected in (self._staging.checksums.get(number), self._live.checksums.get(number)):
            return 0
        self._staging.checksums.pop(number, None)  # unknown until the copy is checked
        got = copy(self._staging.boxes[number], piece)
        if got != expected:
            self._segments.clear()  # map them anew next time
            raise WeightPushError(
                f"{self._describe(number)}: got checksum {got:#018x}, expected {expected:#018x}; "
                "nothing was committed"
            )
        self._staging.checksums[number] = got
        return piece.nbytes

    def _fill_from_live(self) -> None:
        """Once all is there: what the trainer did not change may be on the live side alone."""
        if self._arrived.keys() == self._live.boxes.keys() and self._arrived != self._live.checksums:
            for number, expected in self._arrived.items():
                if self._staging.checksums.get(number) != expected:
                    self._staging.boxes[number].copy_(self._live.boxes[number])
                    self._staging.checksums[number] = expected

    def _check_staged(self, version: Version) -> None:
        if version != self._incoming:
            raise WeightPushError(f"commit of {version}, but {self._incoming or 'nothing'} is staged")
        if missing := sorted(self._live.boxes.keys() - self._arrived.keys()):
            raise WeightPushError(
                f"commit of {version}, but {len(missing)} of {len(self._live.boxes)} slices have not "
                f"arrived; the first is {self._describe(missing[0])}"
            )

    def _describe(self, number: int) -> str:
        t = self._plan.transfers[number]
        name = self._plan.tensors[t["tensor"]]
        return f"{name!r}, {t['rows']} rows from row {t['row']}, from trainer rank {t['source']}"

    def _map(self, stream: StreamManifest) -> torch.Tensor:
        """The stream's memory, from its first byte."""
        location, memory = self._segments.get(stream.source, ("", torch.empty(0)))
        if location != stream.location:
            try:
                memory = shm.attach(stream.location)
            except OSError as error:
                raise WeightPushError(
                    f"cannot map the weights of trainer rank {stream.source} ({error}): it must run on this "
                    "host, in the same process namespace, as the same user"
                ) from error
            self._segments[stream.source] = (stream.location, memory)
        return memory[stream.offset :]
