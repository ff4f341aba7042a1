"""A fake nvidia-smi, for machines with any number of GPUs."""

import os
import shlex
from pathlib import Path

import pytest


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int, *, fails: str = "") -> None:
    """First on PATH. `fails`: what it says instead of listing GPUs."""
    rows = "\n".join(f"{index}, GPU-{index:08d}" for index in range(count))
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\necho {shlex.quote(fails or rows)}\nexit {9 if fails else 0}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
