"""Broadcasts over NCCL, from a trainer's GPUs to those of the replicas, by CuPy's binding.

CuPy's communicators are independent of torch's process groups and of torch's version on the other side: a
trainer rank is in many at once, and each ends separately.
"""

import time
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread

import cupy
import torch
from cupy.cuda import nccl

from atoll.runtime.errors import UserError, WeightPushError
from atoll.weights.transport import collective
from atoll.wire.types import Membership

POLL_S = 1e-4  # CUDA cannot wait for an event and a deadline at once


def open_sender(deadline_s: float, part_bytes: Sequence[int]) -> collective.BroadcastSender:
    device = _device()
    return collective.BroadcastSender(
        partial(_create_communicator, device, deadline_s), partial(_allocate, device), part_bytes
    )


def open_receiver(deadline_s: float) -> collective.BroadcastReceiver:
    device = _device()
    return collective.BroadcastReceiver(
        partial(_join_communicator, device, deadline_s), partial(_allocate, device)
    )


def _allocate(device: int, num_bytes: int) -> torch.Tensor:
    part = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize(device)  # the broadcasts' streams do not wait for torch's, which zeroes it
    return part


def _device() -> int:
    if not nccl.available:
        raise UserError('weights.transport = "nccl": CuPy finds no libnccl.so.2: install nvidia-nccl-cu13')
    return torch.cuda.current_device()


def _create_communicator(device: int, deadline_s: float, membership: Membership) -> "NcclCommunicator":
    # CuPy gives the 128 bytes as signed numbers
    location = bytes(number & 0xFF for number in nccl.get_unique_id()).hex()
    return NcclCommunicator(device, deadline_s, location, membership, 0)


def _join_communicator(
    device: int, deadline_s: float, location: str, membership: Membership
) -> "NcclCommunicator":
    return NcclCommunicator(device, deadline_s, location, membership, 1 + membership.member)


class NcclCommunicator:
    """One rank's end; it enters with its first broadcast. See collective.RootCommunicator."""

    def __init__(
        self, device: int, deadline_s: float, location: str, membership: Membership, rank: int
    ) -> None:
        self.location = location
        self._device = device
        self._deadline_s = deadline_s
        self._membership = membership
        self._rank = rank
        self._inner: nccl.NcclCommunicator | None = None
        self._stream: cupy.cuda.Stream | None = None
        self._answers: SimpleQueue[Exception | None] = SimpleQueue()  # how the current broadcast ended
        self._aborted = False
        # CuPy lets other threads run while NCCL frees the communicator: a second abort would free it again
        self._freeing = Lock()

    def broadcast(self, part: torch.Tensor) -> None:
        """NCCL blocks while it connects to a missing rank, and cannot be interrupted: a separate thread waits
        for it, and is abandoned if necessary."""
        answers: SimpleQueue[Exception | None] = SimpleQueue()
        self._answers = answers  # before the check: an abort sets the flag, then answers
        if self._aborted:
            raise WeightPushError(f"epoch {self._membership.epoch} is over")
        Thread(target=self._enter, args=(part, answers), name="nccl", daemon=True).start()
        try:
            error = answers.get(timeout=self._deadline_s)
        except Empty:
            error = TimeoutError(f"not within {self._deadline_s:g} s")
        if error is not None:
            self.close()
            epoch, last = self._membership.epoch, self._membership.num_members - 1
            raise WeightPushError(
                f"the trainer rank and members 0 to {last} of epoch {epoch} did not end a broadcast "
                f"({error}): NCCL does not say which of them is missing"
            ) from error

    def abort(self) -> None:
        self._aborted = True
        self._answers.put(ConnectionAbortedError(f"epoch {self._membership.epoch} is over"))
        self.close()

    def close(self) -> None:
        """Aborts, since destroying a communicator waits for ranks that may be gone."""
        self._aborted = True
        if self._inner is not None:
            self._free(self._inner)

    def _enter(self, part: torch.Tensor, answers: "SimpleQueue[Exception | None]") -> None:
        try:
            cupy.cuda.Device(self._device).use()  # a new thread uses device 0
            if self._inner is None:
                unique_id = tuple(byte - 256 if byte > 127 else byte for byte in bytes.fromhex(self.location))
                self._inner = nccl.NcclCommunicator(self._membership.num_members + 1, unique_id, self._rank)
                self._stream = cupy.cuda.Stream(non_blocking=True)
            self._run(self._inner, self._stream, part)
            answers.put(None)
        except (nccl.NcclError, cupy.cuda.runtime.CUDARuntimeError, WeightPushError) as error:
            answers.put(error)

    def _run(self, inner: nccl.NcclCommunicator, stream: cupy.cuda.Stream, part: torch.Tensor) -> None:
        self._check(inner)  # it may have been aborted before it entered
        inner.broadcast(part.data_ptr(), part.data_ptr(), part.numel(), nccl.NCCL_UINT8, 0, stream.ptr)
        done = stream.record()
        while not done.done:
            self._check(inner)
            time.sleep(POLL_S)

    def _check(self, inner: nccl.NcclCommunicator) -> None:
        if self._aborted:
            self._free(inner)
            raise WeightPushError(f"epoch {self._membership.epoch} is over")
        with self._freeing:
            inner.check_async_error()

    def _free(self, inner: nccl.NcclCommunicator) -> None:
        """May be repeated, from any thread."""
        with self._freeing:
            inner.abort()
