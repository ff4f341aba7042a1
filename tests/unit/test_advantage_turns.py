"""Estimators that count turns: against values worked out by hand, and where they equal those of tokens."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.algorithm.advantage import (
    episode_grpo,
    gae,
    grpo,
    reinforce_pp,
    turn_gae,
    turn_returns,
)
from atoll.coordinator.algorithm.branches import Branches
from atoll.coordinator.algorithm.estimates import Float64, Trajectories


def batch(
    lengths: list[int],
    rewards: list[float],
    turns: list[int] | None = None,
    values: list[float] | None = None,
    branches: Branches | None = None,
) -> Trajectories:
    """One group; rewards and values of all tokens, lengths of samples and of their turns."""
    lengths_N, rewards_T = np.array(lengths), np.array(rewards)
    scores_N = np.bincount(np.repeat(np.arange(len(lengths)), lengths_N), rewards_T, len(lengths))
    return Trajectories(
        np.zeros(len(lengths), int),
        lengths_N,
        scores_N,
        rewards_T,
        scores_N[:, None],
        np.ones(1),
        values_T=None if values is None else np.array(values),
        branches=branches,
        turn_lengths_U=None if turns is None else np.array(turns),
    )


def check(got_T: Float64, want: list[float]) -> None:
    np.testing.assert_allclose(got_T, want, rtol=1e-9, atol=1e-9)


# Turns of 2, 1 and 2 tokens; an empty sample; one turn of one token. Rewards of turns: 0.25, 0.5, 1 | 2.
REWARDS = [0.25, 0, 0.5, 0, 1, 2]
LINES = batch([5, 0, 1], REWARDS, turns=[2, 1, 2, 1], values=[0.5, 9, 1, 0.5, 9, 1])

# A sample: a turn of 2 tokens, rewarded with 3; then side by side one of 1 token, rewarded with 1, and one
# of 2 tokens, rewarded with 2, which is followed by one of 1 token, rewarded with 4. And a sample of one.
TREE = batch(
    [6, 1],
    [0, 3, 1, 0, 2, 4, 1.5],
    turns=[2, 1, 2, 1, 1],
    values=[1, 9, 2, 0, 9, 2, 0.5],
    branches=Branches(np.array([2, 1, 3, 1]), np.array([-1, 0, 0, -1]), np.array([0, 0, 0, 1])),
)


def test_turn_gae_by_hand() -> None:
    # gamma = lam = 0.5 and V 0.5, 1, 0.5, those of first tokens alone:
    #   delta_2 = 1 - 0.5 = 0.5, delta_1 = 0.5 + 0.5 x 0.5 - 1 = -0.25, delta_0 = 0.25 + 0.5 x 1 - 0.5 = 0.25
    #   A_2 = 0.5,  A_1 = -0.25 + 0.25 x 0.5 = -0.125,  A_0 = 0.25 - 0.25 x 0.125 = 0.21875
    # Then A = 2 - 1 = 1. Of the 6 tokens: sum 2.3125, squares 1.611328125.
    estimate = turn_gae(LINES, gamma=0.5, lam=0.5)
    check(estimate.returns_T, [0.71875, 0.71875, 0.875, 1, 1, 2])
    deviation = np.sqrt((1.611328125 - 2.3125**2 / 6) / 5 + 1e-8)
    advantages = [0.21875, 0.21875, -0.125, 0.5, 0.5, 1]
    check(estimate.advantages_T, [(a - 2.3125 / 6) / deviation for a in advantages])


def test_turn_gae_of_alternatives_by_hand() -> None:
    # gamma = 1, lam = 0.5. Last turn: delta = 4 - 2 = 2. The one before: 2 + 2 - 0 = 4, A = 4 + 0.5 x 2 = 5.
    # Its alternative: 1 - 2 = -1. What both follow: 3 + (2 + 0) - 1 = 4, A = 4 + 0.5 x (-1 + 5) = 6.
    # The other sample: 1.5 - 0.5 = 1. Of the 7 tokens: sum 12 - 1 + 10 + 2 + 1 = 24, squares 128.
    estimate = turn_gae(TREE, lam=0.5)
    check(estimate.returns_T, [7, 7, 1, 5, 5, 4, 1.5])
    deviation = np.sqrt((128 - 24**2 / 7) / 6 + 1e-8)
    check(estimate.advantages_T, [(a - 24 / 7) / deviation for a in [6, 6, -1, 5, 5, 2, 1]])


def test_turn_returns_by_hand() -> None:
    # gamma = 0.5: 1; 0.5 + 0.5 x 1 = 1; 0.25 + 0.5 x 1 = 0.75; the other sample 2
    estimate = turn_returns(LINES, gamma=0.5)
    check(estimate.returns_T, [0.75, 0.75, 1, 1, 1, 2])
    deviation = np.sqrt((8.125 - 6.5**2 / 6) / 5 + 1e-8)
    check(estimate.advantages_T, [(g - 6.5 / 6) / deviation for g in [0.75, 0.75, 1, 1, 1, 2]])
    # 4; 2 + 0.5 x 4 = 4; its alternative 1; what both follow 3 + 0.5 x (4 + 1) = 5.5
    check(turn_returns(TREE, gamma=0.5).returns_T, [5.5, 5.5, 1, 4, 4, 4, 1.5])


def test_episode_grpo_by_hand() -> None:
    # gamma = 0.5: 3 + 0.5 x 1 + 0.5 x 2 + 0.25 x 4 = 5.5 and 1.5: mean 3.5 and unbiased deviation sqrt(8) of
    # two sessions, although the first has four turns
    unit = 2 / (np.sqrt(8) + 1e-6)
    check(episode_grpo(TREE, gamma=0.5).advantages_T, [unit] * 6 + [-unit])
    # without a discount: 10 and 1.5
    unit = 4.25 / (np.sqrt(2 * 4.25**2) + 1e-6)
    check(episode_grpo(TREE).advantages_T, [unit] * 6 + [-unit])


def test_a_reward_without_a_token_counts_in_full_in_its_episode() -> None:
    # 0.25 + 0.5 x 0.5 + 0.25 x 1 = 0.75, and 1 from a turn without a token; an empty sample that scores 3.75;
    # 2: mean 2.5, unbiased variance (0.75^2 + 1.25^2 + 0.5^2) / 2 = 1.1875
    scores_N = np.array([1.75 + 1, 3.75, 2])
    deviation = np.sqrt(1.1875) + 1e-6
    estimate = episode_grpo(replace(LINES, scores_N=scores_N), gamma=0.5)
    check(estimate.advantages_T, [-0.75 / deviation] * 5 + [-0.5 / deviation])
    # alternatives from the beginning: both are first turns
    beginning = Branches(np.array([1, 2, 1]), np.array([-1, -1, -1]), np.array([0, 0, 1]))
    drawn_twice = batch([3, 1], [1, 2, 4, 5], turns=[1, 1, 1, 1], branches=beginning)
    unit = 0.5 / (np.sqrt(0.5) + 1e-6)  # 1 + 2 + 0.25 x 4 = 4 and 5
    check(episode_grpo(drawn_twice, gamma=0.25).advantages_T, [-unit] * 3 + [unit])


def test_turn_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(ValueError, match=r"turn_gae needs .* add a \[critic\] table"):
        turn_gae(replace(LINES, values_T=None))


def same(one: Float64, other: Float64) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


factors = st.floats(0, 1)
seeds = st.integers(0, 2**32 - 1)


@given(factors, factors, seeds)
def test_turns_of_one_token_are_tokens(gamma: float, lam: float, seed: int) -> None:
    rewards_T, values_T = np.random.default_rng(seed).normal(size=(2, 7))
    tokens = replace(TREE, rewards_T=rewards_T, values_T=values_T, turn_lengths_U=None)
    turns = replace(tokens, turn_lengths_U=np.ones(7, int))
    by_turn, by_token = turn_gae(turns, gamma=gamma, lam=lam), gae(tokens, gamma=gamma, lam=lam)
    same(by_turn.advantages_T, by_token.advantages_T)
    same(by_turn.returns_T, by_token.returns_T)
    same(turn_returns(turns, gamma=gamma).advantages_T, reinforce_pp(tokens, gamma=gamma).advantages_T)


@given(factors, factors, seeds)
def test_samples_of_one_turn_rewarded_at_the_end_do_not_depend_on_time(
    gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = [3, 0, 1, 2]
    first, rest = rng.normal(size=(2, 3))
    one_turn = replace(
        batch(lengths, [0, 0, first[0], first[1], 0, first[2]]),
        values_T=np.array([rest[0], 9, 9, rest[1], rest[2], 9]),
    )
    undiscounted, by_turn = gae(one_turn), turn_gae(one_turn, gamma=gamma, lam=lam)
    same(by_turn.returns_T, undiscounted.returns_T)
    constant = replace(one_turn, values_T=np.repeat(rest, [3, 1, 2]))  # then each token is like the first
    same(turn_gae(constant, gamma=gamma, lam=lam).advantages_T, gae(constant).advantages_T)
    same(turn_returns(one_turn, gamma=gamma).advantages_T, reinforce_pp(one_turn).advantages_T)
    same(episode_grpo(one_turn, gamma=gamma).advantages_T, grpo(one_turn).advantages_T)


@given(seeds)
def test_an_undiscounted_episode_is_grpos(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for some in (LINES, TREE):
        random = replace(
            some,
            rewards_T=rng.normal(size=len(some.rewards_T)),
            scores_N=rng.normal(size=len(some.scores_N)),
        )
        same(episode_grpo(random).advantages_T, grpo(random).advantages_T)
