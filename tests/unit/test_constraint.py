"""Safe-RLHF's multiplier and combined advantage against values worked out by hand."""

import math

import numpy as np
import pytest

from atoll.coordinator.algorithm.constraint import combine_advantages, update_multiplier


@pytest.mark.parametrize(
    ("multiplier", "mean_cost", "log_step"),
    [
        (1.0, 3.0, 0.2),  # 0.1 x (3 - 1) x 1
        (2.0, 3.0, 0.4),  # 0.1 x (3 - 1) x 2
        (2.0, 0.5, -0.1),  # 0.1 x (0.5 - 1) x 2
        (2.0, 1.0, 0.0),
    ],
)
def test_update_by_hand(multiplier: float, mean_cost: float, log_step: float) -> None:
    got = update_multiplier(math.log(multiplier), mean_cost, limit=1.0, learning_rate=0.1, maximum=100.0)
    assert got == pytest.approx(math.log(multiplier) + log_step, abs=1e-12)


def test_multiplier_stays_between_zero_and_its_maximum() -> None:
    high = update_multiplier(0.0, 1e9, limit=0.0, learning_rate=0.1, maximum=5.0)
    assert math.exp(high) == pytest.approx(5)
    low = update_multiplier(0.0, -1e9, limit=0.0, learning_rate=0.1, maximum=5.0)
    assert math.exp(low) > 0
    # and it comes back
    assert update_multiplier(low, 1e9, limit=0.0, learning_rate=0.1, maximum=5.0) > low


def test_combined_by_hand() -> None:
    reward, cost = np.array([1.0, -1.0]), np.array([0.5, 2.0])
    np.testing.assert_allclose(
        combine_advantages(reward, cost, 1.0), [0.25, -1.5]
    )  # (1 - 0.5) / 2, (-1 - 2) / 2
    np.testing.assert_allclose(
        combine_advantages(reward, cost, 3.0), [-0.125, -1.75]
    )  # (1 - 1.5) / 4, (-1 - 6) / 4
