"""PF-PPO's sample weights against values worked out by hand, and re-ordering."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.algorithm.reweight import REWEIGHTS, by_power, max_min, max_random


def test_power_by_hand() -> None:
    # 1, 4, 0 with mean 5/3; to the power of one 1, 2, 0 with mean 1; of none, all alike
    scores = np.array([1.0, -2.0, 0.0])
    np.testing.assert_allclose(by_power(scores), [0.6, 2.4, 0], atol=1e-7)
    np.testing.assert_allclose(by_power(scores, power=1), [1, 2, 0], atol=1e-7)
    np.testing.assert_allclose(by_power(scores, power=0), [1, 1, 1])
    with pytest.raises(ValueError, match=r"algorithm.reweight.power = -1 is negative: use 0"):
        by_power(scores, power=-1)


def test_max_min_by_hand() -> None:
    # 1, 1, 1, 0 with mean 3/4
    np.testing.assert_allclose(max_min(np.array([3.0, 1.0, 1.0, 2.0])), [4 / 3, 4 / 3, 4 / 3, 0], atol=1e-7)


def test_max_random_by_hand() -> None:
    # 0.4, 0.1, 0.1 with mean 0.2
    np.testing.assert_allclose(max_random(np.array([1.0, 0.0, -1.0])), [2, 0.5, 0.5], atol=1e-7)


@pytest.mark.parametrize("name", REWEIGHTS)
@pytest.mark.parametrize("score", [0.0, 0.7])
def test_equal_scores_weigh_one(name: str, score: float) -> None:
    np.testing.assert_allclose(REWEIGHTS[name](np.full(5, score)), np.ones(5))


@pytest.mark.parametrize("name", REWEIGHTS)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=8), st.data())
def test_order_does_not_matter_and_the_mean_is_one(name: str, halves: list[int], data: st.DataObject) -> None:
    scores_N = np.array(halves) / 2
    order_N = np.array(data.draw(st.permutations(range(len(halves)))))
    weights_N = REWEIGHTS[name](scores_N)
    np.testing.assert_allclose(REWEIGHTS[name](scores_N[order_N]), weights_N[order_N], rtol=1e-9)
    assert weights_N.mean() == pytest.approx(1, rel=1e-12)
