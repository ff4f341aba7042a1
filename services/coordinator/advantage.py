"""Advantage estimators: numpy, pure. Shapes: N samples."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.wire.types import Int64

Float64 = NDArray[np.float64]


def grpo(scores_N: Float64, group_N: Int64) -> Float64:
    """Group-relative advantage of each sample: (s - mean_g) / (std_g + 1e-6), std unbiased.

    A group of one sample keeps its score. Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3.
    `group_N` numbers the groups from 0.
    """
    count_G = np.bincount(group_N)
    mean_G = np.bincount(group_N, scores_N) / count_G
    centred_N = scores_N - mean_G[group_N]
    variance_G = np.bincount(group_N, centred_N**2) / np.maximum(count_G - 1, 1)
    advantages_N = centred_N / (np.sqrt(variance_G)[group_N] + 1e-6)
    return np.where(count_G[group_N] == 1, scores_N, advantages_N)


ADVANTAGES: dict[str, Callable[[Float64, Int64], Float64]] = {"grpo": grpo}
