"""README's installs have a solution on Linux, x86-64 and aarch64: uv resolves them without downloading."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PYPROJECT = Path("pyproject.toml")
COMPILED = {"flash"}  # during their installation, with the torch that is there: README has the command
ENVIRONMENTS = {"rollout": ("rollout",), "trainer": ("trainer", "dev")}


def resolve(platform: str, *extras: str) -> dict[str, str]:
    """The versions that pip would install, by name."""
    command = [sys.executable, "-m", "uv", "pip", "compile", str(PYPROJECT), "--quiet", "--no-header"]
    command += ["--python-version", "3.11", "--python-platform", f"{platform}-manylinux_2_34"]
    command += [f"--extra={extra}" for extra in extras]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return dict(re.findall(r"^([\w.-]+)==([\w.+-]+)", answer.stdout, re.MULTILINE))


@pytest.mark.long
@pytest.mark.parametrize("platform", ["x86_64", "aarch64"])
def test_every_extra_resolves_and_both_gpu_environments_get_one_nccl(platform: str) -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"].keys() - COMPILED
    found = {name: resolve(platform, *those) for name, those in ENVIRONMENTS.items()}
    found["cpu"] = resolve(platform, *(extras - {"rollout", "trainer"}))
    assert found["cpu"]["torch"] == "2.13.0"
    trainer, rollout = found["trainer"], found["rollout"]
    for package in ("torch", "nvidia-nccl-cu13", "cupy-cuda13x"):  # NCCL connects only equal versions
        assert trainer[package] == rollout[package], package
    assert rollout["sglang"] == "0.5.23"
    assert trainer["megatron-core"] == "0.16.1"
    assert "flash-attn" not in trainer
