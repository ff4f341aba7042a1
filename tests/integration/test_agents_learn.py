"""Steps of the examples with agents; that a reward rises is in tests/gateway/learning_run.py."""

import shutil
from pathlib import Path

import pytest

from tests.command import ROOT, atoll, results
from tests.gateway.learning_run import train


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
