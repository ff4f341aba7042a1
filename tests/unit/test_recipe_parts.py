"""Every recipe in examples/: what it is composed of, what it starts, and what a step of it comes to.

Three of them run for real in tests/integration/test_recipes.py.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.cli.launch import preflight
from atoll.cli.launch.launcher import service_groups
from atoll.cli.main import main
from atoll.config import functions
from atoll.config.load import load, validate
from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.coordinator.algorithm.algorithm import Algorithm
from atoll.coordinator.algorithm.filters import DynamicSampling
from atoll.reward.score import GRADERS, combine, judge
from atoll.runtime.telemetry import StepTimer
from atoll.trainer.losses.loss import LOSSES, PolicyTokens
from atoll.wire.types import FinishReason, Group, PolicyBatch, ScoreItem, TurnReward, ValueBatch
from tests import nvidia_smi
from tests.builders import group, node, sample, sample_id
from tests.fakes import FakeTrainer

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OWN = "examples/own_functions.py:"


@dataclass(frozen=True)
class Recipe:
    """What its file should come to. `after_actor` are the roles beside the actor."""

    advantage: str
    loss: str
    after_actor: tuple[str, ...] = ()
    aggregation: str = "token_mean"
    kl: str = ""  # where it is
    updates: int = 1  # in a step
    filter: str = ""
    reweight: str = ""
    whitened: bool = False  # advantages are, over the batch
    critic_warmup: int = 0
    greedy_baseline: bool = False
    scores: tuple[float, float, float] = (
        1.0,
        0.0,
        0.0,
    )  # of 46 for 46, of 45, and of 8 tokens without an end


CRITIC = ("critic",)
REFERENCE = ("reference",)
BOTH = ("critic", "reference")
RECIPES = {
    "ppo": Recipe("gae", "ppo_clip", BOTH, kl="reward", updates=2, whitened=True),
    "grpo": Recipe("grpo", "ppo_clip", REFERENCE, kl="loss", updates=2),
    "dr_grpo": Recipe("dr_grpo", "ppo_clip", aggregation="seq_mean_token_sum_norm", updates=2),
    # 8 tokens are 3 over the 5 that are free, and the buffer is 3: a whole penalty of 0.5
    "dapo": Recipe("grpo", "ppo_clip", filter="scores_differ", updates=2, scores=(1.0, 0.0, -0.5)),
    "vapo": Recipe("vapo", "ppo_clip", CRITIC, updates=2, whitened=True, critic_warmup=2),
    "rloo": Recipe("rloo", "reinforce", REFERENCE, "seq_mean_token_sum", kl="reward"),
    "reinforce_pp": Recipe("reinforce_pp", "ppo_clip", REFERENCE, kl="reward", updates=2, whitened=True),
    "reinforce_pp_baseline": Recipe(
        "reinforce_pp_baseline", "ppo_clip", REFERENCE, kl="loss", updates=2, whitened=True
    ),
    "remax": Recipe("remax", "reinforce", REFERENCE, "seq_mean_token_sum", kl="reward", greedy_baseline=True),
    "gspo": Recipe("grpo", "gspo", aggregation="seq_mean_token_mean", updates=2),
    "cispo": Recipe("grpo", "cispo", updates=2),
    "pf_ppo": Recipe("gae", "ppo_clip", CRITIC, updates=2, reweight="max_random", whitened=True),
    "lora": Recipe("grpo", "ppo_clip", updates=2),
    "safe_rlhf": Recipe(
        "gae", "ppo_clip", ("critic", "cost_critic", "reference"), kl="reward", updates=2, whitened=True
    ),
    # 45 is 1 away, of a tolerance of 10, and counts a fifth: 0.18
    "own_functions": Recipe(
        f"{OWN}above_median", f"{OWN}asymmetric", filter=f"{OWN}not_hopeless", scores=(1.2, 0.18, 0.0)
    ),
    "arithmetic": Recipe("grpo", "ppo_clip"),
    "arithmetic_sglang": Recipe("grpo", "ppo_clip"),
}

pytestmark = pytest.mark.usefixtures("in_root")


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `examples/own_functions.py` is found from."""
    monkeypatch.chdir(ROOT)


def read(name: str) -> RunConfig:
    return load(EXAMPLES / f"{name}.toml")


def each_recipe(test: object) -> object:
    return pytest.mark.parametrize("name", RECIPES)(test)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_a_dry_run_prints_the_config(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvidia_smi.install(monkeypatch, tmp_path, 8)
    monkeypatch.setattr(preflight, "require", lambda *_, **__: None)  # models and data are not built here
    assert main(["run", str(path), "--dry-run"]) == 0
    printed = validate(json.loads(capsys.readouterr().out), "stdout", is_resolved=True)
    assert printed == resolve(load(path), range(8))


@each_recipe
def test_a_recipe_names_its_parts(name: str) -> None:
    config, recipe = read(name), RECIPES[name]
    algorithm = config.algorithm
    assert algorithm.advantage.name == recipe.advantage
    assert algorithm.loss.name == recipe.loss
    assert algorithm.aggregation == recipe.aggregation
    assert (algorithm.kl.where if algorithm.kl else "") == recipe.kl
    assert algorithm.num_minibatches * algorithm.num_epochs == recipe.updates
    assert (algorithm.filter.name if algorithm.filter else "") == recipe.filter
    assert (algorithm.reweight.name if algorithm.reweight else "") == recipe.reweight
    assert config.coordinator.greedy_baseline == recipe.greedy_baseline
    assert (config.critic.warmup_steps if config.critic else 0) == recipe.critic_warmup
    assert (config.trainer.lora is not None) == (name == "lora")


@each_recipe
def test_a_recipe_starts_the_services_that_it_needs(name: str) -> None:
    names = {name for group in service_groups(read(name), "127.0.0.1:9") for name in group.names}
    models = {f"{role}-0" for role in ("actor", *RECIPES[name].after_actor)}
    assert names == {"reward-0", "rollout-0", *models}


def test_the_supervised_recipe_starts_the_trainer_alone() -> None:
    assert [group.names for group in service_groups(read("sft"), "127.0.0.1:9")] == [("actor-0",)]


@each_recipe
def test_a_recipes_graders(name: str) -> None:
    """One answer is right, one wrong by 1, and one has no end."""
    answers = [("46", 3, FinishReason.STOP), ("45", 3, FinishReason.STOP), ("x" * 8, 8, FinishReason.LENGTH)]
    config = read(name)
    scores = []
    for response, tokens, reason in answers:
        item = ScoreItem(sample_id(7), "12+34=", response, "46", "arithmetic", reason, tokens)
        grades = {
            grader.name: judge(functions.load(grader, GRADERS), item) for grader in config.reward.graders
        }
        weights = {grader.name: grader.weight for grader in config.reward.graders}
        scores.append(combine(item.id, weights, grades).value)
    assert scores == pytest.approx(RECIPES[name].scores)


def scored_groups(config: RunConfig) -> list[Group]:
    """Two prompts with a right and a wrong answer each, of one and of three tokens."""
    groups = []
    for number in range(2):
        samples = []
        for index, (ids, score) in enumerate([([3], 1.0), ([4, 5, 6], 0.0)]):
            components = {grader.name: score for grader in config.reward.graders}
            components |= {"length_cost": float(len(ids))} if "length_cost" in components else {}
            rewards = (TurnReward(0, score, components),)
            samples.append(sample(sample_id(number, index), node(ids), rewards=rewards))
        baseline = samples.pop() if config.coordinator.greedy_baseline else None
        groups.append(group(*samples, baseline=baseline))
    return groups


@each_recipe
def test_a_step_of_a_recipe(name: str) -> None:
    """Which model gets what, with models that say -1 of every token, a reference that says -1.5, and new
    critics, which say 0."""
    config, recipe = read(name), RECIPES[name]
    models = {role: FakeTrainer([], role) for role in config.roles}
    if "reference" in models:
        models["reference"].logprob = lambda: -1.5
    algorithm = Algorithm(config, models, None)
    prepared = asyncio.run(algorithm.prepare(scored_groups(config), StepTimer()))
    learn = {role for role in ("actor", *recipe.after_actor) if role != "reference"}
    assert {role: len(batches) for role, batches in prepared.batches.items()} == dict.fromkeys(
        learn, config.algorithm.num_minibatches
    )
    policy = [batch for batch in prepared.batches["actor"] if isinstance(batch, PolicyBatch)]
    trained = np.concatenate([batch.loss_weights for batch in policy]) > 0
    advantages = np.concatenate([batch.advantages for batch in policy])[trained]
    assert advantages.any()
    if recipe.whitened:
        assert advantages.mean() == pytest.approx(0, abs=1e-6)
    for batch in policy:
        assert (batch.ref_logprobs is not None) == (recipe.kl == "loss")
    for role in learn - {"actor"}:
        (batch, *_) = prepared.batches[role]
        assert isinstance(batch, ValueBatch)
        assert not batch.values.any()
        assert batch.returns.any()
        assert prepared.metrics[f"{role}/values/mean"] == 0
    metrics = prepared.metrics
    assert ("actor/kl_coef" in metrics) == (recipe.kl == "reward")
    if recipe.kl == "reward":  # k1
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
        assert metrics["critic/rewards/mean"] < metrics["critic/score/mean"]
    else:
        assert metrics["critic/rewards/mean"] == metrics["critic/score/mean"]


def test_safe_rlhfs_cost_is_the_length_and_moves_its_multiplier() -> None:
    config = read("safe_rlhf")
    models = {role: FakeTrainer([], role) for role in config.roles}
    algorithm = Algorithm(config, models, None)
    metrics = asyncio.run(algorithm.prepare(scored_groups(config), StepTimer())).metrics
    assert metrics["cost/mean"] == 2.0  # of 1 and 3 tokens
    assert metrics["cost/multiplier"] == pytest.approx(0.1)
    # log 0.1 + 0.05 * (2 - 3.5) * 0.1
    assert algorithm.state.log_multiplier == pytest.approx(np.log(0.1) - 0.0075)


@pytest.mark.parametrize(
    ("name", "scores", "keeps"),
    [
        ("dapo", (1.0, 0.0), True),
        ("dapo", (1.0, 1.0), False),
        ("own_functions", (0.0, 0.06), True),
        ("own_functions", (0.0, 0.05), False),
    ],
)
def test_what_a_recipes_filter_keeps(name: str, scores: tuple[float, float], keeps: bool) -> None:
    config = read(name).algorithm.filter
    assert config is not None
    samples = [sample(sample_id(0, i), node([3]), score=score) for i, score in enumerate(scores)]
    assert DynamicSampling(config, prompts_per_step=1).accepts(group(*samples)) is keeps


def test_the_examples_own_loss() -> None:
    """-A ratio, half of it where A is negative."""
    log_ratio = torch.tensor([0.5, 0.5])
    tokens = PolicyTokens(
        logprobs_N=log_ratio,
        old_logprobs_N=torch.zeros(2),
        advantages_N=torch.tensor([2.0, -2.0]),
        sample_N=torch.tensor([0, 1]),
        chosen_N=torch.zeros(2, dtype=torch.bool),
    )
    loss_N, metrics = functions.load(read("own_functions").algorithm.loss, LOSSES)(tokens)
    ratio = np.exp(0.5)
    np.testing.assert_allclose(loss_N, [-2 * ratio, 0.5 * 2 * ratio], rtol=1e-6)
    np.testing.assert_allclose(metrics["actor/ratio"], [ratio, ratio], rtol=1e-6)
