"""Every recipe in examples/ by the real command: which processes it starts, and what its metrics say."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Recipe:
    """What its file should come to."""

    name: str
    roles: frozenset[str] = frozenset()  # beside the actor
    kl: str = ""  # where it is
    scores: tuple[float, float] = (0.0, 1.0)  # that graders can give
    whitened: bool = False  # advantages are, over the batch
    filtered: bool = False
    critic_warmup: int = 0


def recipe(name: str, *roles: str, **expected: object) -> Recipe:
    return Recipe(name, frozenset(roles), **expected)  # type: ignore[arg-type]


RECIPES = [
    recipe("gspo"),
    recipe("ppo", "critic", "reference", kl="reward", whitened=True),
    recipe("own_functions", scores=(0.0, 1.2), filtered=True),
    recipe("grpo", "reference", kl="loss"),
    recipe("dr_grpo"),
    recipe("dapo", scores=(-0.5, 1.0), filtered=True),
    recipe("vapo", "critic", whitened=True, critic_warmup=2),
    recipe("rloo", "reference", kl="reward"),
    recipe("reinforce_pp", "reference", kl="reward", whitened=True),
    recipe("reinforce_pp_baseline", "reference", kl="loss", whitened=True),
    recipe("remax", "reference", kl="reward"),
    recipe("cispo"),
    recipe("pf_ppo", "critic", whitened=True),
    recipe("lora"),
    recipe("safe_rlhf", "critic", "cost_critic", "reference", kl="reward", whitened=True),
]

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


def atoll(folder: Path, *words: str) -> None:
    command = [Path(sys.executable).with_name("atoll"), *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr


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
    """A model of which every fourth answer is right, as PPO's recipe warms it up; its reference is a copy."""
    atoll(folder, "run", "examples/ppo.toml", "--set", "run.name=warm", "--set", "run.steps=1")
    _, first = rows_of(folder, "warm")
    assert abs(first["actor/reward_kl_penalty"]) < 1e-5
    return "runs/warm/warm"


def three_steps(folder: Path, warm: str, name: str) -> list[dict[str, float]]:
    """Runs the recipe; returns their metrics."""
    settings = {
        "model.path": warm,
        "warmup": "{}",
        "run.steps": 3,
        "validation.at_start": "false",
        "validation.at_end": "false",
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    atoll(folder, "run", f"examples/{name}.toml", *overrides)
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    assert summary["steps"] == 3
    assert (folder / summary["checkpoint"]).is_dir()
    rows = rows_of(folder, name)
    assert [row["step"] for row in rows] == [1, 2, 3]
    return rows


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_runs_with_what_it_needs_and_says_how_it_went(
    folder: Path, warm: str, recipe: Recipe
) -> None:
    first, _, last = rows = three_steps(folder, warm, recipe.name)
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
    assert ("actor/kl_loss" in last) == (recipe.kl == "loss")
    assert ("actor/kl_coef" in last) == (recipe.kl == "reward")
    assert ("dynamic_sampling/num_filtered" in last) == recipe.filtered
    if recipe.kl == "reward":  # the reference is the policy that it began with
        assert abs(first["actor/reward_kl_penalty"]) < 1e-5 < abs(last["actor/reward_kl_penalty"])
    if recipe.kl == "loss":
        assert 0 < first["actor/kl_loss"] < last["actor/kl_loss"]
    for row in rows:
        assert recipe.scores[0] <= row["critic/score/min"] <= row["critic/score/max"] <= recipe.scores[1]
        assert row["critic/rewards/mean"] <= row["critic/score/mean"] + 0.01  # a KL estimate may be negative
        assert 1 <= row["response_length/min"] <= row["response_length/max"] <= 8
        if recipe.whitened:
            assert abs(row["critic/advantages/mean"]) < 1e-4
    for row in rows[: recipe.critic_warmup]:
        assert "actor/pg_loss" not in row
        assert row["training/version"] == first["training/version"]
    for row in rows[recipe.critic_warmup :]:
        assert row["actor/ratio"] == pytest.approx(1, abs=0.2)
        assert abs(row["actor/ppo_kl"]) < 0.2
        assert 0 < row["actor/entropy"] < math.log(64)  # of 64 tokens
        assert row["rollout_corr/logprob_diff_max"] < 1e-3
    assert max(row.get("actor/grad_norm", 0) for row in rows) > 0
    if "cost_critic" in recipe.roles:
        assert first["cost/multiplier"] == pytest.approx(0.1)
        for before, after in pairwise(rows):
            assert before["cost/mean"] == pytest.approx(before["reward/length_cost/mean"])
            step = 0.05 * (before["cost/mean"] - 3.5) * before["cost/multiplier"]
            assert after["cost/multiplier"] == pytest.approx(before["cost/multiplier"] * math.exp(step))


@pytest.mark.long
def test_the_supervised_recipe_starts_the_trainer_alone_and_learns(folder: Path) -> None:
    atoll(folder, "run", "examples/sft.toml", "--set", "run.steps=60")
    logs = folder / "runs" / "sft" / "logs"
    assert {path.stem for path in logs.iterdir()} == {"coordinator", "actor-0"}
    rows = rows_of(folder, "sft")
    assert rows[0]["val/arithmetic/nll"] > math.log(40)  # random: of 64 tokens
    # who knows that a response is two or three digits and an end: (3 ln 10) / 4 = 1.73 a token
    assert rows[-1]["val/arithmetic/nll"] < 1.73
