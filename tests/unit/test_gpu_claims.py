"""Which GPUs a replica claims, what it sees of them, and what it says if there are too few. Another replica
is a lock that the test holds itself: flock excludes every other opening of a file."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.runtime.errors import UserError
from atoll.runtime.gpu_claims import claim_gpus, claimed_environment
from atoll.runtime.gpus import InstalledGpu
from tests import nvidia_smi
from tests.builders import run_config

GPUS = [InstalledGpu(number, f"GPU-{number:08d}") for number in range(4)]


@contextmanager
def locked(path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> Iterator[int]:
    """The descriptor, which frees the lock when it is closed; fails if another one holds it."""
    descriptor = os.open(path, flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield descriptor
    finally:
        os.close(descriptor)


def test_replicas_claim_different_gpus_in_order_and_say_who_has_them(tmp_path: Path) -> None:
    assert claim_gpus(tmp_path, GPUS[:2], 1, "rollout-3f2a91", 0) == [GPUS[0]]
    assert claim_gpus(tmp_path, GPUS[:2], 1, "rollout-b", 0) == [GPUS[1]]
    with pytest.raises(UserError) as refusal:
        claim_gpus(tmp_path, GPUS[:2], 1, "rollout-c", 0)
    assert str(refusal.value) == (
        "after 0 s (coordinator.start_timeout_s) rollout-c needs 1 GPUs, but 0 of 2 are free (taken: 0 by "
        "rollout-3f2a91, 1 by rollout-b): start fewer replicas, or give the rollout service more GPUs"
    )


def test_gpus_are_claimed_together_or_not_at_all(tmp_path: Path) -> None:
    with locked(tmp_path / "GPU-00000001.lock"):
        assert claim_gpus(tmp_path, GPUS, 2, "rollout-a", 0) == [GPUS[0], GPUS[2]]
    with pytest.raises(UserError, match=r"needs 3 GPUs, but 2 of 4 are free \(taken: 0 by rollout-a, 2 by "):
        claim_gpus(tmp_path, GPUS, 3, "rollout-b", 0)
    with locked(tmp_path / "GPU-00000001.lock"), locked(tmp_path / "GPU-00000003.lock"):
        pass  # it holds none of those that were free


def test_a_replica_waits_for_a_gpu_that_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked(tmp_path / "GPU-00000000.lock") as descriptor:
        pauses = list[float]()

        def free_it(seconds: float) -> None:
            pauses.append(seconds)
            fcntl.flock(descriptor, fcntl.LOCK_UN)

        monkeypatch.setattr(time, "sleep", free_it)
        assert claim_gpus(tmp_path, GPUS[:1], 1, "rollout-b", 60) == [GPUS[0]]
        assert pauses == [0.5]


def test_one_replica_claims_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path, os.O_RDONLY), pytest.raises(UserError, match=f"{tmp_path} is still locked"):
        claim_gpus(tmp_path, GPUS, 1, "rollout-b", 0)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_hold_claims_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cannot claim a GPU in .*absent: No such file or directory: mount a"
    ):
        claim_gpus(tmp_path / "absent", GPUS, 1, "rollout-a", 0)


def a_run(**sections: Any) -> RunConfig:
    tree = {"placement": {"use_visible_gpus": True}, "coordinator": {"start_timeout_s": 0.01}}
    tree |= {"rollout": {"engine": "sglang", "sglang": {"tp_size": 2}}} | sections
    return run_config(tree)


def test_a_replica_sees_the_gpus_that_it_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, 6)
    first = claimed_environment(a_run(), tmp_path, "rollout-a")
    assert first == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0,1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-00000003,1")
    assert claimed_environment(a_run(), tmp_path, "rollout-b")["CUDA_VISIBLE_DEVICES"] == "5,3"
    with pytest.raises(
        UserError, match=r"but 0 of 3 are free \(taken: 5 by rollout-b, 3 by rollout-b, 1 by rollout-a\)"
    ):
        claimed_environment(a_run(), tmp_path, "rollout-c")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    with pytest.raises(
        UserError, match=r"needs 2 GPUs \(rollout.sglang.tp_size\), but it sees 1 \(nvidia-smi"
    ):
        claimed_environment(a_run(), tmp_path, "rollout-d")


def test_with_cuda_ipc_a_replica_also_sees_the_gpus_outside_of_its_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    config = a_run(weights={"transport": "cuda_ipc"}, rollout={"engine": "sglang"})
    assert claimed_environment(config, tmp_path, "rollout-a")["CUDA_VISIBLE_DEVICES"] == "2,0,1"


def test_on_a_cpu_nothing_is_claimed(tmp_path: Path) -> None:
    config = resolve(run_config(), ())
    assert claimed_environment(config, tmp_path / "absent", "rollout-a") == {"CUDA_VISIBLE_DEVICES": ""}
