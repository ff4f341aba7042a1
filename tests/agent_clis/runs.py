"""Coding agents as commands of whole runs, by `make test-agent-clis`: each calls a tool and answers."""

import json
import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from atoll.cli.launch.launcher import launch
from tests.builders import run_config
from tests.gateway.agent_runs import ROOT, config, engine_log, write_model
from tests.gateway.exactness import (
    TOLERANCE,
    check_log,
    consumed,
    leaves,
    path_to,
    trainer_difference,
    until_ended,
)

CLIS = ROOT / ".venv-agent-clis"
COMMAND, PRINTED = "echo sum-$((40 + 6))", "sum-46"
CALLS: Mapping[str, tuple[str, dict[str, Any]]] = {  # of each one's shell tool
    "claude": ("Bash", {"command": COMMAND, "description": "Adds"}),
    "codex": ("exec_command", {"cmd": COMMAND}),
    "qwen": ("run_shell_command", {"command": COMMAND, "description": "Adds", "is_background": False}),
    "opencode": ("bash", {"command": COMMAND, "description": "Adds"}),
}
FILES = {".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}}'}
SAMPLES = 2
MAX_LENGTH = 32768  # tokens: their system prompts and tools have up to 18,000
FAMILY = "qwen3-instruct-2507"


def agent(name: str) -> dict[str, Any]:
    """Its table, as docs/agents.md has it."""
    agents = tomllib.loads((Path(__file__).parent / "agents.toml").read_text())["agents"]
    (table,) = (table for table in agents if table["name"] == name)
    path = f"{CLIS / name / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    table["command"].setdefault("env", {})["PATH"] = path
    return dict(table)


def script(name: str) -> list[str]:
    tool, arguments = CALLS[name]
    call = json.dumps({"name": tool, "arguments": arguments})
    return [f"I add.\n<tool_call>\n{call}\n</tool_call>", "The sum is 46."]


@pytest.mark.parametrize("name", CALLS)
def test_its_sessions_are_trained_on(tmp_path: Path, name: str) -> None:
    if name in os.environ.get("SKIP_CLIS", "").split():
        pytest.skip("SKIP_CLIS names it")
    row = {
        "data_source": "scripted",
        "prompt": [{"role": "user", "content": f"40 + 6?\nSCRIPT: {json.dumps(script(name))}"}],
        "reward_model": {"style": "rule", "ground_truth": "46"},
        "extra_info": {"index": 0, "files": json.dumps(FILES)},
    }
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    tree = config(
        tmp_path,
        FAMILY,
        "",
        run={"steps": 1},
        model={"path": write_model(tmp_path / "real", FAMILY, tiny_tokenizer=False)},
        data={"train": [{"path": tmp_path / "rows.jsonl", "agent": name}]},
        coordinator={"prompts_per_step": 1, "max_sample_attempts": 1, "max_dropped_share": 0.0},
        rollout={"local": {"slots": 4, "max_length": MAX_LENGTH}},
        trainer={"optimizer": {"learning_rate": 0.0}},
        agents=[agent(name)],
    )
    run = run_config(tree)
    began = time.monotonic()
    assert launch(run, until_ended, resume=False)
    seconds = time.monotonic() - began
    samples = consumed(run)
    assert len(samples) == SAMPLES
    check_log(engine_log(tmp_path), samples)
    assert trainer_difference(run) < TOLERANCE
    tokenizer = Tokenizer.from_file(str(run.model.path / "tokenizer.json"))
    for sample in samples:
        assert PRINTED in "".join(tokenizer.decode(node.token_ids.tolist()) for node in sample.nodes)
    sample = samples[0]
    paths = [path_to(sample, leaf) for leaf in leaves(sample)]
    longest = max(sum(len(sample.nodes[index].token_ids) for index in path) for path in paths)
    print(f"{name}: {len(samples)} sessions trained, of {len(sample.turns)} turns on {len(paths)} branches")
    print(f"{name}: {longest} tokens on the longest branch, {seconds:.0f} s for the run")
