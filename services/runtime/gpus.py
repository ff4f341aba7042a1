"""The GPUs of this machine, by nvidia-smi, and those of this process. No torch: asking it starts CUDA."""

import shutil
import socket
import subprocess
from typing import NamedTuple

from atoll.config.load import set_environment, torchrun_place, visible_devices
from atoll.config.placement import check_torchrun, rank_environment, trainer_environment
from atoll.config.resolve import asks_for_gpus, may_use_gpus, resolve, resolve_for_gpus
from atoll.config.schema import Role, RunConfig, section_name
from atoll.runtime.errors import UserError

QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
HIDE = "to compute on the CPU, set CUDA_VISIBLE_DEVICES to nothing"


class InstalledGpu(NamedTuple):
    number: int  # nvidia-smi's index, which depends on the container
    uuid: str


def listed_gpus() -> list[InstalledGpu]:
    """All that nvidia-smi lists. Raises UserError if there are some that cannot be used."""
    if not shutil.which(QUERY[0]):
        return []
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UserError(f"nvidia-smi does not answer: check the driver; {HIDE}") from None
    if answer.returncode:
        said = (answer.stdout or answer.stderr).strip()
        raise UserError(f"nvidia-smi failed: {said}: check the driver; {HIDE}")
    rows = [line.split(", ") for line in answer.stdout.splitlines() if line]
    return [InstalledGpu(int(index), uuid) for index, uuid in rows]


def visible_gpus() -> list[InstalledGpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order. Raises UserError as `listed_gpus`, or if it names
    an unknown one."""
    allowed = visible_devices()
    if allowed == "":
        return []
    listed = listed_gpus()
    if allowed is None or not listed:
        return listed
    names = {name: gpu for gpu in listed for name in (str(gpu.number), gpu.uuid)}
    chosen = [name.strip() for name in allowed.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES has {unknown[0]}, which nvidia-smi does not list: use its indices or UUIDs"
        )
    return [names[name] for name in chosen]


def installed_gpus() -> list[int]:
    """The indices of `visible_gpus`."""
    return [gpu.number for gpu in visible_gpus()]


def take_gpu(config: RunConfig, role: Role, rank: int) -> None:
    """Leaves this process the GPU that the config names for this rank, or its own of those that it sees,
    before torch looks for GPUs. Raises ConfigError if torchrun's layout is another one, UserError if it sees
    too few."""
    place, section = torchrun_place(), config.roles.get(role)
    if config.placement.use_visible_gpus and section and section.device == "cuda":
        gpu = _gpu_of_rank(role, rank, place[1] if place else rank)
        set_environment(rank_environment(config, role, [gpu]))
        return
    gpus = config.placement.gpus.roles.get(role)
    if gpus and place:
        check_torchrun(gpus, rank, *place)
    set_environment(trainer_environment(config, role, rank))


def resolve_here(config: RunConfig) -> RunConfig:
    """`config` as it runs from this machine; see `resolve`. Raises UserError, ConfigError."""
    there = installed_gpus() if may_use_gpus(config) else []
    return resolve(config, there, socket.gethostname())


def resolve_for_others(config: RunConfig) -> RunConfig:
    """As `resolve_here`; but a machine without GPUs resolves a config that asks for some as a machine that
    has enough of them would."""
    if asks_for_gpus(config) and not installed_gpus():
        return resolve_for_gpus(config, None)
    return resolve_here(config)


def _gpu_of_rank(role: Role, rank: int, local_rank: int) -> int:
    gpus = installed_gpus()
    if local_rank >= len(gpus):
        raise UserError(
            f"rank {rank} needs GPU number {local_rank + 1} of those that it sees, but it sees {len(gpus)} "
            "(nvidia-smi, CUDA_VISIBLE_DEVICES): give the container one for each of its ranks, or lower "
            f"{section_name(role)}.parallel"
        )
    return gpus[local_rank]
