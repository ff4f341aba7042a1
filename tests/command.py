"""The `atoll` command as a user runs it, and what its run leaves."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]


def atoll(folder: Path, *words: str | Path) -> None:
    """Runs the command in `folder` to its end, which leaves no process and no address there."""
    command = [Path(sys.executable).with_name("atoll"), *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200)
    assert answer.returncode == 0, answer.stderr
    left = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(folder)]
    _, alive = psutil.wait_procs(left, timeout=60)  # whose parent has ended may be ending still
    assert alive == []
    assert list(folder.rglob("coordinator.address")) == []
    assert [path for path in folder.rglob("*") if path.is_socket()] == []


def results(run: Path) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Summary, and a row per step from step 0: the one of the warm-up and the first validation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run / "summary.json").read_text())
    assert [row["step"] for row in rows] == list(range(summary["steps"] + 1))
    return summary, rows
