"""A batch's way from scored groups to what each model trains on, with models that answer known numbers."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.algorithm.algorithm import Algorithm, AlgorithmState, PreparedStep
from atoll.coordinator.algorithm.experience import lay_out
from atoll.runtime.errors import AtollError
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import (
    NEW_CONVERSATION,
    Float32,
    Group,
    Node,
    PolicyBatch,
    Segments,
    Trajectory,
    TrajectoryStatus,
    TurnReward,
    ValueBatch,
    Version,
)
from tests import builders
from tests.builders import group, node, run_config, sample_id


@dataclass
class Model:
    """Answers the same numbers for every batch, whatever it is asked."""

    answer: list[float]
    asked: list[str] = field(default_factory=list)

    async def compute_logprobs(self, segments: Segments) -> Float32:
        self.asked.append("logprobs")
        return np.array(self.answer, np.float32)

    async def offload(self, *, keep_parameters: bool = False) -> int:
        self.asked.append("offload")
        return 0

    async def compute_values(self, segments: Segments) -> Float32:
        self.asked.append("values")
        return np.array(self.answer, np.float32)


def sample(prompt: int, index: int, ids: list[int], reward: float, cost: float) -> Trajectory:
    rewards = (TurnReward(0, reward, {"exact_match": reward, "length_cost": cost}),)
    return builders.sample(sample_id(prompt, index), node(ids), rewards=rewards)


# flat tokens: prompt, [3, 4], [5], prompt, [6], [7, 8]; the policy produced 1, 2, 3, 5, 6 and 7
GROUPS = [
    group(sample(0, 0, [3, 4], 1.0, 2.0), sample(0, 1, [5], 0.0, 0.0)),
    group(sample(1, 0, [6], 0.0, 0.0), sample(1, 1, [7, 8], 1.0, 2.0)),
]
TRAINED = [1, 2, 3, 5, 6, 7]


def prepare(
    models: dict[str, Model],
    groups: list[Group] = GROUPS,
    state: AlgorithmState | None = None,
    oldest: int = 0,
    graders: tuple[dict[str, Any], ...] = ({"name": "exact_match"},),
    **sections: Any,
) -> tuple[PreparedStep, Algorithm]:
    config = run_config(
        **{
            "coordinator": {"prompts_per_step": 2, "samples_per_prompt": 2},
            "reward": {"graders": graders},
        }
        | sections
    )
    algorithm = Algorithm(config, models, state)  # type: ignore[arg-type]
    return asyncio.run(algorithm.prepare(groups, StepTimer(), oldest)), algorithm


def policy(prepared: PreparedStep) -> PolicyBatch:
    (batch,) = prepared.batches["actor"]
    assert isinstance(batch, PolicyBatch)
    return batch


def test_grpo_asks_no_model_and_trains_the_actor_alone() -> None:
    actor = Model([])
    prepared, _ = prepare({"actor": actor})
    batch = policy(prepared)
    assert actor.asked == []
    assert list(prepared.batches) == ["actor"]
    assert batch.old_logprobs is None
    assert batch.ref_logprobs is None
    unit = 0.5 / (np.sqrt(0.5) + 1e-6)  # scores 1, 0: mean 0.5, unbiased std sqrt(0.5)
    np.testing.assert_allclose(batch.advantages[TRAINED], [unit, unit, -unit, -unit, unit, unit], rtol=1e-6)
    np.testing.assert_array_equal(batch.samples, [-1, 0, 0, 1, -1, 2, 3, 3])
    np.testing.assert_allclose(batch.loss_weights, np.array([0, 1, 1, 1, 0, 1, 1, 1]) / 6)
    np.testing.assert_array_equal(batch.rollout_logprobs, [0, -1, -1, -1, 0, -1, -1, -1])
    assert prepared.metrics["critic/score/mean"] == 0.5
    assert prepared.metrics["critic/advantages/max"] == pytest.approx(unit)


def aged(ids: list[int], number: int, mask: list[int] | None = None, parent: int = -1) -> Node:
    """A node whose tokens version `number` produced."""
    return node(ids, mask, parent=parent, versions=Version("l", number))


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", np.array([1, 1, 1]) / 3),
        ("seq_mean_token_mean", np.array([1 / 1, 1 / 2, 1 / 2]) / 2),
        ("seq_mean_token_sum", np.array([1, 1, 1]) / 2),
        ("seq_mean_token_sum_norm", np.array([1, 1, 1]) / (2 * 8)),
    ],
)
def test_a_turn_that_is_too_old_is_not_trained_on_and_the_next_one_is(
    aggregation: str, weights: Float32
) -> None:
    # flat tokens: the prompt, then [3, 4] of version 1, the tool's [5], [6] of version 3; then [7, 8] of 2
    two_turns = builders.sample(
        sample_id(0, 0), aged([3, 4], 1), aged([5], 0, [0], 0), aged([6], 3, parent=1), score=1.0
    )
    groups = [group(two_turns, builders.sample(sample_id(0, 1), aged([7, 8], 2), score=0.0))]
    prepared, _ = prepare(
        {"actor": Model([]), "critic": Model([0.0] * 7)},
        groups,
        oldest=2,
        coordinator={"prompts_per_step": 1, "samples_per_prompt": 2},
        rollout={"sampling": {"max_new_tokens": 8}},
        algorithm={"advantage": {"name": "gae", "gamma": 1.0, "lam": 1.0}, "aggregation": aggregation},
        critic={},
    )
    batch, (learned,) = policy(prepared), prepared.batches["critic"]
    np.testing.assert_allclose(batch.loss_weights[[4, 5, 6]], weights, rtol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(batch.loss_weights), [4, 5, 6])
    np.testing.assert_array_equal(learned.loss_weights, batch.loss_weights)
    assert isinstance(learned, ValueBatch)
    np.testing.assert_allclose(learned.returns, [0, 1, 1, 0, 1, 0, 0])  # as if it were trained on
    # whitened over five tokens, three of which return 1: variance 5 * 0.24 / 4
    np.testing.assert_allclose(batch.advantages[[4, 5]], np.array([0.4, -0.6]) / np.sqrt(0.3), rtol=1e-6)


@pytest.mark.parametrize(
    ("correction", "trained"),
    [
        (None, [3, 4]),
        # of the samples' mean ratios, exp(0) and exp(0.5), the second is outside
        ({"level": "geometric", "method": "reject", "low": 0.9, "high": 1.1}, [3]),
    ],
)
def test_of_alternatives_each_is_as_old_as_it_is(
    correction: dict[str, Any] | None, trained: list[int]
) -> None:
    # flat tokens: the prompt, [3] of version 1, and beside each other [4] of version 1 and [5] of 2; then [6]
    rewards = TurnReward(1, 1.0, {"exact_match": 1.0}), TurnReward(2, 0.5, {"exact_match": 0.5})
    drawn_twice = builders.sample(
        sample_id(0, 0), aged([3], 1), aged([4], 1, parent=0), aged([5], 2, parent=0), rewards=rewards
    )
    groups = [group(drawn_twice, builders.sample(sample_id(0, 1), aged([6], 2), score=0.0))]
    prepared, _ = prepare(
        {"actor": Model([0, -1, -1, -1, -0.5])},  # the rollout said -1 everywhere
        groups,
        oldest=2,
        coordinator={"prompts_per_step": 1, "samples_per_prompt": 2},
        algorithm={"advantage": "rloo"} | ({"correction": correction} if correction else {}),
    )
    batch = policy(prepared)
    np.testing.assert_array_equal(np.flatnonzero(batch.loss_weights), trained)
    np.testing.assert_allclose(batch.loss_weights[trained], 1 / len(trained))
    np.testing.assert_allclose(batch.advantages[1:], [1.5, 1.5, 1.5, -1.5])  # the old one's reward counts
    assert prepared.metrics["critic/score/mean"] == 0.75


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [
        ("token_mean", [1 / 4] * 4),
        ("seq_mean_token_mean", [1 / 3 / 3] * 3 + [1 / 1 / 3]),
        ("seq_mean_token_sum", [1 / 3] * 4),
        ("seq_mean_token_sum_norm", [1 / (3 * 8)] * 4),
    ],
)
@pytest.mark.parametrize("end", [TrajectoryStatus.ABORTED, TrajectoryStatus.TRUNCATED])
def test_side_aborted_and_masked_turns_have_no_weight_and_their_rewards_count(
    aggregation: str, weights: list[float], end: TrajectoryStatus
) -> None:
    """A truncated session is masked as `on_end` says: `weight_0`."""
    # flat tokens: the prompt; [3, 4, 5] of the main conversation; a title's [6, 7]; [8]; the third's [9, 10]
    first = builders.sample(
        sample_id(0, 0), node([3, 4, 5]), node([6, 7], parent=NEW_CONVERSATION), score=1.0
    )
    main, title = first.turns
    first = first._replace(turns=(main, title._replace(untrained=True)))
    second = builders.sample(sample_id(0, 1), node([8]), score=0.5)
    third = builders.sample(sample_id(0, 2), node([9]), node([10], parent=0), score=0.0)
    third = third._replace(status=end)
    if end is TrajectoryStatus.TRUNCATED:
        third = third._replace(turns=tuple(turn._replace(untrained=True) for turn in third.turns))
    prepared, _ = prepare(
        {"actor": Model([])},
        [group(first, second, third)],
        coordinator={"prompts_per_step": 1, "samples_per_prompt": 3},
        rollout={"sampling": {"max_new_tokens": 8}},
        algorithm={"advantage": "rloo", "aggregation": aggregation},
    )
    batch = policy(prepared)
    ids = batch.segments.token_ids
    trained = np.flatnonzero(batch.loss_weights)
    np.testing.assert_array_equal(ids[trained], [3, 4, 5, 8])
    np.testing.assert_allclose(batch.loss_weights[trained], weights, rtol=1e-6)
    # less the mean of the two others' rewards: 1 - 0.25, and 0.5 - 0.5, with the third one's 0
    np.testing.assert_allclose(batch.advantages[trained], [0.75, 0.75, 0.75, 0.0], atol=1e-7)
    assert prepared.metrics["critic/score/mean"] == 0.5


def test_a_turn_has_weight_if_it_is_both_chosen_and_fresh_enough() -> None:
    # [3] is old and main, [4] fresh and main, [5] fresh and a title: of three turns one is trained
    nodes = aged([3], 1), aged([4], 2, parent=0), aged([5], 2, parent=NEW_CONVERSATION)
    sampled = builders.sample(sample_id(0, 0), *nodes, score=1.0)
    turns = (*sampled.turns[:2], sampled.turns[2]._replace(untrained=True))
    prepared, _ = prepare(
        {"actor": Model([])},
        [group(sampled._replace(turns=turns), builders.sample(sample_id(0, 1), aged([6], 2), score=0.0))],
        oldest=2,
        coordinator={"prompts_per_step": 1, "samples_per_prompt": 2},
        algorithm={"advantage": "rloo"},
    )
    batch = policy(prepared)
    trained = np.flatnonzero(batch.loss_weights)
    np.testing.assert_array_equal(batch.segments.token_ids[trained], [4, 6])
    np.testing.assert_allclose(batch.loss_weights[trained], 1 / 2)


def test_what_does_not_learn_rests_after_its_answer() -> None:
    actor, critic, reference = Model([0.0] * 8), Model([0.0] * 8), Model([0.0] * 8)
    prepare(
        {"actor": actor, "critic": critic, "reference": reference},
        algorithm={"advantage": "gae", "num_minibatches": 2, "kl": {}},
        trainer={"offload": True},
        critic={"offload": True},
        reference={"offload": True},
    )
    assert reference.asked == ["logprobs", "offload"]
    assert (actor.asked, critic.asked) == (["logprobs"], ["values"])  # their updates are next


def test_models_that_share_devices_with_replicas_are_asked_one_at_a_time() -> None:
    """Each has left before the next is asked: all note their calls in one list."""

    class SlowModel(Model):
        async def compute_logprobs(self, segments: Segments) -> Float32:
            answer = await super().compute_logprobs(segments)
            await asyncio.sleep(0)  # lets others ask
            return answer

    asked: list[str] = []
    prepare(
        {role: SlowModel([0.0] * 8, asked) for role in ("actor", "critic", "reference")},
        placement={"mode": "colocated"},
        algorithm={"advantage": "gae", "num_minibatches": 2, "kl": {}},
        trainer={"offload": True},
        critic={"offload": True},
        reference={"offload": True},
    )
    assert asked == ["logprobs", "offload", "logprobs", "offload", "values", "offload"]


def test_a_critic_learns_what_gae_returns() -> None:
    # the value of the state before a token is what the critic says after the one before it
    critic = Model([0.1, 0.2, 9, 9, 0.4, 9, 0.6, 9])
    prepared, _ = prepare(
        {"actor": Model([0.0] * 8), "critic": critic},
        algorithm={"advantage": {"name": "gae", "gamma": 1.0, "lam": 1.0}, "num_minibatches": 2},
        critic={},
    )
    assert critic.asked == ["values"]
    first, second = prepared.batches["critic"]
    assert isinstance(first, ValueBatch)
    assert isinstance(second, ValueBatch)
    np.testing.assert_allclose(first.values, [0, 0.1, 0.2, 0.1], rtol=1e-6)
    np.testing.assert_allclose(second.values, [0, 0.4, 0.4, 0.6], rtol=1e-6)
    np.testing.assert_allclose(first.returns, [0, 1, 1, 0], atol=1e-6)  # lambda 1: the rewards to come
    np.testing.assert_allclose(second.returns, [0, 0, 1, 1], atol=1e-6)
    np.testing.assert_allclose(first.loss_weights, np.array([0, 1, 1, 1]) / 3)
    advantages = np.concatenate([batch.advantages for batch in prepared.batches["actor"]])[TRAINED]  # type: ignore[union-attr]
    raw = np.array([0.9, 0.8, -0.1, -0.4, 0.6, 0.4])
    whitened = (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(advantages, whitened, rtol=1e-5)
    # returns 1, 1, 0, 0, 1, 1 and values 0.1, 0.2, 0.1, 0.4, 0.4, 0.6
    assert prepared.metrics["critic/vf_explained_var"] == pytest.approx(
        1 - np.var(raw) / (np.var([1, 1, 0, 0, 1, 1]) + 1e-5), abs=1e-6
    )


def test_kl_in_the_reward_is_taken_off_and_its_coefficient_adapts() -> None:
    actor = Model([0, -1, -1, -1, 0, -1, -1, -1])
    reference = Model([0, -1.5, -1, -1, 0, -1, -1, -1])  # k1 is 0.5 at the first trained token, else 0
    kl = {"where": "reward", "estimator": "k1", "coef": 0.2, "target": 0.05, "horizon": 8}
    prepared, algorithm = prepare(
        {"actor": actor, "reference": reference}, algorithm={"advantage": "rloo", "kl": kl}
    )
    # scores 0.9, 0, 0, 1; RLOO of two: the difference from the other
    np.testing.assert_allclose(policy(prepared).advantages[TRAINED], [0.9, 0.9, -0.9, -1, 1, 1], rtol=1e-6)
    assert prepared.metrics["critic/score/mean"] == 0.5
    assert prepared.metrics["critic/rewards/mean"] == pytest.approx(1.9 / 4)
    assert prepared.metrics["actor/reward_kl_penalty"] == pytest.approx(0.5 / 6)
    assert prepared.metrics["actor/kl_coef"] == 0.2
    # 0.0833 / 0.05 - 1 is above 0.2, and 4 samples are half a horizon: times 1.1
    assert algorithm.state.kl_coef == pytest.approx(0.22)
    assert policy(prepared).ref_logprobs is None
    np.testing.assert_array_equal(policy(prepared).old_logprobs, actor.answer)


def test_kl_in_the_loss_sends_the_references_logprobs_along() -> None:
    reference = Model([0, -1.5, -1, -1, 0, -1, -1, -1])
    prepared, _ = prepare({"actor": Model([]), "reference": reference}, algorithm={"kl": {"where": "loss"}})
    np.testing.assert_array_equal(policy(prepared).ref_logprobs, np.float32(reference.answer))  # type: ignore[arg-type]
    assert policy(prepared).old_logprobs is None


def test_a_constraint_takes_the_cost_off_and_moves_its_multiplier() -> None:
    prepared, algorithm = prepare(
        {"actor": Model([])},
        graders=({"name": "exact_match"}, {"name": "length_cost", "weight": 0.0}),
        algorithm={
            "advantage": "dr_grpo",
            "constraint": {"cost": "length_cost", "limit": 0.5, "initial": 2.0, "learning_rate": 0.1},
        },
    )
    # reward advantages +-0.5, cost advantages +-1: (0.5 - 2 * 1) / 3 = -0.5
    np.testing.assert_allclose(
        policy(prepared).advantages[TRAINED], [-0.5, -0.5, 0.5, 0.5, -0.5, -0.5], rtol=1e-6
    )
    assert prepared.metrics["cost/mean"] == 1
    assert prepared.metrics["cost/multiplier"] == pytest.approx(2)
    # log 2 + 0.1 * (1 - 0.5) * 2
    assert algorithm.state.log_multiplier == pytest.approx(np.log(2) + 0.1)


def test_models_of_reward_and_cost_judge_the_last_token() -> None:
    rewards = Model([9, 9, 3.0, 1.0, 9, 2.0, 9, 4.0])
    costs = Model([9, 9, 1.0, 0.0, 9, 0.0, 9, 0.0])
    prepared, _ = prepare(
        {"actor": Model([]), "reward_model": rewards, "cost_model": costs},
        reward_model={"path": "r", "weight": 0.5},
        cost_model={"path": "c"},
        algorithm={"advantage": "rloo", "constraint": {"limit": 0.0, "initial": 1.0}},
    )
    # scores 1 + 1.5, 0 + 0.5, 0 + 1, 1 + 2: differences 2, -2, -2, 2; costs' differences 1, -1, 0, 0
    np.testing.assert_allclose(policy(prepared).advantages[TRAINED], [0.5, 0.5, -0.5, -1, 1, 1], rtol=1e-6)
    assert prepared.metrics["critic/score/mean"] == pytest.approx((2.5 + 0.5 + 1 + 3) / 4)


def test_a_reward_model_that_gives_no_number_is_an_error() -> None:
    with pytest.raises(AtollError, match=r"reward_model gave nan.*reward_model.path"):
        prepare(
            {"actor": Model([]), "reward_model": Model([0, 0, 0, np.nan, 0, 0, 0, 0])},
            reward_model={"path": "r"},
        )


def test_the_greedy_sample_is_remaxs_baseline_and_is_not_trained_on() -> None:
    groups = [
        group(sample(0, 0, [3, 4], 1.0, 0.0), baseline=sample(0, 1, [5], 0.25, 0.0)),
        group(sample(1, 0, [6], 0.0, 0.0), baseline=sample(1, 1, [7], 1.0, 0.0)),
    ]
    prepared, _ = prepare(
        {"actor": Model([])},
        groups,
        coordinator={"prompts_per_step": 2, "samples_per_prompt": 1, "greedy_baseline": True},
        algorithm={"advantage": "remax"},
    )
    np.testing.assert_array_equal(policy(prepared).segments.token_ids, [1, 3, 4, 1, 6])
    np.testing.assert_allclose(policy(prepared).advantages, [0, 0.75, 0.75, 0, -1])


@pytest.mark.parametrize(
    ("method", "factors", "weights"),
    [
        # weights e^0.5 = 1.65 at the first token, 1 at the others; over the bound 1.5
        ("truncate", [1.5, 1, 1, 1, 1, 1], np.ones(6) / 6),
        ("mask", [0, 1, 1, 1, 1, 1], np.ones(6) / 6),
        ("reject", [1, 1, 1, 1, 1, 1], np.array([0, 1, 1, 1, 1, 1]) / 5),
    ],
)
def test_corrections_weigh_advantages_or_leave_tokens_out(
    method: str, factors: list[float], weights: Float32
) -> None:
    actor = Model([0, -0.5, -1, -1, 0, -1, -1, -1])  # the rollout said -1 everywhere
    correction = {"method": method, "low": 0.0 if method == "truncate" else 0.5, "high": 1.5}
    prepared, _ = prepare({"actor": actor}, algorithm={"advantage": "rloo", "correction": correction})
    batch = policy(prepared)
    advantages = np.array([1, 1, -1, -1, 1, 1]) * factors
    kept = weights > 0
    np.testing.assert_allclose(batch.advantages[TRAINED][kept], advantages[kept], rtol=1e-6)
    np.testing.assert_allclose(batch.loss_weights[TRAINED], weights, rtol=1e-6)
    assert prepared.metrics["rollout_corr/is_weight_max"] == pytest.approx(np.exp(0.5))
    np.testing.assert_array_equal(batch.old_logprobs, np.float32(actor.answer))  # type: ignore[arg-type]


def test_weights_and_rejection_go_together() -> None:
    """The first sample's tokens weigh e^0.5 and 1; its mean ratio e^0.25 = 1.28 is above 1.2."""
    corrections = [
        {"method": "truncate", "high": 1.5},
        {"level": "geometric", "method": "reject", "low": 0.5, "high": 1.2},
    ]
    prepared, _ = prepare(
        {"actor": Model([0, -0.5, -1, -1, 0, -1.5, -1, -1])},
        algorithm={"advantage": "rloo", "correction": corrections},
    )
    batch = policy(prepared)
    np.testing.assert_allclose(batch.loss_weights[TRAINED], np.array([0, 0, 1, 1, 1, 1]) / 4)
    weighed = [-1, -np.exp(-0.5), 1, 1]  # advantages -1, -1, 1, 1; the third sample weighs e^-0.5
    np.testing.assert_allclose(batch.advantages[TRAINED][2:], weighed, rtol=1e-6)
    assert prepared.metrics["rollout_corr/masked_fraction"] == pytest.approx(2 / 6)
    assert prepared.metrics["rollout_corr/truncated_fraction"] == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("return t.scores_N", "AttributeError: 'numpy.ndarray' object has no attribute 'advantages_T'"),
        ("return Estimate(t.scores_N, t.scores_N)", r"ValueError: .*\(4,\), \(4,\)\), expected \(6,\) twice"),
        ("raise RuntimeError('no')", "RuntimeError: no"),
    ],
)
def test_an_advantage_of_ones_own_that_fails_is_named(tmp_path: Path, body: str, cause: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"from atoll.coordinator.algorithm.estimates import Estimate\ndef mine(t):\n    {body}\n")
    with pytest.raises(AtollError, match=rf"own.py:mine' failed: {cause}"):
        prepare({"actor": Model([])}, algorithm={"advantage": f"{file}:mine"})


def test_reweighting_weighs_the_loss_of_whole_samples() -> None:
    prepared, _ = prepare({"actor": Model([])}, algorithm={"reweight": "max_random"})
    # scores 1, 0, 0, 1: preferences 0.4, 0.1, 0.1, 0.4, divided by their mean 0.25
    per_token = np.array([1.6, 1.6, 0.4, 0.4, 1.6, 1.6])
    np.testing.assert_allclose(policy(prepared).loss_weights[TRAINED], per_token / per_token.sum(), rtol=1e-6)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Group], list[Group]]:
    """Groups, and the same with masked tokens (a template's, a tool's) anywhere within their samples."""
    plain, padded = [], []
    for number in range(draw(st.integers(1, 3))):
        both: tuple[list[Trajectory], list[Trajectory]] = ([], [])
        for index in range(2):
            ids = draw(st.lists(st.integers(3, 9), max_size=4))
            whole = sample(number, index, ids, draw(st.sampled_from([0.0, 0.5, 1.0])), 0.0)
            both[0].append(whole)
            mask = [True] * len(ids)
            for at in draw(st.lists(st.integers(0, len(ids)), max_size=3)):
                ids, mask = [*ids[:at], 2, *ids[at:]], [*mask[:at], False, *mask[at:]]
            node = whole.nodes[0]._replace(
                token_ids=np.array(ids, np.int32),
                loss_mask=np.array(mask, np.bool_),
                logprobs=np.where(mask, -1, 0).astype(np.float32),
            )
            both[1].append(whole._replace(nodes=(node,)))
        plain.append(group(*both[0]))
        padded.append(group(*both[1]))
    return plain, padded


@given(batches(), st.sampled_from(["gae", "vapo", "grpo", "rloo", "opo", "reinforce_pp", "gdpo", "turn_gae"]))
@settings(max_examples=60, deadline=None)
def test_masked_tokens_change_nothing(pair: tuple[list[Group], list[Group]], advantage: str) -> None:
    trained = []
    for groups in pair:
        layout = lay_out(groups)
        # a value depends on how many trained tokens of its sample came before, not on where it stands
        starts = np.cumsum(layout.lengths) - layout.lengths
        before = np.cumsum(layout.loss_mask_T) - starts[layout.sample_T]
        values = np.where(layout.sample_T >= 0, 0.1 * before, 0.0)
        critic = {"critic": Model(values.tolist())} if advantage in ("gae", "vapo", "turn_gae") else {}
        prepared, _ = prepare(
            {"actor": Model([]), **critic},
            groups,
            algorithm={"advantage": advantage, "aggregation": "seq_mean_token_mean"},
            **{role: {} for role in critic},
        )
        (value,) = prepared.batches.get("critic", (None,))
        arrays = [policy(prepared).advantages, policy(prepared).loss_weights]
        arrays += [value.values, value.returns] if isinstance(value, ValueBatch) else []
        trained.append([array[layout.loss_mask_T] for array in arrays])
        assert not policy(prepared).loss_weights[~layout.loss_mask_T].any()
    for plain, padded in zip(*trained, strict=True):
        np.testing.assert_allclose(padded, plain, rtol=1e-6, atol=1e-6)
