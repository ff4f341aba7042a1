"""A run whose replica is the real SGLang, in its own environment: the example, for a few steps."""

from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT, atoll, results

pytestmark = [pytest.mark.long, pytest.mark.rerun_once]


def run_arithmetic(folder: Path, settings: dict[str, object]) -> list[dict[str, Any]]:
    """The metrics of each training step."""
    atoll(folder, "data", "arithmetic")
    settings = {
        "warmup": "{}",
        "rollout.python": ROOT / ".venv-sglang" / "bin" / "python",
        "algorithm.entropy_coef": 1.0,  # the random model gets no reward to learn from
        "trainer.optimizer.learning_rate": 1e-3,
        "weights.canary_every": 1,
    } | settings
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    atoll(folder, "run", ROOT / "examples" / "arithmetic_sglang.toml", *overrides)
    summary, (_, *steps) = results(folder / "runs" / "arithmetic_sglang")
    assert summary["steps"] == len(steps)
    return steps


def test_a_colocated_run_trains_on_what_sglang_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's memory is released and resumed by calls that a stand-in records: how much that frees is not
    measured. Every version is received into weights that count as lost."""
    calls = tmp_path / "memory_calls"
    monkeypatch.setenv("ATOLL_TEST_MEMORY_CALLS", str(calls))
    settings = {
        "run.steps": 3,
        "placement.mode": "colocated",
        "trainer.offload": "true",
        "rollout.sglang.enable_memory_saver": "true",  # the default only on a GPU, where there is a real one
    }
    steps = run_arithmetic(tmp_path, settings)
    assert len(steps) == 3
    for row in steps:
        assert row["rollout_corr/logprob_diff_max"] < 1e-4
        assert row["weights/canary_diff/max"] < 1e-4
    assert steps[-1]["actor/entropy"] > steps[0]["actor/entropy"] + 0.01
    asleep = ["pause kv_cache", "pause weights", "pause cuda_graph"]
    awake = ["resume weights", "resume cuda_graph", "resume kv_cache"]
    assert calls.read_text().splitlines() == 4 * (asleep + awake)  # before the first step, and in each


def test_a_run_trains_on_what_sglang_generates(tmp_path: Path) -> None:
    """The trainer's log-probabilities of every step's tokens equal SGLang's, so each push came through."""
    steps = run_arithmetic(tmp_path, {"run.steps": 5})
    assert len(steps) == 5
    assert steps[-1]["actor/entropy"] > steps[0]["actor/entropy"] + 0.01
    for row in steps:
        assert row["rollout_corr/logprob_diff_max"] < 1e-4
        assert row["weights/num_bytes"] > 1e6  # of fp32, a million parameters
        assert row["weights/canary_diff/max"] < 1e-4
        assert row["staleness/max"] == 0
