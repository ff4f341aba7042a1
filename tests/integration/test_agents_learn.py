"""Steps of the examples with agents, and one whose reward rises; benchmarks/agents.py has whole runs."""

import shutil
import socket
from pathlib import Path

import pytest

from benchmarks.agents import server
from tests.command import ROOT, atoll, results
from tests.gateway.learning_run import train

MIN_RISE = 0.1  # of the mean reward, last three steps less first three; 0.36 was seen


def test_an_agent_with_a_tool_trains(tmp_path: Path) -> None:
    run = train(tmp_path, "run.steps=3", "warmup.steps=5", "coordinator.prompts_per_step=2")
    summary, (_, *steps) = results(run)
    assert summary["steps"] == 3
    for row in steps:
        assert row["rollout_corr/logprob_diff_max"] < 1e-3
        assert 0 <= row["critic/score/mean"] <= 1
        assert row["critic/score/mean"] == pytest.approx(row["reward/agent/mean"])


def test_a_coding_agent_trains(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    for name in ("coding.toml", "coding.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path / "examples")
    atoll(tmp_path, "data", "coding")
    cut = ("run.steps=2", "warmup.steps=2", "coordinator.prompts_per_step=2", "validation.at_start=false")
    atoll(tmp_path, "run", "examples/coding.toml", *(word for each in cut for word in ("--set", each)))
    summary, (_, *steps) = results(tmp_path / "runs" / "coding")
    assert summary["steps"] == 2
    for row in steps:
        assert row["rollout_corr/logprob_diff_max"] < 1e-3
        assert row["critic/score/mean"] == pytest.approx(row["reward/code/mean"])


@pytest.mark.long
def test_the_reward_of_an_agent_with_an_mcp_server_rises(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    atoll(tmp_path, "data", "tools")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    with server("calculator", port):
        url = f"http://127.0.0.1:{port}/mcp"
        servers = f'[{{kind="tool", name="calculator", url="{url}", protocol="mcp", concurrency=64}}]'
        cut = ("run.steps=12", "warmup.steps=200", "validation.sets=[]", "validation.every=0")
        settings = (f"servers={servers}", *cut)
        atoll(tmp_path, "run", "examples/calculator.toml", *(w for each in settings for w in ("--set", each)))
    _, (_, *steps) = results(tmp_path / "runs" / "calculator")
    scores = [row["critic/score/mean"] for row in steps]
    assert sum(scores[-3:]) / 3 - sum(scores[:3]) / 3 > MIN_RISE
