"""Advantage estimators against values worked out by hand, a loop over masked rows, and re-ordering."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.algorithm.advantage import (
    ADVANTAGES,
    TRAITS,
    dr_grpo,
    gae,
    gdpo,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    vapo,
)
from atoll.coordinator.algorithm.estimates import Float64, Trajectories, whiten
from atoll.wire.types import Bool


def trajectories(group: list[int], lengths: list[int], scores: list[float]) -> Trajectories:
    """The whole score at a sample's last token, one grader that gave it."""
    lengths_N, scores_N = np.array(lengths), np.array(scores)
    rewards_T = np.zeros(lengths_N.sum())
    has_tokens_N = lengths_N > 0
    rewards_T[(np.cumsum(lengths_N) - 1)[has_tokens_N]] = scores_N[has_tokens_N]
    return Trajectories(np.array(group), lengths_N, scores_N, rewards_T, scores_N[:, None], np.ones(1))


def with_rewards(lengths: list[int], rewards: list[float], values: list[float] | None = None) -> Trajectories:
    """Rewards at any token, each sample a group of its own."""
    lengths_N = np.array(lengths)
    sample_T = np.repeat(np.arange(len(lengths)), lengths_N)
    scores_N = np.bincount(sample_T, rewards, minlength=len(lengths))
    return Trajectories(
        np.arange(len(lengths)),
        lengths_N,
        scores_N,
        np.array(rewards),
        scores_N[:, None],
        np.ones(1),
        None if values is None else np.array(values),
    )


# Scores 1, 0, 2 in a group whose second response is empty, a singleton with 0.7, a group with equal scores
# 0.3. The first group's mean is 1, its unbiased variance (0 + 1 + 1) / 2 = 1. Tokens: 2, 0, 1 | 1 | 1, 1.
MIXED = trajectories([0, 0, 0, 1, 2, 2], [2, 0, 1, 1, 1, 1], [1.0, 0.0, 2.0, 0.7, 0.3, 0.3])


def check(got_T: Float64, want: list[float]) -> None:
    np.testing.assert_allclose(got_T, want, rtol=1e-9, atol=1e-9)


def test_grpo_by_hand() -> None:
    estimate = grpo(MIXED)
    check(estimate.advantages_T, [0, 0, 1 / (1 + 1e-6), 0.7, 0, 0])
    check(estimate.returns_T, [0, 0, 1 / (1 + 1e-6), 0.7, 0, 0])


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    # mean 0.5, squares 4 x 0.25 = 1, variance 1 / 3
    unit = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    batch = trajectories([0, 0, 0, 0], [1, 1, 1, 1], [1.0, 0.0, 0.0, 1.0])
    check(grpo(batch).advantages_T, [unit, -unit, -unit, unit])


def test_dr_grpo_by_hand() -> None:
    check(dr_grpo(MIXED).advantages_T, [0, 0, 1, 0.7, 0, 0])


def test_rloo_by_hand() -> None:
    # first sample: 1 - (0 + 2) / 2 = 0; third: 2 - (1 + 0) / 2 = 1.5
    check(rloo(MIXED).advantages_T, [0, 0, 1.5, 0.7, 0, 0])


def test_opo_by_hand() -> None:
    # baselines: (2 x 1 + 0 x 0 + 1 x 2) / (2 + 0 + 1) = 4 / 3; none; 0.3
    check(opo(MIXED).advantages_T, [-1 / 3, -1 / 3, 2 / 3, 0.7, 0, 0])


def test_gpg_by_hand() -> None:
    # 6 samples, 5 scores that are not 0: alpha = 1.2
    check(gpg(MIXED).advantages_T, [0, 0, 1.2, 0.84, 0, 0])
    # no score at all: alpha = 2 / max(1, 0), of differences that are 0
    check(gpg(trajectories([0, 0], [1, 1], [0.0, 0.0])).advantages_T, [0, 0])


def test_reinforce_pp_baseline_by_hand() -> None:
    # on tokens 0, 0, 1, 0.7, 0, 0: mean 1.7 / 6, squares 1.49 - 1.7^2 / 6, over 5
    deviation = np.sqrt((1.49 - 1.7**2 / 6) / 5 + 1e-8)
    want = [(x - 1.7 / 6) / deviation for x in (0, 0, 1, 0.7, 0, 0)]
    check(reinforce_pp_baseline(MIXED).advantages_T, want)


def test_pass_at_k_by_hand() -> None:
    # scores 1, 0, 2: best minus second 1, deviation 1. Scores 3, 1, 3: two best, so no lead.
    batch = trajectories([0, 0, 0, 1, 1, 1], [1, 1, 2, 1, 0, 1], [1.0, 0.0, 2.0, 3.0, 1.0, 3.0])
    lead = 1 / (1 + 1e-6)
    check(pass_at_k(batch).advantages_T, [0, 0, lead, lead, 0, 0])


def test_pass_at_k_refuses_a_group_of_one() -> None:
    with pytest.raises(ValueError, match=r"group 1 has one: set coordinator\.samples_per_prompt"):
        pass_at_k(MIXED)


def test_gdpo_by_hand() -> None:
    # Two samples: each grader's GRPO advantages are +-a, a = 1 / sqrt(2), whatever its scale (but for the
    # 1e-6). Weights 1, 0.5, 0: first sample a - a / 2 = h, second -h. On tokens h | -h, -h, -h: mean -h / 2,
    # squares (9/4 + 3/4) h^2 over 3 = h^2, whitened 3/2 | -1/2, -1/2, -1/2.
    batch = replace(
        trajectories([0, 0], [1, 3], [1.0, 2.0]),
        components_NK=np.array([[1.0, 0.0, 7.0], [0.0, 4.0, 9.0]]),
        weights_K=np.array([1.0, 0.5, 0.0]),
    )
    np.testing.assert_allclose(gdpo(batch).advantages_T, [1.5, -0.5, -0.5, -0.5], rtol=1e-6)


def test_gae_by_hand() -> None:
    # gamma = lam = 0.5. First sample, three tokens:
    #   delta_2 = 1 - 0.5 = 0.5,  delta_1 = 0.5 x 0.5 - 0.25 = 0,  delta_0 = 0.5 x 0.25 - 0.5 = -0.375
    #   A_2 = 0.5,  A_1 = 0 + 0.25 x 0.5 = 0.125,  A_0 = -0.375 + 0.25 x 0.125 = -0.34375
    # Then an empty response, then one token: A = 2 - 1 = 1.
    # Whitening: mean 1.28125 / 4 = 0.3203125, variance 0.973388671875 / 3
    batch = with_rewards([3, 0, 1], [0, 0, 1, 2], values=[0.5, 0.25, 0.5, 1])
    estimate = gae(batch, gamma=0.5, lam=0.5)
    check(estimate.returns_T, [0.15625, 0.375, 1, 2])
    centred = np.array([-0.6640625, -0.1953125, 0.1796875, 0.6796875])
    check(estimate.advantages_T, list(centred / np.sqrt(0.973388671875 / 3 + 1e-8)))


def test_vapo_by_hand() -> None:
    # length_alpha = 0.5. Four tokens: lambda 1 - 1 / 2 = 0.5, deltas 0, 0, 0, 1 - 0.5: A 1/16, 1/8, 1/4, 1/2.
    # One token: lambda 1 - 2, so 0; A = 0 - 0.25.
    # Whitening: mean 0.6875 / 5 = 0.1375, variance 0.3 / 4
    batch = with_rewards([4, 0, 1], [0, 0, 0, 1, 0], values=[0.5, 0.5, 0.5, 0.5, 0.25])
    estimate = vapo(batch, length_alpha=0.5)
    centred = np.array([-0.075, -0.0125, 0.1125, 0.3625, -0.3875])
    check(estimate.advantages_T, list(centred / np.sqrt(0.3 / 4 + 1e-8)))
    check(estimate.returns_T, [1, 1, 1, 1, 0])  # lambda 1: the rewards still to come
    check(vapo(batch, value_lam=0).returns_T, [0.5, 0.5, 0.5, 1, 0])  # lambda 0: reward and next value


def test_reinforce_pp_by_hand() -> None:
    # gamma = 0.5: 2; 1 + 0.5 x 2 = 2; 0 + 0.5 x 2 = 1; the other sample 4
    # whitening: mean 9 / 4, squares 1.25^2 + 2 x 0.25^2 + 1.75^2 = 4.75 over 3
    estimate = reinforce_pp(with_rewards([3, 0, 1], [0, 1, 2, 4]), gamma=0.5)
    check(estimate.returns_T, [1, 2, 2, 4])
    check(estimate.advantages_T, list(np.array([-1.25, -0.25, -0.25, 1.75]) / np.sqrt(4.75 / 3 + 1e-8)))


def test_remax_by_hand() -> None:
    batch = replace(with_rewards([3, 0, 1], [0, 1, 2, 4]), baselines_N=np.array([2.5, 9.0, 0.5]))
    estimate = remax(batch)
    check(estimate.returns_T, [3, 3, 2, 4])
    check(estimate.advantages_T, [0.5, 0.5, -0.5, 3.5])


def test_what_an_estimator_lacks_is_named() -> None:
    with pytest.raises(ValueError, match=r"gae needs .* add a \[critic\] table"):
        gae(MIXED)
    with pytest.raises(ValueError, match=r"vapo needs .* add a \[critic\] table"):
        vapo(MIXED)
    with pytest.raises(ValueError, match=r"set coordinator.greedy_baseline = true"):
        remax(MIXED)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_traits_are_what_estimators_do(name: str) -> None:
    """What one needs is what it fails without. A group-relative one does not see a constant that is added to
    a group's scores; one that reads components sees no other scores."""
    traits = TRAITS.get(name, ())
    groups, lengths = [0, 0, 0, 1, 1, 1], [2, 1, 3, 1, 1, 2]
    batch = trajectories(groups, lengths, [1.0, 0.5, 2.0, 0.3, 0.7, 0.1])
    given = {"values_T": np.full(10, 0.2), "baselines_N": np.full(6, 0.1)}
    for trait, field in (("needs_values", "values_T"), ("needs_baseline", "baselines_N")):
        lacking = replace(batch, **{key: value for key, value in given.items() if key != field})
        if trait in traits:
            with pytest.raises(ValueError, match=f"{name} "):
                ADVANTAGES[name](lacking)
        else:
            ADVANTAGES[name](lacking)
    advantages_T = ADVANTAGES[name](replace(batch, **given)).advantages_T
    shifted = trajectories(groups, lengths, [2.0, 1.5, 3.0, 0.3, 0.7, 0.1])
    is_same = np.allclose(ADVANTAGES[name](replace(shifted, **given)).advantages_T, advantages_T, atol=1e-9)
    assert is_same == ("group_relative" in traits)
    squared = replace(batch, **given, scores_N=batch.scores_N**2, rewards_T=batch.rewards_T**2)
    is_same = np.array_equal(ADVANTAGES[name](squared).advantages_T, advantages_T)
    assert is_same == ("reads_components" in traits)


def test_whitening_of_one_token_or_none() -> None:
    check(whiten(np.array([5.0])), [0])
    check(whiten(np.array([])), [])


def test_whitening_of_equal_values_is_zero() -> None:
    check(whiten(np.full(7, 0.1)), [0] * 7)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("lengths", [[0, 0], [0, 1]])
def test_batches_with_hardly_a_token_are_finite(name: str, lengths: list[int]) -> None:
    batch = replace(
        trajectories([0, 0], lengths, [1.0, 0.0]), values_T=np.ones(sum(lengths)), baselines_N=np.ones(2)
    )
    with np.errstate(all="raise"):
        estimate = ADVANTAGES[name](batch)
    for got_T in (estimate.advantages_T, estimate.returns_T):
        assert got_T.shape == (sum(lengths),)
        assert np.isfinite(got_T).all()


# The recursions are defined on padded rows with a mask, where what is carried moves only at masked-in tokens.


def gae_on_rows(
    rewards_NL: Float64, values_NL: Float64, mask_NL: Bool, gamma: float, lam_N: Float64
) -> tuple[Float64, Float64]:
    """Advantages before whitening, and returns."""
    advantages_NL = np.zeros(mask_NL.shape)
    for n, mask_L in enumerate(mask_NL):
        next_value = advantage = 0.0
        for t in reversed(range(len(mask_L))):
            if mask_L[t]:
                delta = rewards_NL[n, t] + gamma * next_value - values_NL[n, t]
                advantage = delta + gamma * lam_N[n] * advantage
                next_value = values_NL[n, t]
            advantages_NL[n, t] = advantage
    return advantages_NL, advantages_NL + values_NL


def returns_on_rows(rewards_NL: Float64, mask_NL: Bool, gamma: float) -> Float64:
    returns_NL = np.zeros(mask_NL.shape)
    for n, mask_L in enumerate(mask_NL):
        running = 0.0
        for t in reversed(range(len(mask_L))):
            if mask_L[t]:
                running = rewards_NL[n, t] + gamma * running
            returns_NL[n, t] = running
    return returns_NL


def whitened_by_definition(values_T: Float64) -> Float64:
    return (values_T - np.mean(values_T)) / np.sqrt(np.var(values_T, ddof=1) + 1e-8)


masks = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=5)
)


@given(masks, st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_recursions_agree_with_loops_over_masked_rows(
    mask: list[list[bool]], gamma: float, lam: float, seed: int
) -> None:
    mask_NL = np.array(mask)
    if mask_NL.sum() < 2:
        return  # whitening is not defined by the source
    rewards_NL, values_NL = np.random.default_rng(seed).normal(size=(2, *mask_NL.shape))
    lengths_N = mask_NL.sum(axis=1)
    batch = with_rewards(list(lengths_N), list(rewards_NL[mask_NL]), list(values_NL[mask_NL]))

    advantages_NL, returns_NL = gae_on_rows(rewards_NL, values_NL, mask_NL, gamma, np.full(len(mask_NL), lam))
    estimate = gae(batch, gamma=gamma, lam=lam)
    np.testing.assert_allclose(estimate.returns_T, returns_NL[mask_NL], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        estimate.advantages_T, whitened_by_definition(advantages_NL[mask_NL]), rtol=1e-7, atol=1e-7
    )

    adaptive_N = np.array([max(0.0, 1 - 1 / (0.4 * length)) if length else 0.0 for length in lengths_N])
    advantages_NL, _ = gae_on_rows(rewards_NL, values_NL, mask_NL, gamma, adaptive_N)
    estimate = vapo(batch, gamma=gamma, value_lam=lam, length_alpha=0.4)
    np.testing.assert_allclose(estimate.returns_T, returns_NL[mask_NL], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        estimate.advantages_T, whitened_by_definition(advantages_NL[mask_NL]), rtol=1e-7, atol=1e-7
    )

    returns_NL = returns_on_rows(rewards_NL, mask_NL, gamma)
    estimate = reinforce_pp(batch, gamma=gamma)
    np.testing.assert_allclose(estimate.returns_T, returns_NL[mask_NL], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(
        estimate.advantages_T, whitened_by_definition(returns_NL[mask_NL]), rtol=1e-7, atol=1e-7
    )


@st.composite
def batches(draw: st.DrawFn, min_group: int) -> Trajectories:
    """Groups of different sizes, empty responses, equal scores (they are multiples of a half)."""
    sizes = draw(st.lists(st.integers(min_group, 4), min_size=1, max_size=4))
    lengths_N = np.array(draw(st.lists(st.integers(0, 5), min_size=sum(sizes), max_size=sum(sizes))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_samples, num_tokens = len(lengths_N), lengths_N.sum()
    return Trajectories(
        group_N=np.repeat(np.arange(len(sizes)), sizes),
        lengths_N=lengths_N,
        scores_N=rng.integers(-2, 3, num_samples) / 2,
        rewards_T=rng.normal(size=num_tokens),
        components_NK=rng.integers(0, 3, (num_samples, 2)) / 2,
        weights_K=np.array([1.0, 0.5]),
        values_T=rng.normal(size=num_tokens),
        baselines_N=rng.normal(size=num_samples),
    )


@pytest.mark.parametrize("name", ADVANTAGES)
@given(data=st.data())
def test_order_of_samples_does_not_matter(name: str, data: st.DataObject) -> None:
    batch = data.draw(batches(min_group=2 if name == "pass_at_k" else 1))
    order_N = np.array(data.draw(st.permutations(range(len(batch.lengths_N)))))
    first_N = np.cumsum(batch.lengths_N) - batch.lengths_N
    order_T = np.concatenate([np.arange(first_N[n], first_N[n] + batch.lengths_N[n]) for n in order_N])
    assert batch.values_T is not None
    assert batch.baselines_N is not None
    reordered = Trajectories(
        batch.group_N[order_N],
        batch.lengths_N[order_N],
        batch.scores_N[order_N],
        batch.rewards_T[order_T],
        batch.components_NK[order_N],
        batch.weights_K,
        batch.values_T[order_T],
        batch.baselines_N[order_N],
    )
    estimate, again = ADVANTAGES[name](batch), ADVANTAGES[name](reordered)
    np.testing.assert_allclose(again.advantages_T, estimate.advantages_T[order_T], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(again.returns_T, estimate.returns_T[order_T], rtol=1e-9, atol=1e-9)
