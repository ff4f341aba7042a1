"""KL as a part of the reward, against values worked out by hand."""

import numpy as np
import pytest

from atoll.coordinator.algorithm.kl import adapt_kl_coef, kl_penalty

# x = logprob - reference logprob = 0.5, -1, 0, and two far beyond the clamps: e^1000 would overflow
LOGPROBS = np.array([-1.0, -3.0, -0.25, 0.0, -1000.0], np.float32)
REFERENCE = np.array([-1.5, -2.0, -0.25, -40.0, 0.0], np.float32)


@pytest.mark.parametrize(
    ("estimator", "want"),
    [
        ("k1", [0.5, -1, 0, 40, -1000]),
        ("abs", [0.5, 1, 0, 40, 1000]),
        ("k2", [0.125, 0.5, 0, 800, 500_000]),
        # e^-0.5 + 0.5 - 1, e^1 - 1 - 1, 0; x clamped to 20: e^-20 + 20 - 1, to -20: e^20 - 21; both to 10
        ("k3", [np.exp(-0.5) - 0.5, np.e - 2, 0, 10, 10]),
    ],
)
def test_penalty_by_hand(estimator: str, want: list[float]) -> None:
    with np.errstate(over="raise"):
        got = kl_penalty(LOGPROBS, REFERENCE, estimator)
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_plus_changes_the_gradient_and_not_the_value(estimator: str) -> None:
    np.testing.assert_array_equal(
        kl_penalty(LOGPROBS, REFERENCE, estimator + "+"), kl_penalty(LOGPROBS, REFERENCE, estimator)
    )


def test_estimators_that_a_reward_cannot_have() -> None:
    with pytest.raises(ValueError, match='"full" sums over the vocabulary'):
        kl_penalty(LOGPROBS, REFERENCE, "full")
    with pytest.raises(ValueError, match='"k4" is unknown'):
        kl_penalty(LOGPROBS, REFERENCE, "k4")


@pytest.mark.parametrize(
    ("kl", "want"),
    [
        (0.0525, 0.1005),  # 5 % above the target: 0.1 (1 + 0.05 x 100 / 1000)
        (0.3, 0.102),  # far above: 0.2 at most
        (0.0, 0.098),  # far below
        (0.05, 0.1),
    ],
)
def test_adaptive_coefficient_by_hand(kl: float, want: float) -> None:
    assert adapt_kl_coef(0.1, kl, target=0.05, horizon=1000, num_samples=100) == pytest.approx(
        want, rel=1e-12
    )
