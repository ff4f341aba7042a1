"""Claims between processes: a claim ends with its process, even by SIGKILL, and not with its children."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.config.load import write_resolved
from tests import nvidia_smi
from tests.builders import run_config

# A replica up to its engine: it claims a GPU and starts a process that outlives it
REPLICA = """
import logging, subprocess, sys
from pathlib import Path
from atoll.config.load import read_resolved
from atoll.runtime.gpu_claims import claimed_environment
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
folder, name = Path(sys.argv[1]), sys.argv[2]
claimed_environment(read_resolved(folder / "config.json"), folder, name)
subprocess.run(["cat"])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of claims, with the config of replicas on two GPUs each."""
    nvidia_smi.install(monkeypatch, tmp_path, 2)
    tree = {"rollout": {"engine": "sglang", "sglang": {"tp_size": 2}}}
    write_resolved(run_config(tree, placement={"use_visible_gpus": True}), tmp_path / "config.json")
    return tmp_path


def replica(folder: Path, name: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", REPLICA, str(folder), name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_a_killed_replica_leaves_its_gpus_to_the_next(folder: Path) -> None:
    with replica(folder, "rollout-3f2a91") as first, replica(folder, "rollout-b7") as second:
        try:
            claimed = f"claimed GPU 0, 1 in {folder}"
            lines = {line(first): first, line(second): second}
            owner = lines.pop(claimed)
            ((waits, waiter),) = lines.items()
            name = "rollout-3f2a91" if owner is first else "rollout-b7"
            assert waits.endswith(
                f"needs 2 GPUs, but 0 of 2 are free (taken: 0 by {name}, 1 by {name}); it waits for them"
            )
            owner.kill()  # its child lives on: its standard input is open
            assert line(waiter) == claimed
        finally:
            first.kill()
            second.kill()


def test_a_replica_that_can_never_claim_enough_ends_with_the_reason(folder: Path) -> None:
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "atoll.rollout", "--config", folder / "config.json"),
            *("--name", "rollout-3f2a91", "--claim-gpus", folder),
        ],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == (
        "rollout-3f2a91: a replica needs 2 GPUs (rollout.sglang.tp_size), but it sees 1 (nvidia-smi, "
        "CUDA_VISIBLE_DEVICES): give the rollout service more GPUs, or lower tp_size"
    )
