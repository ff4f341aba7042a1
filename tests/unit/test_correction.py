"""Mismatch correction against values worked out by hand, and re-ordering."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.algorithm.correction import Correction, combine, correct

# Three samples of 2, 0 and 1 tokens; old - rollout = ln 2, -ln 4 | | ln 3, so the tokens weigh 2, 1/4, 3;
# the first sample as a whole 2 / 4 = 1/2, its tokens' geometric mean sqrt(1/2).
LENGTHS = np.array([2, 0, 1])
ROLLOUT = np.array([-1.0, -2.0, -3.0])
OLD = ROLLOUT + np.log([2, 1 / 4, 3])


def corrected(level: str, method: str, low: float, high: float) -> Correction:
    return correct(OLD, ROLLOUT, LENGTHS, level, method, low, high)


@pytest.mark.parametrize(
    ("level", "method", "low", "high", "weights", "keep", "masked"),
    [
        ("token", "truncate", 0.0, 2.5, [2, 0.25, 2.5], [1, 1, 1], 0),
        ("token", "mask", 0.5, 2.5, [2, 0, 0], [1, 1, 1], 2 / 3),
        ("token", "mask", 0.0, 2.5, [2, 0.25, 0], [1, 1, 1], 1 / 3),
        ("token", "reject", 0.5, 2.5, [1, 1, 1], [1, 0, 0], 2 / 3),
        ("sequence", "truncate", 0.0, 2.5, [0.5, 0.5, 2.5], [1, 1, 1], 0),
        ("sequence", "mask", 0.4, 2.5, [0.5, 0.5, 0], [1, 1, 1], 1 / 3),
        ("sequence", "reject", 0.6, 4.0, [1, 1, 1], [0, 0, 1], 2 / 3),
        ("geometric", "truncate", 0.0, 2.5, [0.5**0.5, 0.5**0.5, 2.5], [1, 1, 1], 0),
        ("geometric", "mask", 0.6, 2.5, [0.5**0.5, 0.5**0.5, 0], [1, 1, 1], 1 / 3),
        ("geometric", "reject", 0.6, 2.5, [1, 1, 1], [1, 1, 0], 1 / 3),
    ],
)
def test_weights_by_hand(
    level: str, method: str, low: float, high: float, weights: list[float], keep: list[int], masked: float
) -> None:
    correction = corrected(level, method, low, high)
    np.testing.assert_allclose(correction.weights_T, weights, rtol=1e-12)
    np.testing.assert_array_equal(correction.keep_T, np.array(keep, np.bool_))
    assert correction.metrics["rollout_corr/masked_fraction"] == pytest.approx(masked)


def test_metrics_by_hand() -> None:
    # the same for every method: they describe the weights before anything is done about them
    assert corrected("token", "truncate", 0.0, 2.5).metrics == pytest.approx(
        {
            "rollout_corr/is_weight_mean": 5.25 / 3,
            # variance: mean of the squares less the square of the mean
            "rollout_corr/is_weight_std": ((4 + 1 / 16 + 9) / 3 - 1.75**2) ** 0.5,
            "rollout_corr/is_weight_max": 3,
            "rollout_corr/is_weight_min": 0.25,
            "rollout_corr/ess": 5.25**2 / (3 * (4 + 1 / 16 + 9)),
            "rollout_corr/truncated_fraction": 1 / 3,  # the weight 3
            "rollout_corr/masked_fraction": 0,
            # mean of rollout - old: -(ln 2 - ln 4 + ln 3) / 3
            "rollout_corr/kl": np.log(2 / 3) / 3,
            # mean of w - ln w - 1: (5.25 - ln(3 / 2) - 3) / 3
            "rollout_corr/k3_kl": (2.25 - np.log(3 / 2)) / 3,
            # of the samples with tokens: mean logprobs -1.5 and -3; old ones more by ln(1/2) / 2 and ln 3
            "rollout_corr/rollout_ppl": (np.exp(1.5) + np.exp(3)) / 2,
            "rollout_corr/training_ppl": (np.exp(1.5) * 2**0.5 + np.exp(3) / 3) / 2,
            "rollout_corr/chi2_token": (4 + 1 / 16 + 9) / 3 - 1,
            "rollout_corr/chi2_seq": (0.25 + 9) / 2 - 1,
        },
        rel=1e-12,
    )
    # of the two samples that have tokens: weights 1/2 and 3
    metrics = corrected("sequence", "truncate", 0.0, 2.5).metrics
    assert metrics["rollout_corr/is_weight_mean"] == pytest.approx(1.75)
    assert metrics["rollout_corr/ess"] == pytest.approx(3.5**2 / (2 * (0.25 + 9)))
    assert metrics["rollout_corr/kl"] == pytest.approx(np.log(2 / 3) / 3)


def test_tokens_of_probability_zero() -> None:
    """-inf - -inf is no number, and the error blamed rewards."""
    old, rollout = np.array([-np.inf, -1.0, -np.inf]), np.array([-np.inf, -1.0, -1.0])
    with np.errstate(all="raise"):
        token = correct(old, rollout, np.array([3]), "token", "truncate", 0.0, 2.0)
        both = correct(old[:2], rollout[:2], np.array([2]), "sequence", "truncate", 0.0, 2.0)
    np.testing.assert_allclose(token.weights_T, [1, 1, np.exp(-20)])
    np.testing.assert_array_equal(both.weights_T, [1, 1])
    assert both.metrics["rollout_corr/kl"] == both.metrics["rollout_corr/chi2_seq"] == 0


def test_weights_and_rejection_together() -> None:
    """verl's preset of both: truncated weights of tokens, and samples with an outlying mean rejected."""
    weighed, rejected = corrected("token", "truncate", 0.0, 2.5), corrected("geometric", "reject", 0.6, 2.5)
    both = combine([weighed, rejected])
    np.testing.assert_allclose(both.weights_T, [2, 0.25, 2.5])
    np.testing.assert_array_equal(both.keep_T, [True, True, False])  # a mean ratio of 3
    assert both.metrics == weighed.metrics | {"rollout_corr/masked_fraction": pytest.approx(1 / 3)}
    assert combine([weighed]).metrics == weighed.metrics
    nothing = correct(np.zeros(0), np.zeros(0), np.array([0]), "token", "reject", 0.5, 2.0)
    assert combine([nothing, nothing]).metrics == {}


def test_log_weights_are_clamped_at_their_own_level() -> None:
    zeros, lengths = np.zeros(2), np.array([2])
    old = np.array([30.0, -25.0])

    def weights(level: str) -> np.ndarray:
        return correct(old, zeros, lengths, level, "truncate", 0.0, 1e12).weights_T

    np.testing.assert_allclose(weights("token"), [np.exp(20), np.exp(-20)])
    np.testing.assert_allclose(weights("sequence"), [np.exp(5)] * 2)  # 30 - 25, not 20 - 20
    np.testing.assert_allclose(weights("geometric"), [np.exp(2.5)] * 2)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_no_mismatch_and_no_tokens(level: str) -> None:
    same = correct(ROLLOUT, ROLLOUT, LENGTHS, level, "mask", 0.5, 2.0)
    np.testing.assert_array_equal(same.weights_T, [1, 1, 1])
    assert same.metrics["rollout_corr/ess"] == 1
    with np.errstate(all="raise"):
        empty = correct(np.zeros(0), np.zeros(0), np.array([0, 0]), level, "reject", 0.5, 2.0)
    assert empty.weights_T.shape == empty.keep_T.shape == (0,)
    assert empty.metrics == {}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match='level "turn" is unknown: use "token", "sequence"'):
        corrected("turn", "mask", 0.0, 2.0)
    with pytest.raises(ValueError, match='method "clip" is unknown: use "truncate", "mask"'):
        corrected("token", "clip", 0.0, 2.0)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 2**32 - 1), st.data())
def test_order_of_samples_does_not_matter(lengths: list[int], seed: int, data: st.DataObject) -> None:
    lengths_N = np.array(lengths)
    old_T, rollout_T = np.random.default_rng(seed).normal(size=(2, lengths_N.sum()))
    order_N = np.array(data.draw(st.permutations(range(len(lengths)))))
    first_N = np.cumsum(lengths_N) - lengths_N
    order_T = np.concatenate([np.arange(first_N[n], first_N[n] + lengths_N[n]) for n in order_N])
    for level in ("token", "sequence", "geometric"):
        for method in ("truncate", "mask", "reject"):
            before = correct(old_T, rollout_T, lengths_N, level, method, 0.5, 2.0)
            after = correct(old_T[order_T], rollout_T[order_T], lengths_N[order_N], level, method, 0.5, 2.0)
            np.testing.assert_allclose(after.weights_T, before.weights_T[order_T], rtol=1e-9)
            np.testing.assert_array_equal(after.keep_T, before.keep_T[order_T])
            assert after.metrics == pytest.approx(before.metrics, rel=1e-9, abs=1e-9)
