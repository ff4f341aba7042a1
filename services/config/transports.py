"""Traits of the weight transports. Their implementations are in weights/transport/."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransportTraits:
    # replicas read a version from the trainer's memory at any time; otherwise it is broadcast
    stays_readable: bool
    on_gpus: bool  # requires trainer and replicas on GPUs
    max_senders: int = 8  # trainer ranks that send to one target rank, unless it needs more


TRANSPORTS: Mapping[str, TransportTraits] = {
    "shm": TransportTraits(stays_readable=True, on_gpus=False),
    "cuda_ipc": TransportTraits(stays_readable=True, on_gpus=True),
    "nccl": TransportTraits(
        stays_readable=False,
        on_gpus=True,
        max_senders=2,  # each needs a communicator, with buffers on every replica's GPU
    ),
    "tcp": TransportTraits(stays_readable=False, on_gpus=False),
}
