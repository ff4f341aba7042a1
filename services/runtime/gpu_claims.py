"""GPUs that replicas claim for themselves, where nobody can give each its own: Compose shows all replicas
of a service the same GPUs.

A claim is an exclusive flock of one file per GPU, named by its UUID, in a folder that all replicas share. It
belongs to the process that took it: the kernel ends it with the process, even after SIGKILL. Child processes
do not hold it, since Python closes the descriptor when they are started. An engine's processes are killed
with their service, and a claim that they held could only be passed on to the first of them.
"""

import fcntl
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from atoll.config.placement import NO_GPU, visible_environment
from atoll.config.schema import RunConfig
from atoll.runtime.errors import UserError
from atoll.runtime.gpus import InstalledGpu, listed_gpus, visible_gpus

_log = logging.getLogger(__name__)

POLL_S: Final = 0.5  # between attempts: no lock can be awaited together with others


def claimed_environment(config: RunConfig, folder: Path, name: str) -> Mapping[str, str]:
    """As `replica_environment`, for a replica that claims its GPUs; on a CPU it claims none. With `cuda_ipc`
    it also sees the GPUs that CUDA_VISIBLE_DEVICES hides from it: the actor's. Raises UserError as
    `claim_gpus`."""
    if config.rollout.device != "cuda":
        return NO_GPU
    seen = visible_gpus()
    gpus = claim_gpus(folder, seen, config.rollout.tp_size, name, config.coordinator.start_timeout_s)
    if config.weights.transport == "cuda_ipc":
        gpus += [gpu for gpu in listed_gpus() if gpu not in seen]
    return visible_environment(gpu.number for gpu in gpus)


def claim_gpus(
    folder: Path, seen: Sequence[InstalledGpu], count: int, name: str, timeout_s: float
) -> list[InstalledGpu]:
    """The first `count` of `seen` that nobody has claimed in `folder`, for as long as this process lives.

    Waits up to `timeout_s` until there are enough, and holds none while it waits: a replica that is being
    replaced frees its GPUs a moment later. Raises UserError if there never are, or if the folder is not
    usable.
    """
    if len(seen) < count:
        raise UserError(
            f"a replica needs {count} GPUs (rollout.sglang.tp_size), but it sees {len(seen)} (nvidia-smi, "
            "CUDA_VISIBLE_DEVICES): give the rollout service more GPUs, or lower tp_size"
        )
    deadline = time.monotonic() + timeout_s
    said = ""
    while True:
        try:
            with _turn(folder) as is_mine:
                claimed, taken = _attempt(folder, seen, count, name) if is_mine else ([], {})
        except OSError as error:
            raise UserError(
                f"cannot claim a GPU in {folder}: {error.strerror}: mount a folder there that all replicas "
                f"share and user {os.getuid()} can write to"
            ) from None
        if claimed:
            _log.info("claimed GPU %s in %s", ", ".join(str(gpu.number) for gpu in claimed), folder)
            return claimed
        if taken:
            owners = ", ".join(f"{number} by {owner}" for number, owner in taken.items())
            free = len(seen) - len(taken)
            problem = f"{name} needs {count} GPUs, but {free} of {len(seen)} are free (taken: {owners})"
            if problem != said:
                _log.info("%s; it waits for them", problem)
                said = problem
        if time.monotonic() >= deadline:
            raise UserError(
                f"after {timeout_s:g} s (coordinator.start_timeout_s) {said or f'{folder} is still locked'}: "
                "start fewer replicas, or give the rollout service more GPUs"
            )
        time.sleep(POLL_S)


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Whether it is this process's turn: one attempt at a time, so that two never hold half each."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _attempt(
    folder: Path, seen: Sequence[InstalledGpu], count: int, name: str
) -> tuple[list[InstalledGpu], dict[int, str]]:
    """`count` GPUs, whose descriptors stay open, or none and who has taken which."""
    held: dict[InstalledGpu, int] = {}
    taken: dict[int, str] = {}
    for gpu in seen:
        descriptor = os.open(folder / f"{gpu.uuid}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        if _lock(descriptor):
            held[gpu] = descriptor
        else:
            taken[gpu.number] = os.pread(descriptor, 256, 0).decode()
            os.close(descriptor)
        if len(held) == count:
            for descriptor in held.values():
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, name.encode(), 0)  # for the messages of others
            return list(held), {}
    for descriptor in held.values():
        os.close(descriptor)
    return [], taken


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
