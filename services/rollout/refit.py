"""A replica's side of a weight push: a second set of parameter buffers that receives a version."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.runtime.errors import WeightPushError
from atoll.weights.boxes import copy_boxes, side_views, stream_views
from atoll.weights.delta import decode
from atoll.weights.transport.base import Receiver
from atoll.wire.types import TRANSFER, Membership, Plan, PushPart, StreamManifest, Version


@dataclass(slots=True)
class _BufferSet:
    """One of the two sets of buffers. Both dicts go by the transfer's number in the plan."""

    buffers: list[torch.Tensor]
    boxes: dict[int, torch.Tensor] = field(default_factory=dict)  # where this rank's transfers end
    checksums: dict[int, int] = field(default_factory=dict)  # of what is there, where that is known


class Refit:
    """Stages versions next to the live parameters and commits them. Engine-independent; for any target rank.

    `receive` writes only the staging side, so it may run in a thread while generation continues;
    `commit` exchanges the two sides, or copies where an engine cannot let go of its buffers. Calls exclude
    one another: a receive whose caller was cancelled ends before the next call begins.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        version: Version,
        receiver: Receiver,
        rank: int = 0,
        *,
        in_place: bool = False,
        takes_turns: bool = False,
    ) -> None:
        """`buffers` are those that the shard layout indexes; `rank` is the tensor-parallel rank. `in_place`:
        they stay the live ones, and a commit copies what changed. `takes_turns`: nothing is generated during
        a push, so that a version is received into the live buffers, and there are no others.
        """
        self.version = version
        self._receiver = receiver
        self._rank = rank
        self._in_place = in_place
        self._dtype = buffers[0].dtype
        self._live = _BufferSet(list(buffers))
        self._staging = (
            self._live
            if takes_turns
            else _BufferSet([buffer.clone() for buffer in buffers])  # allocates the pages
        )
        self._is_live = True  # the live buffers hold `version`
        self._is_released = False
        self._plan = Plan("", (), np.empty(0, TRANSFER))
        self._epoch = 0
        self._incoming: Version | None = None
        self._arrived: dict[int, int] = {}  # checksums of the incoming version, by transfer
        self._lock = Lock()

    def receive(self, part: PushPart) -> int:
        """Copies what the part holds for this rank and checks it; returns bytes copied.

        A version comes in one call or in several; the plan comes with the first stream that needs it.
        Boxes that already hold the expected bytes are not copied. Raises WeightPushError if a slice
        is wrong: nothing of the version counts as arrived then. A call of an epoch that is over, which may
        come late, is refused and changes nothing.
        """
        version, membership = part.version, part.membership
        with self._lock:
            if membership.epoch < self._epoch:
                raise WeightPushError(
                    f"a part for epoch {membership.epoch}, but epoch {self._epoch} has begun: it is void"
                )
            self._epoch = membership.epoch
            if part.plan is not None and part.plan.id != self._plan.id:
                self._use(part.plan)
            if self._is_released:
                raise WeightPushError(f"a part of {version}, but the weights' memory is released: restore it")
            if version == self.version and self._is_live:
                for stream in part.streams:  # others of its epoch may wait for this rank all the same
                    self._take(stream, membership)
                return 0
            if version.lineage == self.version.lineage and version.number < self.version.number:
                raise WeightPushError(f"got {version}, but {self.version} is live: numbers only grow")
            if version != self._incoming:
                self._forget()
                self._incoming = version
                self._is_live &= self._staging is not self._live
            try:
                num_bytes = sum(self._receive_stream(stream, membership) for stream in part.streams)
                if not self._in_place:
                    self._fill_from_live()
                return num_bytes
            except BaseException:
                self._forget()
                raise

    def check(self, version: Version) -> None:
        """Raises WeightPushError if a commit of the version would."""
        with self._lock:
            if version != self.version or not self._is_live:
                self._check_staged(version)

    def commit(self, version: Version) -> list[torch.Tensor]:
        """Makes the staged version live; returns the buffers that hold it, for the engine to bind to.

        Unless `in_place`, those that were live become the staging side: the next `receive` overwrites them.
        Repeating the call changes nothing. Raises WeightPushError if the version is not staged whole.
        """
        with self._lock:
            if version != self.version or not self._is_live:
                self._check_staged(version)
                if self._in_place:
                    self._copy_over()
                elif self._arrived != self._live.checksums:
                    self._live, self._staging = self._staging, self._live
                self.version, self._is_live = version, True
                self._forget()
            return self._live.buffers

    def rollback(self, version: Version) -> None:
        """Forgets the version if it is the one staged."""
        with self._lock:
            if version == self._incoming:
                self._forget()

    @property
    def is_live(self) -> bool:
        """Whether the live buffers hold `version`: not from a release, or a push that failed, to a commit."""
        return self._is_live

    def release(self) -> None:
        """The buffers' memory is given back next: nothing that they hold counts any more, and nothing is
        received before `restore`."""
        with self._lock:
            self._is_released, self._is_live = True, False
            self._live.checksums, self._staging.checksums = {}, {}
            self._forget()

    def restore(self) -> None:
        """The buffers have memory again."""
        with self._lock:
            self._is_released = False

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

    def _take(
        self, stream: StreamManifest, membership: Membership
    ) -> tuple[int, NDArray[np.void], torch.Tensor] | None:
        """What arrives: the first of its transfers, all of them, and their bytes. None for another rank."""
        if stream.plan_id != self._plan.id:
            raise WeightPushError(f"a stream of plan {stream.plan_id}, which was never sent: send the plan")
        transfers = self._plan.transfers
        first = int(np.searchsorted(transfers["source"], stream.source)) + stream.first
        run = transfers[first : first + len(stream.checksums)]
        assert run["source"].tolist() == [stream.source] * len(stream.checksums), "not a run of the plan"
        if run["target"][0] != self._rank:
            return None
        return first, run, self._receiver.take(stream, membership)

    def _receive_stream(self, stream: StreamManifest, membership: Membership) -> int:
        taken = self._take(stream, membership)
        if taken is None:
            return 0
        first, run, part = taken
        if stream.delta:
            part = self._apply_delta(part, first, run)
        expected = dict(zip(range(first, first + len(run)), stream.checksums.tolist(), strict=True))
        pieces = dict(zip(expected, stream_views(part, run, self._dtype), strict=True))
        return self._stage(expected, pieces)

    def _apply_delta(self, delta: torch.Tensor, first: int, run: NDArray[np.void]) -> torch.Tensor:
        """uint8 [bytes] the part that the delta makes of the live one. Whether it was encoded from that one,
        checksums tell."""
        num_elements = int((run["rows"] * run["columns"]).sum())
        part = torch.empty(num_elements, dtype=self._dtype, device=delta.device)
        for number, piece in enumerate(stream_views(part.view(torch.uint8), run, self._dtype), first):
            piece.copy_(self._live.boxes[number])
        try:
            decode(delta, part)
        except ValueError as error:
            raise WeightPushError(f"{self._describe(first)}: {error}; nothing was committed") from error
        return part.view(torch.uint8)

    def _stage(self, expected: dict[int, int], pieces: dict[int, torch.Tensor]) -> int:
        """Copies and checks what this rank does not hold already; returns the bytes copied."""
        self._arrived |= expected
        staged, live = self._staging.checksums, self._live.checksums
        new = [
            number
            for number, checksum in expected.items()
            if checksum not in (staged.get(number), live.get(number))
        ]
        for number in new:
            staged.pop(number, None)  # unknown until the copy is checked
        got = copy_boxes([self._staging.boxes[number] for number in new], [pieces[number] for number in new])
        for number, checksum in zip(new, got.tolist(), strict=True):
            if checksum != expected[number]:
                raise WeightPushError(
                    f"{self._describe(number)}: got checksum {checksum:#018x}, expected "
                    f"{expected[number]:#018x}; nothing was committed"
                )
            staged[number] = checksum
        return sum(pieces[number].nbytes for number in new)

    def _fill_from_live(self) -> None:
        """Once all is there: what the trainer did not change may be on the live side alone."""
        if self._arrived.keys() == self._live.boxes.keys() and self._arrived != self._live.checksums:
            for number, expected in self._arrived.items():
                if self._staging.checksums.get(number) != expected:
                    self._staging.boxes[number].copy_(self._live.boxes[number])
                    self._staging.checksums[number] = expected

    def _copy_over(self) -> None:
        for number, expected in self._arrived.items():
            if self._live.checksums.get(number) != expected:
                self._live.checksums.pop(number, None)  # unknown should the copy fail half-way
                self._live.boxes[number].copy_(self._staging.boxes[number])
                self._live.checksums[number] = expected

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
