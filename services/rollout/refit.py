"""A replica's side of a weight push: a second set of parameter buffers that receives a version."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.runtime.errors import WeightPushError
from atoll.weights.boxes import Launch, copy_boxes, copy_part, launches, side_views, stream_views
from atoll.weights.delta import decode
from atoll.weights.transport.base import Receiver
from atoll.wire.types import TRANSFER, Membership, Plan, PushPart, StreamManifest, Version

Part = tuple[int, int]  # trainer rank and round


@dataclass(slots=True)
class _BufferSet:
    """One of the two sets of buffers. Both dicts go by the part that brings it."""

    buffers: list[torch.Tensor]
    boxes: dict[Part, list[torch.Tensor]] = field(default_factory=dict)  # where its transfers end
    checksums: dict[Part, int] = field(default_factory=dict)  # of what is there, where that is known


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
        staging: str = "device",
        takes_turns: bool = False,
    ) -> None:
        """`buffers` are those that the shard layout indexes; `rank` is the tensor-parallel rank. `in_place`:
        they stay the live ones. Parts are then staged whole, one behind the other, and a commit unpacks what
        changed. `staging = "host"` stages them in host memory even if the buffers are on a device.
        `takes_turns`: nothing is generated during a push, so that a version is received into the live
        buffers, and there are no others.
        """
        self.version = version
        self._holds_version = True  # the live side
        self._is_released = False
        self._receiver = receiver
        self._rank = rank
        self._in_place = in_place and not takes_turns
        self._dtype = buffers[0].dtype
        self._live = self._staging = _BufferSet(list(buffers))
        if not takes_turns:
            staged = [_reserve(buffers, staging)] if in_place else [buffer.clone() for buffer in buffers]
            self._staging = _BufferSet(staged)
        self._unpack: dict[Part, list[Launch]] = {}  # from the staging side to the live one, if in place
        self._plan = Plan("", (), np.empty(0, TRANSFER))
        self._runs: dict[Part, NDArray[np.void]] = {}  # the plan's transfers to this rank
        self._epoch = 0
        self._incoming: Version | None = None
        self._arrived: dict[Part, int] = {}  # checksums of the incoming version
        self._lock = Lock()

    def receive(self, part: PushPart) -> int:
        """Copies what the part holds for this rank and checks it; returns bytes copied.

        A version comes in one call or in several; the plan comes with the first stream that needs it.
        Parts whose bytes this rank already holds are not copied. Raises WeightPushError if one is wrong:
        nothing of the version counts as arrived then. A call of an epoch that is over, which may come late,
        is refused and changes nothing.
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
            if self._is_live(version):
                for stream in part.streams:  # others of its epoch may wait for this rank all the same
                    self._take(stream, membership)
                return 0
            if version.lineage == self.version.lineage and version.number < self.version.number:
                raise WeightPushError(f"got {version}, but {self.version} is live: numbers only grow")
            if version != self._incoming:
                self._forget()
                self._incoming = version
                self._holds_version &= self._staging is not self._live
            try:
                num_bytes = sum(self._stage(stream, membership) for stream in part.streams)
                if not self._in_place:
                    self._fill_from_live()
                return num_bytes
            except BaseException:
                self._forget()
                raise

    def check(self, version: Version) -> None:
        """Raises WeightPushError if a commit of the version would."""
        with self._lock:
            if not self._is_live(version):
                self._check_staged(version)

    def commit(self, version: Version) -> list[torch.Tensor]:
        """Makes the staged version live; returns the buffers that hold it, for the engine to bind to.

        Unless `in_place`, those that were live become the staging side: the next `receive` overwrites them.
        Otherwise, on a device, the copies may still run when it returns, on the current stream.
        Repeating the call changes nothing. Raises WeightPushError if the version is not staged whole.
        """
        with self._lock:
            if not self._is_live(version):
                self._check_staged(version)
                if self._in_place:
                    self._copy_over()
                elif self._arrived != self._live.checksums:
                    self._live, self._staging = self._staging, self._live
                self.version, self._holds_version = version, True
                self._forget()
            return self._live.buffers

    def rollback(self, version: Version) -> None:
        """Forgets the version if it is the one staged."""
        with self._lock:
            if version == self._incoming:
                self._forget()

    @property
    def holds_version(self) -> bool:
        """Whether the live buffers hold `version`: not from a release, or a push that failed, to a commit."""
        return self._holds_version

    def release(self) -> None:
        """The buffers' memory is given back next: neither side holds anything any more, so the next push has
        to bring every part, even of the version that was live. Nothing is received before `restore`."""
        with self._lock:
            self._is_released, self._holds_version = True, False
            for side in (self._live, self._staging):
                side.checksums = {}
            self._forget()

    def restore(self) -> None:
        """The buffers have memory again."""
        with self._lock:
            self._is_released = False

    def _is_live(self, version: Version) -> bool:
        return self._holds_version and version == self.version

    def _use(self, plan: Plan) -> None:
        self._plan = plan
        mine = plan.transfers[plan.transfers["target"] == self._rank]
        keys = mine[["source", "round"]]
        borders = np.flatnonzero(keys[1:] != keys[:-1]) + 1
        self._runs = {run[0][["source", "round"]].item(): run for run in np.split(mine, borders) if len(run)}
        self._live.boxes = self._views_of(self._live)
        if self._in_place:
            sizes = [self._dtype.itemsize * _num_elements(run) for run in self._runs.values()]
            staged = self._staging.buffers[0][: sum(sizes)].split_with_sizes(sizes)
            slots = dict(zip(self._runs, staged, strict=True))
            self._staging.boxes = {part: [slot] for part, slot in slots.items()}
            self._unpack = {
                part: launches(self._live.boxes[part], stream_views(slot, self._runs[part], self._dtype))
                for part, slot in slots.items()
            }
        else:
            self._staging.boxes = self._views_of(self._staging)
        self._live.checksums, self._staging.checksums = {}, {}
        self._forget()

    def _views_of(self, side: _BufferSet) -> dict[Part, list[torch.Tensor]]:
        return {part: side_views(side.buffers, run, "target") for part, run in self._runs.items()}

    def _forget(self) -> None:
        self._incoming = None
        self._arrived = {}

    def _take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor | None:
        """uint8 [bytes] that arrive; None for another rank."""
        if stream.plan_id != self._plan.id:
            raise WeightPushError(f"a stream of plan {stream.plan_id}, which was never sent: send the plan")
        if (stream.source, stream.part) not in self._runs:
            return None
        return self._receiver.take(stream, membership)

    def _stage(self, stream: StreamManifest, membership: Membership) -> int:
        """Copies and checks a part unless this rank holds it already; returns the bytes copied."""
        data, part = self._take(stream, membership), (stream.source, stream.part)
        if data is None:
            return 0
        staged = self._staging.checksums
        self._arrived[part] = stream.checksum
        if stream.checksum in (staged.get(part), self._live.checksums.get(part)):
            return 0
        if stream.delta:
            data = self._apply_delta(data, part)
        staged.pop(part, None)  # unknown until the copy is checked
        pieces = [data] if self._in_place else stream_views(data, self._runs[part], self._dtype)
        checksum = copy_part(data, self._staging.boxes[part], pieces)
        if checksum != stream.checksum:
            raise WeightPushError(
                f"{self._describe(part)}: got checksum {checksum:#018x}, expected {stream.checksum:#018x}; "
                "nothing was committed"
            )
        staged[part] = checksum
        return data.nbytes

    def _apply_delta(self, delta: torch.Tensor, part: Part) -> torch.Tensor:
        """uint8 [bytes] the part that the delta makes of the live one. Whether it was encoded from that one,
        the checksum tells."""
        run = self._runs[part]
        data = delta.new_empty(self._dtype.itemsize * _num_elements(run))
        copy_boxes(launches(stream_views(data, run, self._dtype), self._live.boxes[part]))
        try:
            decode(delta, data.view(self._dtype))
        except ValueError as error:
            raise WeightPushError(f"{self._describe(part)}: {error}; nothing was committed") from error
        return data

    def _fill_from_live(self) -> None:
        """Once all is there: what the trainer did not change may be on the live side alone."""
        if self._arrived.keys() == self._runs.keys() and self._arrived != self._live.checksums:
            for part, expected in self._arrived.items():
                if self._staging.checksums.get(part) != expected:
                    copy_boxes(launches(self._staging.boxes[part], self._live.boxes[part]))
                    self._staging.checksums[part] = expected

    def _copy_over(self) -> None:
        for part, expected in self._arrived.items():
            if self._live.checksums.get(part) != expected:
                self._live.checksums.pop(part, None)  # unknown should the copy fail half-way
                copy_boxes(self._unpack[part], wait=False)
                self._live.checksums[part] = expected

    def _check_staged(self, version: Version) -> None:
        if version != self._incoming:
            raise WeightPushError(f"commit of {version}, but {self._incoming or 'nothing'} is staged")
        if missing := sorted(self._runs.keys() - self._arrived.keys()):
            raise WeightPushError(
                f"commit of {version}, but {len(missing)} of {len(self._runs)} parts have not arrived; the "
                f"first is {self._describe(missing[0])}"
            )

    def _describe(self, part: Part) -> str:
        source, number = part
        first, last = (self._plan.tensors[t] for t in self._runs[part]["tensor"][[0, -1]])
        return f"part {number} of trainer rank {source}, from {first!r} to {last!r}"


def _num_elements(run: NDArray[np.void]) -> int:
    return int((run["rows"] * run["columns"]).sum())


def _reserve(buffers: Sequence[torch.Tensor], staging: str) -> torch.Tensor:
    """uint8 as large as all buffers. Touches the pages."""
    on_host = staging == "host"
    like = torch.empty(0) if on_host else buffers[0]
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    return like.new_zeros(num_bytes, dtype=torch.uint8, pin_memory=on_host and torch.cuda.is_available())
