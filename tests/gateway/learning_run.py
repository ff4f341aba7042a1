"""Trains examples/agents.toml to its end: minutes, so `make test-gateway` alone runs it."""

import shutil
from pathlib import Path

from tests.command import ROOT, atoll, results

MIN_RISE = 0.15  # of the mean reward, last ten steps less first ten; 0.38 was seen


def train(folder: Path, *overrides: str) -> Path:
    """The run's folder."""
    (folder / "examples").mkdir()
    for name in ("agents.toml", "agents.py"):
        shutil.copy(ROOT / "examples" / name, folder / "examples")
    atoll(folder, "data", "tools")
    atoll(folder, "run", "examples/agents.toml", *(word for each in overrides for word in ("--set", each)))
    return folder / "runs" / "agents"


def test_the_reward_of_an_agent_with_a_tool_rises(tmp_path: Path) -> None:
    _, (_, *steps) = results(train(tmp_path))
    scores = [row["critic/score/mean"] for row in steps]
    assert sum(scores[-10:]) / 10 - sum(scores[:10]) / 10 > MIN_RISE
    assert max(row["rollout_corr/logprob_diff_max"] for row in steps) < 1e-3
