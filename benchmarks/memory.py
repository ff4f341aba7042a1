"""Peak resident memory of a piece of work, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def resident_mib() -> float:
    return _status("VmRSS")


def peak_mib() -> float:
    """The most that this process held since it started."""
    return _status("VmHWM")


def measured_apart(module: str, *arguments: str) -> float:
    """What `python -m MODULE ARGUMENTS` prints last: MiB. On one thread."""
    answer = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(json.loads(answer.stdout.splitlines()[-1]))


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))
