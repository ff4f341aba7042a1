"""Whole runs with agents, every service a process of its own; what the policy says is scripted."""

import json
import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.gateway.model_folders import make_folder

ROOT = Path(__file__).parents[2]


def write_model(folder: Path, family: str, *, tiny_tokenizer: bool = True, **shape: int) -> Path:
    """A tiny model of the family's chat format, with random weights; `shape` as config.json has it."""
    make_folder(folder, family, tiny=tiny_tokenizer)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **shape)).save_pretrained(folder)
    return folder


def scripted_python(folder: Path) -> Path:
    """An interpreter for `rollout.python` that starts the scripted replica."""
    path = folder / "scripted_python"
    path.write_text(
        f"#!/bin/sh\nshift 2\nexport PYTHONPATH={ROOT} SCRIPTED_LOG={folder / 'engine.jsonl'}\n"
        f'exec {sys.executable} -m tests.gateway.scripted_rollout "$@"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def write_rows(
    path: Path,
    scripts: Sequence[Sequence[str]],
    question: str = "12+34=",
    truth: object = "46",
    **extra: object,
) -> None:
    """A row for each script: what the policy says, turn by turn."""
    rows = [
        {
            "data_source": "scripted",
            "prompt": [{"role": "user", "content": f"{question}\nSCRIPT: {json.dumps(script)}"}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": number, **extra},
        }
        for number, script in enumerate(scripts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, family: str, agent: str, **tables: Any) -> dict[str, Any]:
    """Of a run whose agent is a function of tests/gateway/agents.py; its rows are in rows.jsonl."""
    tree: dict[str, Any] = {
        "run": {"name": "agents", "dir": folder / "runs", "steps": 3},
        "model": {"path": write_model(folder / "model", family)},
        "data": {"train": [{"path": folder / "rows.jsonl", "agent": "tested"}]},
        "coordinator": {"prompts_per_step": 2, "samples_per_prompt": 2, "dump": True},
        "rollout": {
            "python": scripted_python(folder),
            "local": {"slots": 16, "max_length": 4096},
            "sampling": {"max_new_tokens": 512},
        },
        "agents": [{"name": "tested", "function": f"{ROOT}/tests/gateway/agents.py:{agent}"}],
        "trainer": {"optimizer": {"learning_rate": 1e-4}},
    }
    for name, table in tables.items():
        tree[name] = {**tree.get(name, {}), **table} if isinstance(table, dict) else table
    return tree


def engine_log(folder: Path) -> list[dict[str, Any]]:
    """Turns that the engine finished."""
    path = folder / "engine.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if os.path.exists(path) else []
