"""A trainer rank's side of a weight push: casts, packs and checksums, part by part."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from atoll.runtime.errors import WeightPushError
from atoll.weights.boxes import copy_part, side_views, stream_views
from atoll.weights.delta import encode
from atoll.weights.transport.base import Sender
from atoll.wire.types import Membership, Plan, PublishedPart, PublishRequest, StreamManifest, Version

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

OpenSender = Callable[[Sequence[int]], Sender]  # for parts of these sizes in bytes


class Publisher:
    """Sends this rank's transfers. Calls come one at a time, from the rank's compute thread."""

    def __init__(
        self,
        rank: int,
        buffers: Sequence[torch.Tensor],
        open_sender: OpenSender,
        refresh: Callable[[], None] | None = None,
        *,
        stays_readable: bool,
        delta: bool = False,
    ) -> None:
        """`buffers` are those that the rank's shard layout indexes; their storage must not be replaced. They
        are the live weights, or are made equal to them by `refresh`, which is called once for a version.
        `stays_readable`: a trait of the transport, see config/transports.py. `delta`: what differs from the
        last version travels, where that is less and the members hold it.
        """
        self._rank = rank
        self._buffers = buffers
        self._open_sender = open_sender
        self._refresh = refresh
        self._stays_readable = stays_readable
        self._delta = delta
        self._version: Version | None = None  # of the last publish
        self._is_live = False  # the live weights are still that version's
        self._streams: dict[tuple[str, str], _ClassSender] = {}

    def train_on(self) -> None:
        """Must be called before the live weights change: afterwards only what was sent of the last version is
        available.
        """
        self._is_live = False

    def publish(self, request: PublishRequest) -> PublishedPart:
        """Sends a part of the live weights to the members of each plan; parts come in order from 0.

        Repeating a call answers from its record. In another epoch the version is sent again from round 0,
        although the weights may have been trained on since. Where every byte equals the last version's, and
        that is still there, nothing is sent. Raises WeightPushError for a plan that this rank was never
        sent, a part out of order, an epoch that is over, a version that is no longer live and was not packed
        for these replicas, and if a part before this one did not arrive.
        """
        version, dtype, members = request.version, request.dtype, request.members
        for plan in request.new_plans:
            if (plan.id, dtype) not in self._streams:
                self._streams[plan.id, dtype] = _ClassSender(
                    self._rank,
                    plan,
                    self._buffers,
                    DTYPES[dtype],
                    self._open_sender,
                    self._stays_readable,
                    self._delta,
                )
        if unknown := [plan_id for plan_id in members if (plan_id, dtype) not in self._streams]:
            raise WeightPushError(f"trainer rank {self._rank} has no plan {unknown[0]}: send the plan again")
        if version != self._version:
            if self._refresh is not None:
                self._refresh()
            self._version, self._is_live = version, True
        return merge_published(
            [
                self._streams[plan_id, dtype].write(version, request.part, membership, is_live=self._is_live)
                for plan_id, membership in members.items()
            ]
        )

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def merge_published(parts: Sequence[PublishedPart]) -> PublishedPart:
    """Merges the answers of several plans or ranks."""
    return PublishedPart(
        tuple(stream for part in parts for stream in part.streams),
        sum(part.num_bytes for part in parts),
        all(part.last for part in parts),
    )


class _ClassSender:
    """Sends this rank's part to one replica class."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        buffers: Sequence[torch.Tensor],
        dtype: torch.dtype,
        open_sender: OpenSender,
        stays_readable: bool,
        delta: bool,
    ) -> None:
        self._transfers = plan.transfers[plan.transfers["source"] == rank]
        self._num_rounds = int(plan.transfers["round"].max(initial=-1)) + 1
        rounds = np.arange(self._num_rounds + 1)
        borders = np.searchsorted(self._transfers["round"], rounds).tolist()
        self._parts = [slice(*border) for border in pairwise(borders)]  # transfers of each round
        sizes = self._transfers["rows"] * self._transfers["columns"] * dtype.itemsize
        self._part_bytes = [int(sizes[part].sum()) for part in self._parts]
        self._rank, self._plan_id, self._dtype, self._delta = rank, plan.id, dtype, delta
        self._sources = side_views(buffers, self._transfers, "source")
        self._sender, self._stays_readable = open_sender(self._part_bytes), stays_readable
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}  # by part and address of its room
        self._checksums = [0] * len(self._parts)  # of what was packed
        # Where the transport does not keep a version, the host does: for members of a later epoch.
        pinned = any(buffer.is_cuda for buffer in buffers) and torch.cuda.is_available()
        self._kept = [
            torch.zeros(0 if self._stays_readable else size, dtype=torch.uint8, pin_memory=pinned)
            for size in self._part_bytes
        ]
        self._version: Version | None = None
        self._epoch = 0  # that it is sent to; 0 where it stays readable in any
        self._packed = 0  # parts of the version whose bytes are kept
        self._sent: list[PublishedPart] = []  # parts of the version, to this epoch
        self._members_hold_last = False  # what is kept from `_packed` on

    def write(self, version: Version, part: int, membership: Membership, *, is_live: bool) -> PublishedPart:
        if part >= self._num_rounds:  # another plan has more
            return PublishedPart((), 0, True)
        epoch = 0 if self._stays_readable else membership.epoch
        if part == 0 and (version, epoch) != (self._version, self._epoch):
            self._begin(version, epoch, membership)
        if (version, epoch) != (self._version, self._epoch) or part > len(self._sent):
            raise WeightPushError(
                f"trainer rank {self._rank}: part {part} of {version} is requested after part "
                f"{len(self._sent) - 1} of {self._version}: request parts in order, from 0"
            )
        if part < len(self._sent):
            return replace(self._sent[part], num_bytes=0)
        self._sent.append(self._send(part, is_live))
        return self._sent[part]

    def close(self) -> None:
        self._sender.close()

    def _begin(self, version: Version, epoch: int, membership: Membership) -> None:
        whole = len(self._sent) == self._num_rounds  # the last version was sent to its end
        if whole and self._stays_readable and self._unchanged():
            self._version = version  # and the new one is the same
            return
        self._sender.begin(membership)
        if version != self._version:
            # one that leaves, joins or fails makes a new epoch: those of this one have the last version
            self._members_hold_last = self._delta and whole and epoch == self._epoch
            self._packed = 0
        else:
            self._members_hold_last = False
        self._version, self._epoch, self._sent = version, epoch, []

    def _unchanged(self) -> bool:
        """After a training step the first tensor differs, and the others are not looked at."""
        return all(
            torch.equal(packed.view(torch.uint8), source.to(packed).view(torch.uint8))
            for part, run in enumerate(self._parts)
            for packed, source in zip(
                self._views_of(part, self._sender.room(part)), self._sources[run], strict=True
            )
        )

    def _views_of(self, part: int, room: torch.Tensor) -> list[torch.Tensor]:
        """Of the part's transfers. They are made once, since two rooms take turns."""
        place = part, room.data_ptr()
        if place not in self._views:
            self._views[place] = stream_views(room, self._transfers[self._parts[part]], self._dtype)
        return self._views[place]

    def _send(self, part: int, is_live: bool) -> PublishedPart:
        last, run, num_bytes = part + 1 == self._num_rounds, self._parts[part], self._part_bytes[part]
        if run.start == run.stop:
            return PublishedPart((), 0, last)
        if part >= self._packed and not is_live:
            raise WeightPushError(
                f"trainer rank {self._rank}: {self._version} was never packed for these replicas, and the "
                "weights have been trained on since: the next push includes them"
            )
        room = self._sender.room(part)
        delta = None
        if part < self._packed:
            room.copy_(self._kept[part])
        else:
            delta = self._pack(part, room)
        if delta is not None:
            num_bytes = len(delta)
            room[:num_bytes] = delta
        target = int(self._transfers["target"][run.start])
        location, offset = self._sender.send(part, target, num_bytes)
        manifest = StreamManifest(
            source=self._rank,
            location=location,
            offset=offset,
            num_bytes=num_bytes,
            plan_id=self._plan_id,
            part=part,
            checksum=self._checksums[part],
            delta=delta is not None,
        )
        return PublishedPart((manifest,), num_bytes, last)

    def _pack(self, part: int, room: torch.Tensor) -> torch.Tensor | None:
        """Fills the room from the live weights; returns what differs from the last version if that is to
        travel instead."""
        self._checksums[part] = copy_part(room, self._views_of(part, room), self._sources[self._parts[part]])
        self._packed = part + 1
        if self._stays_readable:
            return None
        delta = None
        if self._members_hold_last:
            last = self._kept[part].to(room.device)
            delta = encode(last.view(self._dtype), room.view(self._dtype))
        self._kept[part].copy_(room)
        return delta
