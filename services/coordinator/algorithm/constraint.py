"""Safe-RLHF: reward under a limit on the mean cost. Pure. T: loss-masked tokens of all samples.

Source: https://arxiv.org/abs/2310.12773.
"""

import math

from atoll.coordinator.algorithm.estimates import Float64

MIN_LOG_MULTIPLIER = math.log(1e-8)  # negligible in an advantage; below, e^x would underflow to 0


def update_multiplier(
    log_multiplier: float, mean_cost: float, *, limit: float, learning_rate: float, maximum: float
) -> float:
    """The logarithm of the next multiplier lambda, by one step of gradient ascent on it.

    log lambda += learning_rate (mean_cost - limit) lambda, and lambda <= maximum. `mean_cost` is the mean
    over the batch's samples. Updating the logarithm keeps lambda above 0.
    """
    step = learning_rate * (mean_cost - limit) * math.exp(log_multiplier)
    return min(max(log_multiplier + step, MIN_LOG_MULTIPLIER), math.log(maximum))


def combine_advantages(
    reward_advantages_T: Float64, cost_advantages_T: Float64, multiplier: float
) -> Float64:
    """[T] (A_r - lambda A_c) / (1 + lambda): the larger lambda, the more a low cost counts."""
    return (reward_advantages_T - multiplier * cost_advantages_T) / (1 + multiplier)
