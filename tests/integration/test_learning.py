"""The commands of the README, from their data to the curves that they leave."""

from pathlib import Path

import pytest

from tests.command import ROOT, atoll, results

pytestmark = [pytest.mark.long, pytest.mark.rerun_once]


def mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def test_the_quickstart_learns_sums(tmp_path: Path) -> None:
    atoll(tmp_path, "quickstart", "--seed", "0")
    (run,) = (tmp_path / "runs").glob("arithmetic-seed0-*")
    summary, (start, *steps) = results(run)
    assert 0.2 <= start["warmup/score/mean"] <= 0.4
    assert 10 <= summary["steps"] < 1500
    assert summary["reward_last"] > 0.70
    assert summary["reward_last"] == pytest.approx(mean(steps[-10:], "critic/score/mean"))
    assert (
        summary["validation_last"]["val/arithmetic/avg@1"]
        > summary["validation_first"]["val/arithmetic/avg@1"]
    )
    assert max(row["rollout_corr/logprob_diff_max"] for row in steps) < 1e-3
    assert Path(tmp_path / summary["checkpoint"] / "coordinator.json").exists()


def test_gsm8k_trains_on_the_rewards_of_its_graders(tmp_path: Path) -> None:
    """Two steps after a short warm-up: what the whole example learns is in docs/benchmarks.md."""
    atoll(tmp_path, "data", "gsm8k")
    settings = {"run.steps": 2, "warmup.steps": 5, "warmup.rows_per_step": 4}
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    atoll(tmp_path, "run", ROOT / "examples" / "gsm8k.toml", *overrides)
    summary, (start, *steps) = results(tmp_path / "runs" / "gsm8k")
    assert summary["steps"] == 2
    assert {"val/test/avg@1", "val/test/pass@1"} <= start.keys() & steps[-1].keys()
    for row in steps:
        components = row["reward/gsm8k/mean"] + 0.2 * row["reward/gsm8k_format/mean"]
        assert row["critic/score/mean"] == pytest.approx(components)
        assert row["rollout_corr/logprob_diff_max"] < 1e-3
