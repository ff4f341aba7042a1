"""The GPUs of this machine, by nvidia-smi, and those of this process. No torch: asking it starts CUDA."""

import shutil
import socket
import subprocess

from atoll.config.load import set_environment, torchrun_place, visible_devices
from atoll.config.placement import check_torchrun, trainer_environment
from atoll.config.resolve import asks_for_gpus, may_use_gpus, resolve, resolve_for_gpus
from atoll.config.schema import Role, RunConfig
from atoll.runtime.errors import UserError

QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
HIDE = "to compute on the CPU, set CUDA_VISIBLE_DEVICES to nothing"


def installed_gpus() -> list[int]:
    """nvidia-smi's indices of those that CUDA_VISIBLE_DEVICES leaves, in its order. Raises UserError if there
    are some that cannot be used."""
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
    if allowed is None:
        return [int(index) for index, _ in rows]
    names = {name: int(index) for index, uuid in rows for name in (index, uuid)}
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
    there = installed_gpus() if may_use_gpus(config) else []
    return resolve(config, there, socket.gethostname())


def resolve_for_others(config: RunConfig) -> RunConfig:
    """As `resolve_here`; but a machine without GPUs resolves a config that asks for some as a machine that
    has enough of them would."""
    if asks_for_gpus(config) and not installed_gpus():
        return resolve_for_gpus(config, None)
    return resolve_here(config)
