"""Rules about [weights]. See rules.py."""

from collections.abc import Callable

from atoll.config.schema import RunConfig
from atoll.config.transports import TRANSPORTS


def _deltas_travel(config: RunConfig) -> str | None:
    weights = config.weights
    if weights.delta and weights.transport != "auto" and weights.stays_readable:
        return (
            f'weights.delta reduces what is sent, but with weights.transport = "{weights.transport}" '
            "replicas read the trainer's memory: remove it, or set the transport to "
            '"tcp" or "nccl"'
        )
    return None


def _device_transports_have_devices(config: RunConfig) -> str | None:
    transport, trainer, rollout = config.weights.transport, config.trainer, config.rollout
    if transport == "auto" or not TRANSPORTS[transport].on_gpus:
        return None
    if rollout.engine == "local" or "cpu" in (rollout.device, trainer.device):
        return (
            f'weights.transport = "{transport}" requires replicas on GPUs, and the trainer, too: set '
            'rollout.engine = "sglang", rollout.device = "cuda" and trainer.device = "cuda", or the '
            'transport to "shm" or "tcp"'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (_deltas_travel, _device_transports_have_devices)
