"""Where models and replicas compute: the default layout, and what the process of each rank may see. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from atoll.config.errors import ConfigError
from atoll.config.gpus import Gpu, describe_gpus
from atoll.config.schema import GpusConfig, PlacementMode, Role, RunConfig

NO_GPU: Mapping[str, str] = {"CUDA_VISIBLE_DEVICES": ""}
MODES: tuple[PlacementMode, ...] = ("standalone", "split", "colocated")  # as auto tries them


class GpuNeeds(NamedTuple):
    """How many GPUs the run's models and replicas compute on. Those on CPUs do not count."""

    roles: Mapping[Role, int]
    replicas: int
    tp_size: int

    def total(self, mode: PlacementMode) -> int:
        models = sum(self.roles.values()) if mode == "standalone" else max(self.roles.values(), default=0)
        replicas = self.replicas * self.tp_size
        return max(models, replicas) if mode == "colocated" else models + replicas

    def __str__(self) -> str:
        parts = [f"{role} {size}" for role, size in self.roles.items()]
        return ", ".join([*parts, f"rollout {self.replicas} x {self.tp_size}"] if self.replicas else parts)


def lay_out(needs: GpuNeeds, there: Sequence[int], mode: PlacementMode) -> GpusConfig:
    """The default: the largest role first, so that its tensor-parallel groups are neighbours, and replicas
    behind the models. `there` has at least `needs.total(mode)` GPUs of this machine."""
    gpus = [Gpu("", index) for index in there]
    named: dict[str, str] = {}
    end = 0
    for role, size in sorted(needs.roles.items(), key=lambda entry: -entry[1]):
        start = end if mode == "standalone" else 0
        named[role] = describe_gpus(gpus[start : start + size])
        end = max(end, start + size)
    start = 0 if mode == "colocated" else end
    ends = (start + (number + 1) * needs.tp_size for number in range(needs.replicas))
    return GpusConfig(rollout=tuple(describe_gpus(gpus[end - needs.tp_size : end]) for end in ends), **named)


def mode_of(gpus: GpusConfig) -> PlacementMode:
    """The mode that named GPUs amount to."""
    models = [gpu for role in gpus.roles.values() for gpu in role]
    replicas = {gpu for replica in gpus.replicas for gpu in replica}
    if replicas & set(models):
        return "colocated"
    return "split" if len(set(models)) < len(models) else "standalone"


def other_hosts(config: RunConfig) -> set[str]:
    gpus = config.placement.gpus
    return {gpu.host for each in (*gpus.roles.values(), *gpus.replicas) for gpu in each} - {""}


def describe_placement(config: RunConfig) -> str:
    """ "" without GPUs."""
    gpus = config.placement.gpus.model_dump(exclude_defaults=True)
    rollout = "; ".join(gpus.pop("rollout", ()))
    places = [f"{role} {named}" for role, named in gpus.items()] + ([f"rollout {rollout}"] if rollout else [])
    return f"{config.placement.mode}: {', '.join(places)}" if places else ""


def trainer_environment(config: RunConfig, role: Role, rank: int) -> Mapping[str, str]:
    """What makes a trainer rank compute where the config says. Set it before CUDA is used."""
    gpus = config.placement.gpus.roles.get(role, ())
    numbers = [gpu.number for gpu in gpus[rank : rank + 1]]
    return rank_environment(config, role, numbers) if gpus else NO_GPU


def rank_environment(config: RunConfig, role: Role, numbers: Sequence[int]) -> Mapping[str, str]:
    """Of a rank that computes on these GPUs."""
    # Micro-batches differ in shape, so that fixed segments would fragment
    variables = visible_environment(numbers) | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    if config.roles[role].parallel.tensor > 1:  # Megatron overlaps collectives and matrices in launch order
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return variables


def replica_environment(config: RunConfig, name: str) -> Mapping[str, str]:
    """As `trainer_environment`. SGLang's ranks take the first GPUs. With `cuda_ipc` a replica also sees the
    actor's other GPUs, since it opens memory on the GPU that has it. A replica that a user has added, so that
    the config does not count it, keeps the GPUs of its environment."""
    if config.rollout.device != "cuda":
        return NO_GPU
    gpus = config.placement.gpus
    own = {f"rollout-{index}": replica for index, replica in enumerate(gpus.replicas)}.get(name)
    if own is None:
        return {}
    if config.weights.transport != "cuda_ipc":
        return visible_environment(gpu.number for gpu in own)
    others = (gpu for gpu in gpus.roles.get("actor", ()) if gpu not in own)  # on one host, as a rule demands
    return visible_environment(gpu.number for gpu in (*own, *others))


def check_torchrun(gpus: Sequence[Gpu], rank: int, host_number: int, local_rank: int) -> None:
    """Raises ConfigError if torchrun started rank `rank` as number `local_rank` of host `host_number`, and
    the file has it elsewhere."""
    if rank >= len(gpus):
        raise ConfigError(f"torchrun starts rank {rank}, but placement.gpus has {len(gpus)} for this role")
    hosts = list(dict.fromkeys(gpu.host for gpu in gpus))
    mine = [number for number, gpu in enumerate(gpus) if gpu.host == gpus[rank].host]
    expected = hosts.index(gpus[rank].host), mine.index(rank)
    if expected != (host_number, local_rank):
        raise ConfigError(
            f"torchrun starts rank {rank} as local rank {local_rank} of host {host_number}, expected local "
            f"rank {expected[1]} of host {expected[0]} for {describe_gpus(gpus)}: use --nnodes {len(hosts)} "
            f"--nproc-per-node {len(mine)}, with --node-rank in the order of these hosts"
        )


def visible_environment(numbers: Iterable[int]) -> dict[str, str]:
    """`numbers`: nvidia-smi's, whose order is that of the PCI bus."""
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(map(str, numbers))}
