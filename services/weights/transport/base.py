"""The two ends of a weight transport, which carries bytes as planned.

There are two kinds of transports. In memory that readers map or open (`shm`, `cuda_ipc`), a version stays
readable until the one after the next is sent: late readers cost the sender nothing. Collective transports
(`nccl`, `tcp`; see collective.py) have two buckets, so that one is packed while the other is sent, and a
communicator per epoch, source and target rank.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Protocol

import torch

from atoll.runtime.errors import UserError
from atoll.wire.types import Membership, StreamManifest


class Sender(Protocol):
    """A trainer rank's end, for the replicas of one plan. Use it from one thread."""

    def begin(self, membership: Membership) -> None:
        """Starts over from the first part, for another version or other members.

        Raises WeightPushError for an epoch that is over.
        """
        ...

    def room(self, part: int) -> torch.Tensor:
        """uint8 [bytes of the part] into which to pack it. Waits for the readers of its previous content.

        Raises WeightPushError if an earlier part did not arrive in time, naming the missing members.
        """
        ...

    def send(self, part: int, target: int, num_bytes: int) -> tuple[str, int]:
        """Lets rank `target` of each member read the first `num_bytes` of the room; returns location and
        offset for the manifest without waiting."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A target rank's end. Use it from one thread."""

    def take(self, stream: StreamManifest, membership: Membership) -> torch.Tensor:
        """uint8 [stream.num_bytes], valid until the next call. Raises WeightPushError if the sender is gone
        or silent for longer than the deadline, and if the membership's epoch is over."""
        ...

    def close(self) -> None: ...


def open_sender(transport: str, deadline_s: float, host: str, part_bytes: Sequence[int]) -> Sender:
    """`host`: the address of this machine that members can reach. `part_bytes`: the size of each part. Raises
    UserError if the transport cannot run here."""
    match transport:
        case "shm":
            from atoll.weights.transport import shm

            return shm.ShmSender(part_bytes)
        case "cuda_ipc":
            _check_device(transport)
            from atoll.weights.transport import cuda_ipc

            return cuda_ipc.CudaIpcSender(part_bytes)
        case "tcp":
            from atoll.weights.transport import tcp

            return tcp.open_sender(deadline_s, host, part_bytes)
        case "nccl":
            _check_device(transport)
            from atoll.weights.transport import nccl

            return nccl.open_sender(deadline_s, part_bytes)
        case name:
            raise UserError(f"no weight transport {name!r}: set weights.transport")


def open_receiver(transport: str, deadline_s: float) -> Receiver:
    """Raises UserError if the transport cannot run here."""
    match transport:
        case "shm":
            from atoll.weights.transport import shm

            return shm.ShmReceiver()
        case "cuda_ipc":
            _check_device(transport)
            from atoll.weights.transport import cuda_ipc

            return cuda_ipc.CudaIpcReceiver()
        case "tcp":
            from atoll.weights.transport import tcp

            return tcp.open_receiver(deadline_s)
        case "nccl":
            _check_device(transport)
            from atoll.weights.transport import nccl

            return nccl.open_receiver(deadline_s)
        case name:
            raise UserError(f"no weight transport {name!r}: set weights.transport")


def _check_device(transport: str) -> None:
    """Checks the requirements of modules that import CuPy."""
    missing = None
    if not torch.cuda.is_available():
        missing = "this process sees no CUDA device"
    elif find_spec("cupy") is None:
        missing = "cupy is not installed here (pip install cupy-cuda13x, or cupy-cuda12x)"
    if missing:
        raise UserError(
            f'weights.transport = "{transport}" keeps weights on GPUs, and {missing}: fix that, or set it to '
            '"shm" or "tcp"'
        )
