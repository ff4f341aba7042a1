"""What ends a run that diverges."""

import math

import pytest

from atoll.coordinator.algorithm.guards import GuardLimits, check_divergence

HEALTHY = {"actor/ppo_kl": 0.01, "actor/entropy": 1.0, "rollout_corr/logprob_diff_mean": 0.02}
WATCHED = GuardLimits(
    max_ppo_kl=0.1, max_logprob_diff=0.05, min_entropy=0.2, max_entropy=3.0, reward_drop=0.5, window=2
)


def test_a_healthy_step_and_one_that_is_not_watched_go_on() -> None:
    assert check_divergence(HEALTHY, [0.1, 0.2, 0.3], WATCHED) is None
    far = {"actor/ppo_kl": 9.0, "actor/entropy": 0.0, "rollout_corr/logprob_diff_mean": 9.0}
    assert check_divergence(far, [9.0, 9.0, 0.0, 0.0], GuardLimits(window=2)) is None


def test_a_limit_itself_is_allowed() -> None:
    edge = {"actor/ppo_kl": -0.1, "actor/entropy": 0.2, "rollout_corr/logprob_diff_mean": 0.05}
    assert check_divergence(edge, [], WATCHED) is None
    assert check_divergence(edge | {"actor/entropy": 3.0}, [], WATCHED) is None


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("actor/ppo_kl", 0.25, "actor/ppo_kl is 0.25, beyond guards.max_ppo_kl = 0.1"),
        ("actor/ppo_kl", -0.25, "actor/ppo_kl is -0.25, beyond guards.max_ppo_kl = 0.1"),
        ("actor/entropy", 0.1, "actor/entropy is 0.1, beyond guards.min_entropy = 0.2"),
        ("actor/entropy", 4.0, "actor/entropy is 4, beyond guards.max_entropy = 3.0"),
        (
            "rollout_corr/logprob_diff_mean",
            math.nan,
            "rollout_corr/logprob_diff_mean is nan, beyond guards.max_logprob_diff = 0.05",
        ),
    ],
)
def test_each_limit(name: str, value: float, want: str) -> None:
    assert check_divergence(HEALTHY | {name: value}, [], WATCHED) == want


@pytest.mark.parametrize("name", ["actor/pg_loss", "critic/vf_loss", "cost_critic/vf_loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_that_is_not_finite_always_trips(name: str, value: float) -> None:
    reason = check_divergence(HEALTHY | {name: value}, [], GuardLimits())
    assert reason is not None
    assert reason.startswith(f"{name} is {value}: training has diverged; lower the learning rate")


def test_a_metric_that_the_step_lacks_or_of_another_kind_is_not_judged() -> None:
    assert check_divergence({"critic/vf_loss": 0.3, "perf/throughput": math.inf}, [], WATCHED) is None
    assert check_divergence({"actor/grad_norm": math.inf, "actor/skipped_step": 1.0}, [], WATCHED) is None


def test_reward_drop_by_hand() -> None:
    # means of two: 1.5, 2, 1.5, 1; the best is 2, and 1 is lower by 1
    scores = [1.0, 2.0, 2.0, 1.0, 1.0]
    assert check_divergence({}, scores, GuardLimits(reward_drop=1.0, window=2)) is None
    assert check_divergence({}, scores, GuardLimits(reward_drop=0.9, window=2)) == (
        "the mean of critic/score/mean over the last 2 steps is 1, 1 below its best, 2: "
        "more than guards.reward_drop = 0.9"
    )


def test_reward_drop_needs_an_earlier_window() -> None:
    limits = GuardLimits(reward_drop=0.1, window=3)
    assert check_divergence({}, [9.0, 0.0, 0.0], limits) is None
    # means of three: 3, then 0
    assert check_divergence({}, [9.0, 0.0, 0.0, 0.0], limits) is not None
