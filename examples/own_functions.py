"""Functions that examples/own_functions.toml names. Only the service that calls one imports this file:
the coordinator the advantage and the filter, the reward service the grader, the trainer the loss.

Keyword-only parameters are set next to the name in the config. N samples, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from atoll import Grade, ScoreItem
from atoll.coordinator.algorithm.estimates import Estimate, Trajectories
from atoll.wire.types import Group

if TYPE_CHECKING:  # the coordinator and the reward service run without torch
    from torch import Tensor

    from atoll.trainer.losses.loss import PolicyTokens


def close(item: ScoreItem, *, tolerance: int = 10) -> float | Grade:
    """1 for the right number, down to 0 for one that is `tolerance` away. The share of responses that are no
    number becomes a metric."""
    if not item.response.isdecimal():
        return Grade(0.0, "no number")
    return max(0.0, 1 - abs(int(item.response) - int(item.ground_truth)) / tolerance)


def not_hopeless(group: Group, *, minimum: float = 0.0) -> bool:
    """Leaves out prompts for which no sample scores more than `minimum`."""
    return any(sample.score > minimum for sample in group.samples)


def above_median(trajectories: Trajectories, *, limit: float = 1.0) -> Estimate:
    """How far a score is above the median of its group, within +-limit."""
    scores_N, group_N = trajectories.scores_N, trajectories.group_N
    median_G = np.array([np.median(scores_N[group_N == group]) for group in np.unique(group_N)])
    advantages_T = trajectories.spread(np.clip(scores_N - median_G[group_N], -limit, limit))
    return Estimate(advantages_T, returns_T=advantages_T)


def asymmetric(tokens: PolicyTokens, *, negative: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """-A ratio, with `negative` times the weight where A < 0. The dictionary becomes metrics."""
    log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
    ratio_N = log_ratio_N.exp()
    weight_N = 1 - (1 - negative) * (tokens.advantages_N < 0).float()
    loss_N = -weight_N * tokens.advantages_N * ratio_N
    return loss_N, {"actor/ratio": ratio_N, "actor/ppo_kl": -log_ratio_N}
