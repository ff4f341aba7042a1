"""Advantage estimators. Pure numpy.

Letters in shapes: N samples, G groups, K graders, T loss-masked tokens of all samples, one sample after
the other, each sample's in the order in which they were produced. Prompt, tool and template tokens are
not among them, so what an estimator carries from token to token crosses them unchanged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.wire.types import Int64

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """A batch as estimators see it."""

    group_N: Int64  # ascending from 0
    lengths_N: Int64  # tokens of each sample; 0 for an empty response
    scores_N: Float64  # sum of a sample's rewards, a KL penalty in the reward included
    rewards_T: Float64  # at the token that earned it; an empty response has none, though it has a score
    components_NK: Float64  # what each grader gave, before its weight
    weights_K: Float64  # of the graders
    values_T: Float64 | None = None  # the critic's, of the state before each token
    baselines_N: Float64 | None = None  # score of the greedy sample of the same prompt

    def spread(self, per_sample_N: Float64) -> Float64:
        """[T] each sample's number on all of its tokens."""
        return np.repeat(per_sample_N, self.lengths_N)


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    advantages_T: Float64
    returns_T: Float64  # what a critic learns


Estimator = Callable[..., Estimate]  # (trajectories, *, parameters of its own)


def grpo(trajectories: Trajectories) -> Estimate:
    """Group-relative: (s - mean_g) / (std_g + 1e-6), std unbiased. A group of one sample keeps its score.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3.
    """
    scores_N, group_N = trajectories.scores_N, trajectories.group_N
    count_G = np.bincount(group_N)
    mean_G = np.bincount(group_N, scores_N) / count_G
    centred_N = scores_N - mean_G[group_N]
    variance_G = np.bincount(group_N, centred_N**2) / np.maximum(count_G - 1, 1)
    advantages_N = centred_N / (np.sqrt(variance_G)[group_N] + 1e-6)
    advantages_T = trajectories.spread(np.where(count_G[group_N] == 1, scores_N, advantages_N))
    return Estimate(advantages_T, advantages_T)


ADVANTAGES: Mapping[str, Estimator] = {
    "grpo": grpo,
}
