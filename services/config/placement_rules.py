"""Rules between [placement], devices and the weight transport. See rules.py."""

from collections.abc import Callable

from atoll.config.placement import other_hosts
from atoll.config.schema import GpusConfig, RunConfig

UNREACHABLE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")  # by this address, from another host


def _the_local_engine_has_no_gpus(config: RunConfig) -> str | None:
    if config.rollout.engine == "local" and config.rollout.device == "cuda":
        return (
            'rollout.engine = "local" computes on the CPU, but rollout.device = "cuda": remove device, or '
            'set engine = "sglang"'
        )
    return None


def _memory_is_shared_within_a_host(config: RunConfig) -> str | None:
    gpus, transport = config.placement.gpus, config.weights.transport
    hosts = {gpu.host for each in (gpus.roles.get("actor", ()), *gpus.replicas) for gpu in each}
    if config.rollout.device == "cpu" or config.trainer.device == "cpu":
        hosts.add("")
    if transport in ("shm", "cuda_ipc") and config.run.mode == "train" and len(hosts) > 1:
        return (
            f'weights.transport = "{transport}" needs the trainer and all replicas on one host, but '
            f'[placement.gpus] has {len(hosts)}: set the transport to "nccl" or "tcp"'
        )
    return None


def _other_hosts_reach_the_coordinator(config: RunConfig) -> str | None:
    others = other_hosts(config) if config.placement.mode != "auto" else set()
    if others and config.coordinator.host in UNREACHABLE:
        return (
            f"placement.gpus has GPUs on {', '.join(sorted(others))}, which cannot reach coordinator.host = "
            f"{config.coordinator.host}: set it to an address of this machine"
        )
    return None


def _visible_gpus_have_no_names(config: RunConfig) -> str | None:
    placement = config.placement
    if not placement.use_visible_gpus:
        return None
    if placement.gpus != GpusConfig():
        return (
            "placement.use_visible_gpus = true, but [placement.gpus] names GPUs: remove one of them, since "
            "services take the GPUs that they see, or those that the file names"
        )
    if placement.mode == "colocated":
        return (
            'placement.mode = "colocated" needs [placement.gpus], which says what trainers and replicas '
            "share, but placement.use_visible_gpus = true: remove it, or set the mode to "
            '"standalone" or "split"'
        )
    return None


RULES: tuple[Callable[[RunConfig], str | None], ...] = (
    _the_local_engine_has_no_gpus,
    _memory_is_shared_within_a_host,
    _other_hosts_reach_the_coordinator,
    _visible_gpus_have_no_names,
)
