"""The traits of each weight transport, for those who treat transports differently. What they do stands in
weights/transport/."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransportTraits:
    # readers come to a version in the trainer's memory, late ones too; else it is sent to each, who all enter
    stays_readable: bool
    on_gpus: bool  # it begins and ends in their memory


TRANSPORTS: Mapping[str, TransportTraits] = {
    "shm": TransportTraits(stays_readable=True, on_gpus=False),
    "cuda_ipc": TransportTraits(stays_readable=True, on_gpus=True),
    "nccl": TransportTraits(stays_readable=False, on_gpus=True),
    "tcp": TransportTraits(stays_readable=False, on_gpus=False),
}
