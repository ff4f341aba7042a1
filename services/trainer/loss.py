"""Token losses, as pure functions of log-probabilities. Definitions: verl's core_algos, PPO (Schulman 2017).

A loss is the sum of weights_N * token loss. The weights carry the normalisation over the whole
minibatch and all ranks, so nothing here divides. Beside the loss, each function returns sums over its
tokens of what is reported as a mean; the caller adds them up over micro-batches and ranks.

Letters in shapes: N trained tokens (loss weight not 0).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.wire.types import LossSettings

MAX_LOG_RATIO = 20.0  # e^20 still fits fp32 with room for sums


TokenLoss = Callable[[Tensor, Tensor, Tensor, Tensor, LossSettings], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class Loss:
    apply: TokenLoss  # (logprobs_N, old_logprobs_N, advantages_N, weights_N, settings)
    name: str  # metric that reports the loss itself
    means: tuple[str, ...]  # metrics whose sums `apply` returns
    on_rollouts: bool  # the tokens were drawn by a rollout engine, which sent its logprobs along


def ppo_clip(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprob - old logprob)."""
    log_ratio_N = (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    free_N = -advantages_N * ratio_N
    clipped_N = -advantages_N * ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss = (weights_N * torch.maximum(free_N, clipped_N)).sum()
    return loss, {
        "actor/pg_clipfrac": (clipped_N > free_N).sum(),
        "actor/ppo_kl": -log_ratio_N.detach().sum(),
        "actor/ratio": ratio_N.detach().sum(),
    }


def nll(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    settings: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood, for supervised warm-up."""
    return -(weights_N * logprobs_N).sum(), {}


LOSSES: Mapping[str, Loss] = {
    "ppo_clip": Loss(
        ppo_clip, "actor/pg_loss", ("actor/pg_clipfrac", "actor/ppo_kl", "actor/ratio"), on_rollouts=True
    ),
    "nll": Loss(nll, "actor/nll_loss", (), on_rollouts=False),
}
