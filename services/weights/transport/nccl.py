"""Broadcasts over NCCL, from a trainer's GPUs to those of the replicas, by CuPy's binding.

CuPy's communicators are independent of torch's process groups: a trainer rank is in many at once, and each
ends separately. NCCL refuses ranks that run different versions of it or share a GPU, but its error does not
say so. A communicator's location therefore contains the sender's version and GPU, and each member compares
them with its own before it enters.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread

import cupy
import torch
from cupy.cuda import nccl

from atoll.runtime.errors import UserError, WeightPushError
from atoll.weights.transport import collective
from atoll.weights.transport.devices import device_uuid
from atoll.wire.types import Membership

POLL_S = 1e-4  # CUDA cannot wait for an event and a deadline at once
RETURN_S = 1.0  # for a broadcast to notice that it is over; longer only while NCCL connects to a rank


@dataclass(frozen=True, slots=True)
class Here:
    """What NCCL compares between ranks."""

    device: int
    uuid: str  # of the device
    version: int  # of NCCL, as in 22907 for 2.29.7


def open_sender(deadline_s: float, part_bytes: Sequence[int]) -> collective.BroadcastSender:
    here = _here()
    return collective.BroadcastSender(
        partial(_create_communicator, here, deadline_s), partial(_allocate, here.device), part_bytes
    )


def open_receiver(deadline_s: float) -> collective.BroadcastReceiver:
    here = _here()
    return collective.BroadcastReceiver(
        partial(_join_communicator, here, deadline_s), partial(_allocate, here.device)
    )


def _allocate(device: int, num_bytes: int) -> torch.Tensor:
    part = torch.zeros(num_bytes, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize(device)  # the broadcasts' streams do not wait for torch's, which zeroes it
    return part


def _here() -> Here:
    if not nccl.available:
        raise UserError('weights.transport = "nccl": CuPy finds no libnccl.so.2: install nvidia-nccl-cu13')
    device = torch.cuda.current_device()
    return Here(device, device_uuid(device), nccl.get_version())


def _create_communicator(here: Here, deadline_s: float, membership: Membership) -> "NcclCommunicator":
    location = f"{here.version}#{here.uuid}#{nccl.get_unique_id().hex()}"
    return NcclCommunicator(here.device, deadline_s, location, membership, 0)


def _join_communicator(
    here: Here, deadline_s: float, location: str, membership: Membership
) -> "NcclCommunicator":
    """Raises WeightPushError if NCCL would refuse this rank beside the sender."""
    version, uuid, _ = location.split("#")
    if int(version) != here.version:
        raise WeightPushError(
            f"the trainer runs NCCL {_release(int(version))}, this replica NCCL {_release(here.version)}: "
            "NCCL does not connect different versions. Install the same torch, which pins NCCL, in both "
            'environments, or set weights.transport = "tcp"'
        )
    if uuid == here.uuid:
        raise WeightPushError(
            f"the trainer rank and this replica's rank are both on GPU {uuid}: NCCL allows one rank per GPU. "
            'Set weights.transport = "cuda_ipc", or place them on different GPUs'
        )
    return NcclCommunicator(here.device, deadline_s, location, membership, 1 + membership.member)


def _release(version: int) -> str:
    return f"{version // 10_000}.{version // 100 % 100}.{version % 100}"


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
        # Held from the enqueue to the end of a broadcast, and by who frees the communicator: CuPy lets other
        # threads run in NCCL's calls, and would free what the broadcast still uses, or free it twice.
        self._using = Lock()

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
        """Aborts, since destroying a communicator waits for ranks that may be gone. If a broadcast uses it,
        that one frees it."""
        self._aborted = True
        if self._using.acquire(timeout=RETURN_S):
            try:
                self._free()
            finally:
                self._using.release()

    def _enter(self, part: torch.Tensor, answers: "SimpleQueue[Exception | None]") -> None:
        try:
            cupy.cuda.Device(self._device).use()  # a new thread uses device 0
            inner, stream = self._inner, self._stream
            if inner is None or stream is None:
                unique_id = bytes.fromhex(self.location.rpartition("#")[2])
                inner = nccl.NcclCommunicator(self._membership.num_members + 1, unique_id, self._rank)
                stream = cupy.cuda.Stream(non_blocking=True)
            with self._using:
                self._inner, self._stream = inner, stream
                self._run(inner, stream, part)
            answers.put(None)
        except Exception as error:  # raised by `broadcast`
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
            self._free()
            raise WeightPushError(f"epoch {self._membership.epoch} is over")
        inner.check_async_error()

    def _free(self) -> None:
        """May be repeated; its caller holds `_using`."""
        if self._inner is not None:
            self._inner.abort()
