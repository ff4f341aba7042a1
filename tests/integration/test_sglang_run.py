"""A run whose replica is the real SGLang, in its own environment: the example, for a few steps."""

from pathlib import Path

import pytest

from tests.command import ROOT, atoll, results

pytestmark = [pytest.mark.long, pytest.mark.rerun_once]


def test_a_run_trains_on_what_sglang_generates(tmp_path: Path) -> None:
    """The trainer's log-probabilities of every step's tokens equal SGLang's, so each push came through."""
    atoll(tmp_path, "data", "arithmetic")
    settings = {
        "run.steps": 5,
        "warmup": "{}",
        "rollout.python": ROOT / ".venv-sglang" / "bin" / "python",
        "algorithm.entropy_coef": 1.0,  # the random model gets no reward to learn from
        "trainer.optimizer.learning_rate": 1e-3,
        "weights.canary_every": 1,
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    atoll(tmp_path, "run", ROOT / "examples" / "arithmetic_sglang.toml", *overrides)
    summary, (_, *steps) = results(tmp_path / "runs" / "arithmetic_sglang")
    assert summary["steps"] == len(steps) == 5
    assert steps[-1]["actor/entropy"] > steps[0]["actor/entropy"] + 0.01
    for row in steps:
        assert row["rollout_corr/logprob_diff_max"] < 1e-4
        assert row["weights/num_bytes"] > 1e6  # of fp32, a million parameters
        assert row["weights/canary_diff/max"] < 1e-4
        assert row["staleness/max"] == 0
