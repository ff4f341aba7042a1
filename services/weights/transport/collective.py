"""The two ends of a collective transport: one broadcast for each part.

For each tensor-parallel rank, the replicas of a plan and epoch form a communicator with each trainer rank
that sends to it: rank 0 is the sender, rank 1 + member a replica. Communicators last until another epoch
begins. Their location travels by gRPC in the manifest; nothing is shared beforehand. `nccl.py` and `tcp.py`
implement them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Generic, Protocol, TypeVar

import torch

from atoll.runtime.errors import WeightPushError
from atoll.wire.types import Membership, StreamManifest


class Communicator(Protocol):
    """One rank's end. Not for concurrent calls."""

    def broadcast(self, part: torch.Tensor) -> None:
        """Copies rank 0's bytes into everyone's `part`, uint8 [bytes]. The first call waits for all to enter.

        Returns once `part` may be read or repacked. Raises WeightPushError and closes the communicator if
        that takes longer than the deadline, naming the missing ranks as far as they are known.
        """
        ...

    def close(self) -> None:
        """May be repeated."""
        ...


class RootCommunicator(Communicator, Protocol):
    """Rank 0's end."""

    @property
    def location(self) -> str:
        """What members need to enter, as printable characters."""
        ...

    def abort(self) -> None:
        """Ends the current broadcast and all later ones with WeightPushError. Call it from any thread."""
        ...


Allocate = Callable[[int], torch.Tensor]  # uint8 [bytes], where communicators send from
Found = Callable[[Membership], RootCommunicator]
Join = Callable[[str, Membership], Communicator]  # at a location, as rank 1 + member


_Travel = tuple[RootCommunicator, torch.Tensor, Future[None]]
T = TypeVar("T", bound=Communicator)


@dataclass(slots=True)
class _OpenCommunicator(Generic[T]):
    communicator: T
    num_bytes: int = 0  # broadcast so far: the offset of the next part


class BroadcastSender:
    """Two buckets, packed alternately by the caller and broadcast by a separate thread.

    The thread consumes packed buckets in order; waits for the members in each broadcast; unblocked by their
    arrival, the deadline, a newer epoch and `close`.
    """

    def __init__(self, found: Found, allocate: Allocate, part_bytes: Sequence[int]) -> None:
        self._found = found
        self._part_bytes = part_bytes
        self._buckets = [allocate(max(part_bytes, default=0)) for _ in range(2)]
        self._arrived = [_completed_future(), _completed_future()]  # the last part in each bucket
        self._current = 0  # the bucket being packed
        self._membership = Membership(-1, 0)
        self._communicators: dict[int, _OpenCommunicator[RootCommunicator]] = {}  # by target rank
        self._packed: SimpleQueue[_Travel | None] = SimpleQueue()  # None: the end
        Thread(target=self._run, name="broadcast", daemon=True).start()

    def begin(self, membership: Membership) -> None:
        if membership.epoch < self._membership.epoch:
            raise WeightPushError(
                f"a push to epoch {membership.epoch}, but epoch {self._membership.epoch} has begun"
            )
        if membership.epoch > self._membership.epoch:
            self._leave()
            self._membership = membership

    def room(self, part: int) -> torch.Tensor:
        self._arrived[self._current].result()  # bounded: a broadcast has a deadline
        return self._buckets[self._current][: self._part_bytes[part]]

    def send(self, part: int, target: int, num_bytes: int) -> tuple[str, int]:
        if target not in self._communicators:
            self._communicators[target] = _OpenCommunicator(self._found(self._membership))
        opened, bucket = self._communicators[target], self._buckets[self._current]
        if bucket.is_cuda:
            torch.cuda.current_stream(bucket.device).synchronize()  # finish packing: others read it now
        arrived: Future[None] = Future()
        self._packed.put((opened.communicator, bucket[:num_bytes], arrived))
        self._arrived[self._current] = arrived
        self._current = 1 - self._current
        offset = opened.num_bytes
        opened.num_bytes += num_bytes
        return opened.communicator.location, offset

    def close(self) -> None:
        self._leave()
        self._packed.put(None)

    def _leave(self) -> None:
        """Ends the epoch: parts still in transit do not arrive."""
        for opened in self._communicators.values():
            opened.communicator.abort()
        wait(self._arrived)
        for opened in self._communicators.values():
            opened.communicator.close()
        self._communicators, self._arrived = {}, [_completed_future(), _completed_future()]

    def _run(self) -> None:
        while (travel := self._packed.get()) is not None:
            communicator, part, arrived = travel
            try:
                communicator.broadcast(part)
                arrived.set_result(None)
            except Exception as error:
                arrived.set_exception(error)  # raised when the bucket is needed next


def _completed_future() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


class BroadcastReceiver:
    """One bucket, as large as the largest part so far, and the communicators of one epoch."""

    def __init__(self, join: Join, allocate: Allocate) -> None:
        self._join = join
        self._allocate = allocate
        self._bucket = allocate(0)
        self._epoch = -1
        self._communicators: dict[str, _OpenCommunicator[Communicator]] = {}  # by location
        self._last = ("", 0)  # location and offset of what the bucket holds

    def take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor:
        if membership.epoch < self._epoch:
            raise WeightPushError(
                f"a part for epoch {membership.epoch}, but epoch {self._epoch} has begun: it is void"
            )
        if membership.epoch > self._epoch:
            self.close()
            self._epoch = membership.epoch
        if (stream.location, stream.offset) != self._last:  # otherwise the call is repeated
            try:
                self._broadcast(stream, membership)
            except WeightPushError as error:
                raise WeightPushError(f"from trainer rank {stream.source}: {error}") from error
        return self._bucket[: stream.num_bytes]

    def close(self) -> None:
        for opened in self._communicators.values():
            opened.communicator.close()
        self._communicators = {}
        self._last = ("", 0)

    def _broadcast(self, stream: StreamManifest, membership: Membership) -> None:
        if stream.location not in self._communicators:
            self._communicators[stream.location] = _OpenCommunicator(self._join(stream.location, membership))
        opened = self._communicators[stream.location]
        if stream.offset != opened.num_bytes:
            raise WeightPushError(
                f"its part begins at byte {stream.offset}, but {opened.num_bytes} bytes were received: "
                "this replica missed a part or got one twice, and needs a new epoch"
            )
        if self._bucket.numel() < stream.num_bytes:
            self._bucket = self._allocate(stream.num_bytes)
        self._last = ("", 0)
        opened.communicator.broadcast(self._bucket[: stream.num_bytes])
        opened.num_bytes += stream.num_bytes
        self._last = stream.location, stream.offset
