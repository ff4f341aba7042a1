"""Three steps of examples/agents.toml; that its reward rises is in tests/gateway/learning_run.py."""

from pathlib import Path

import pytest

from tests.command import results
from tests.gateway.learning_run import train


def test_an_agent_with_a_tool_trains(tmp_path: Path) -> None:
    run = train(tmp_path, "run.steps=3", "warmup.steps=5", "coordinator.prompts_per_step=2")
    summary, (_, *steps) = results(run)
    assert summary["steps"] == 3
    for row in steps:
        assert row["rollout_corr/logprob_diff_max"] < 1e-3
        assert 0 <= row["critic/score/mean"] <= 1
        assert row["critic/score/mean"] == pytest.approx(row["reward/agent/mean"])
