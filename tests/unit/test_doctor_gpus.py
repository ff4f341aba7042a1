"""What `atoll doctor` says of GPUs, by an nvidia-smi and interpreters that answer as on such a machine."""

import json
import os
from pathlib import Path

import pytest

from atoll.cli import doctor_gpus
from atoll.cli.doctor_gpus import GIB, FindingState

TWO_GPUS = (
    "0, NVIDIA H100 80GB HBM3, 580.95.05, 81559, 81080\n1, NVIDIA H100 80GB HBM3, 580.95.05, 81559, 9216"
)
TOPOLOGY = """ \tGPU0\tGPU1\t
 GPU0\tX\tOK\t
 GPU1\tNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""
FOUND = {"torch": "2.14.1", "cuda": "13.0", "devices": 2, "nccl": "2.30.7", "cupy": "14.2.0"}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def answering(path: Path, **found: str | int) -> Path:
    """An interpreter that finds this."""
    return script(path, f"echo '{json.dumps(FOUND | found)}'")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "topology").write_text(TOPOLOGY)
    script(
        tmp_path / "nvidia-smi",
        f'case $1 in topo) cat "{tmp_path}/topology";; *) printf "{TWO_GPUS}\\n";; esac',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_a_machine_with_gpus(machine: Path) -> None:
    pythons = {
        "trainer": answering(machine / "python-t"),
        "rollout": answering(machine / "python-r", nccl="2.29.7"),
    }
    found = {finding.what: finding for finding in doctor_gpus.gpus(pythons)}
    assert found["gpu 0"].found == "NVIDIA H100 80GB HBM3, 79.2 of 79.6 GiB free"
    assert found["gpu 0"].state is FindingState.OK
    assert found["gpu 1"].state is FindingState.WARNING  # somebody else is there
    assert found["torch, trainer"].found == "2.14.1 for CUDA 13.0, driver 580.95.05, 2 devices"
    assert found["nccl"].found == "trainer 2.30.7, rollout 2.29.7"
    assert found["nccl"].state is FindingState.MISSING
    assert "same torch in both" in found["nccl"].advice
    assert found["peer access"].found == "not GPU1-GPU0"


def test_a_driver_that_fails_is_not_a_cpu(machine: Path) -> None:
    script(machine / "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    (finding,) = doctor_gpus.gpus({"trainer": answering(machine / "python")})
    assert (finding.found, finding.state) == ("NVIDIA-SMI has failed", FindingState.MISSING)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (finding,) = doctor_gpus.gpus({})
    assert (finding.found, finding.state) == ("none; using the CPU set-up", FindingState.OK)


@pytest.mark.parametrize(
    ("found", "driver", "state", "advice"),
    [
        ({}, "580.95.05", FindingState.OK, ""),
        ({"devices": 0}, "550.54.14", FindingState.MISSING, "CUDA 13.0 needs driver 580 or later: update it"),
        ({"devices": 0}, "580.95.05", FindingState.MISSING, "check the driver, CUDA_VISIBLE_DEVICES"),
        ({"cuda": "", "devices": 0}, "580.95.05", FindingState.WARNING, "it computes on the CPU"),
        ({"cupy": ""}, "580.95.05", FindingState.MISSING, "pip install cupy-cuda13x"),
    ],
)
def test_torch_has_to_see_the_gpus(
    found: dict[str, str | int], driver: str, state: FindingState, advice: str
) -> None:
    finding = doctor_gpus.cuda("trainer", FOUND | found, driver)
    assert finding.state is state
    assert advice in finding.advice


def test_an_interpreter_without_torch(machine: Path) -> None:
    python = script(machine / "python", "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    found = {finding.what: finding for finding in doctor_gpus.gpus({"trainer": python})}
    assert found["torch, trainer"].found == "ModuleNotFoundError: No module named 'torch'"
    assert found["torch, trainer"].state is FindingState.MISSING


def test_limits() -> None:
    assert doctor_gpus.shared_memory(64 << 20).state is FindingState.MISSING
    assert "--shm-size" in doctor_gpus.shared_memory(64 << 20).advice
    assert doctor_gpus.shared_memory(16 * GIB).state is FindingState.OK
    assert doctor_gpus.open_files(1024).state is FindingState.WARNING
    assert doctor_gpus.open_files(-1).found == "unlimited"
    assert doctor_gpus.locked_memory(64 << 10).state is FindingState.WARNING
    assert "memlock: -1" in doctor_gpus.locked_memory(64 << 10).advice
    assert doctor_gpus.locked_memory(-1).found == "unlimited"


def test_peers_that_all_reach_each_other() -> None:
    assert doctor_gpus.peers(TOPOLOGY.replace("NS", "OK")).found == "between all 2 GPUs"
