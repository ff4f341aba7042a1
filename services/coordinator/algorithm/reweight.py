"""PF-PPO: how much each sample of a batch counts, by its score. Pure numpy. N: samples.

The paper resamples the batch with replacement, sample i with probability p_i. Here sample i has the weight
N p_i, the number of times that it is expected to be drawn: the same gradient in expectation, without the
noise of the draw and without training on any sample twice. Weights have mean 1, so the loss keeps its scale.

Source: Policy Filtration for PPO, https://arxiv.org/abs/2409.06957.
"""

from collections.abc import Callable, Mapping
from typing import Annotated

import numpy as np
from annotated_types import Ge

from atoll.coordinator.algorithm.estimates import Float64

Reweight = Callable[..., Float64]  # (scores_N, *, parameters of its own) -> weights_N


def by_power(scores_N: Float64, *, power: Annotated[float, Ge(0)] = 2.0) -> Float64:
    """[N] p_i proportional to |s_i|^power: strong scores of either sign count most.

    Raises ValueError for a negative power, which has no weight for a score of 0.
    """
    if power < 0:
        raise ValueError(f"algorithm.reweight.power = {power} is negative: use 0 (uniform) or more")
    return _with_mean_one(np.abs(scores_N) ** power)


def max_min(scores_N: Float64) -> Float64:
    """[N] only the samples with the batch's best or worst score count, equally."""
    return _with_mean_one((scores_N == scores_N.max()) | (scores_N == scores_N.min()))


def max_random(scores_N: Float64) -> Float64:
    """[N] samples with the batch's best score count four times as much as the others."""
    return _with_mean_one(np.where(scores_N == scores_N.max(), 0.4, 0.1))


REWEIGHTS: Mapping[str, Reweight] = {
    "pow": by_power,
    "max_min": max_min,
    "max_random": max_random,
}


def _with_mean_one(preferences_N: Float64) -> Float64:
    """[N] the 1e-8 makes equal weights of preferences that are all 0."""
    preferences_N = preferences_N + 1e-8
    return np.asarray(preferences_N / preferences_N.mean())
