"""A reward service in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def start_reward_process(tmp_path: Path, **tables: object) -> tuple[subprocess.Popen[bytes], str]:
    """Starts `python -m atoll.reward` as the launcher does, with these tables of a config; returns its
    address, or "" if it ended."""
    config = {
        "run": {"name": "toy", "steps": 1},
        "model": {"path": "unused"},
        "data": {"train": [{"path": "unused.jsonl"}]},
    } | tables
    (tmp_path / "config.json").write_text(json.dumps(config))
    ready, write_end = os.pipe()
    arguments = [
        "--config",
        str(tmp_path / "config.json"),
        "--name",
        "reward-0",
        "--ready-fd",
        str(write_end),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll.reward", *arguments, "--coordinator", "127.0.0.1:1"],
        pass_fds=(write_end,),
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(write_end)
    with open(ready) as pipe:
        line = pipe.readline()  # ends when the process does
    return process, json.loads(line)["address"] if line else ""
