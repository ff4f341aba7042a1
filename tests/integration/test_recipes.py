"""Three recipes in examples/ by the real command: which processes they start, and what their metrics say.

What all of them are composed of is in tests/unit/test_recipe_parts.py.
"""

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.command import ROOT, atoll


@dataclass(frozen=True)
class Recipe:
    """What its run should come to."""

    name: str
    roles: frozenset[str] = frozenset()  # beside the actor
    kl: bool = False  # in the reward
    scores: tuple[float, float] = (0.0, 1.0)  # that graders can give
    whitened: bool = False  # advantages are, over the batch
    filtered: bool = False
    steps: int = 3
    gain: float | None = None  # of the mean score, from the first ten steps to the last ten


PPO = Recipe("ppo", frozenset({"critic", "reference"}), kl=True, whitened=True, steps=60, gain=0.1)
RECIPES = [
    PPO,
    Recipe("dapo", scores=(-0.5, 1.0), filtered=True),
    Recipe("safe_rlhf", frozenset({"critic", "cost_critic", "reference"}), kl=True, whitened=True),
]

WITHOUT_VALIDATION = ("--set", "validation.at_start=false", "--set", "validation.at_end=false")

ALWAYS = {
    "training/version",
    *(
        f"critic/{what}/{of}"
        for what in ("score", "rewards", "advantages", "returns")
        for of in ("mean", "max", "min")
    ),
    *(f"response_length/{of}" for of in ("mean", "max", "min", "clip_ratio")),
    *(f"rollout_corr/{what}" for what in ("logprob_diff_mean", "logprob_diff_max", "k3")),
    *(f"actor/{what}" for what in ("pg_loss", "ppo_kl", "entropy", "ratio", "grad_norm", "lr")),
    *(f"timing_s/{phase}" for phase in ("gen", "reward", "adv", "update_actor", "sync_weights", "step")),
}
OF_A_CRITIC = {"vf_explained_var", "vf_loss", "vf_clipfrac", "vpred_mean", "values/mean", "grad_norm", "lr"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "examples").symlink_to(ROOT / "examples")
    atoll(folder, "data", "arithmetic")
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def warm(folder: Path) -> str:
    """The model that PPO's recipe leaves after its warm-up: every fourth answer is right."""
    atoll(folder, "run", "examples/ppo.toml", *WITHOUT_VALIDATION, "--set", f"run.steps={PPO.steps}")
    return "runs/ppo/warm"


def run(folder: Path, warm: str, recipe: Recipe) -> list[dict[str, float]]:
    """Returns its metrics by step."""
    if recipe is not PPO:
        begins_warm = ("--set", f"model.path={warm}", "--set", "warmup={}")
        steps = ("--set", f"run.steps={recipe.steps}")
        atoll(folder, "run", f"examples/{recipe.name}.toml", *WITHOUT_VALIDATION, *begins_warm, *steps)
    summary = json.loads((folder / "runs" / recipe.name / "summary.json").read_text())
    assert summary["steps"] == recipe.steps
    assert (folder / summary["checkpoint"]).is_dir()
    rows = [row for row in rows_of(folder, recipe.name) if row["step"] > 0]
    assert [row["step"] for row in rows] == list(range(1, recipe.steps + 1))
    return rows


def mean_score(rows: list[dict[str, float]]) -> float:
    return sum(row["critic/score/mean"] for row in rows) / len(rows)


@pytest.mark.long
@pytest.mark.rerun_once
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_runs_with_what_it_needs_and_says_how_it_went(
    folder: Path, warm: str, recipe: Recipe
) -> None:
    rows = run(folder, warm, recipe)
    first, last = rows[0], rows[-1]
    logs = {path.stem for path in (folder / "runs" / recipe.name / "logs").iterdir()}
    assert logs == {
        "coordinator",
        "reward-0",
        "rollout-0",
        "actor-0",
        *(f"{role}-0" for role in recipe.roles),
    }
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert ALWAYS - last.keys() == set()
    for role in ("critic", "cost_critic"):
        of_it = {f"{role}/{name}" for name in OF_A_CRITIC}
        assert of_it & last.keys() == (of_it if role in recipe.roles else set())
        assert (f"timing_s/update_{role}" in last) == (role in recipe.roles)
        if role in recipe.roles:  # a new value head says 0
            assert first[f"{role}/values/min"] == first[f"{role}/values/max"] == 0
            assert last[f"{role}/values/mean"] != 0
    assert ("timing_s/ref" in last) == ("reference" in recipe.roles)
    assert ("actor/kl_coef" in last) == recipe.kl
    assert ("dynamic_sampling/num_filtered" in last) == recipe.filtered
    if recipe.kl:  # the reference is the policy that it began with
        assert abs(first["actor/reward_kl_penalty"]) < 1e-5 < abs(last["actor/reward_kl_penalty"])
    for row in rows:
        assert recipe.scores[0] <= row["critic/score/min"] <= row["critic/score/max"] <= recipe.scores[1]
        assert row["critic/rewards/mean"] <= row["critic/score/mean"] + 0.01  # a KL estimate may be negative
        assert 1 <= row["response_length/min"] <= row["response_length/max"] <= 8
        if recipe.whitened:
            assert abs(row["critic/advantages/mean"]) < 1e-4
        assert row["actor/ratio"] == pytest.approx(1, abs=0.2)
        assert abs(row["actor/ppo_kl"]) < 0.2
        assert 0 < row["actor/entropy"] < math.log(64)  # of 64 tokens
        assert row["rollout_corr/logprob_diff_max"] < 1e-3
    assert max(row.get("actor/grad_norm", 0) for row in rows) > 0
    if recipe.gain is not None:
        assert mean_score(rows[-10:]) - mean_score(rows[:10]) >= recipe.gain
    if "cost_critic" in recipe.roles:
        assert first["cost/multiplier"] == pytest.approx(0.1)
        for before, after in pairwise(rows):
            assert before["cost/mean"] == pytest.approx(before["reward/length_cost/mean"])
            step = 0.05 * (before["cost/mean"] - 3.5) * before["cost/multiplier"]
            assert after["cost/multiplier"] == pytest.approx(before["cost/multiplier"] * math.exp(step))
