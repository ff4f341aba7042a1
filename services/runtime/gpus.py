"""The GPUs of this machine, by nvidia-smi, and those of this process. No torch: asking it starts CUDA."""

import shutil
import socket
import subprocess
from dataclasses import dataclass

from atoll.config.load import set_environment, torchrun_place, visible_devices
from atoll.config.placement import check_torchrun, trainer_environment
from atoll.config.resolve import may_use_gpus, resolve
from atoll.config.schema import Role, RunConfig
from atoll.runtime.errors import UserError

QUERY = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
HIDE = "to compute on the CPU, set CUDA_VISIBLE_DEVICES to nothing"


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    index: int
    uuid: str
    memory: int  # bytes


def installed_gpus() -> list[InstalledGpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order. Raises UserError if there are some that cannot be
    used."""
    allowed = visible_devices()
    if allowed == "" or not shutil.which(QUERY[0]):
        return []
    try:
        answer = subprocess.run(QUERY, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UserError(f"nvidia-smi does not answer: check the driver; {HIDE}") from None
    if answer.returncode:
        said = (answer.stdout or answer.stderr).strip()
        raise UserError(f"nvidia-smi failed: {said}: check the driver; {HIDE}")
    rows = [line.split(", ") for line in answer.stdout.splitlines() if line]
    gpus = [InstalledGpu(int(index), uuid, int(mib) << 20) for index, uuid, mib in rows]
    if allowed is None:
        return gpus
    names = {name: gpu for gpu in gpus for name in (str(gpu.index), gpu.uuid)}
    chosen = [name.strip() for name in allowed.split(",")]
    if unknown := [name for name in chosen if name not in names]:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES has {unknown[0]}, which nvidia-smi does not list: use its indices or UUIDs"
        )
    return [names[name] for name in chosen]


def take_gpu(config: RunConfig, role: Role, rank: int) -> None:
    """Leaves this process the GPU that the config names for this rank, before torch looks for GPUs. Raises
    ConfigError if torchrun's layout is another one."""
    gpus = config.placement.gpus.roles.get(role)
    if gpus and (place := torchrun_place()):
        check_torchrun(gpus, rank, *place)
    set_environment(trainer_environment(config, role, rank))


def resolve_here(config: RunConfig) -> RunConfig:
    """`config` as it runs from this machine; see `resolve`. Raises UserError, ConfigError."""
    there = [gpu.index for gpu in installed_gpus()] if may_use_gpus(config) else []
    return resolve(config, there, socket.gethostname())
