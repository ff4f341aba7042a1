"""Policy losses, as pure functions of log-probabilities; the value loss.

A loss says what each token contributes; the caller sums loss_weights * token loss. The weights carry the
normalisation over the whole minibatch and all ranks, so nothing here divides by a number of tokens or
samples. Beside its tokens' losses, each function returns token values that are reported as means.

Letters in shapes: N trained tokens (loss weight not 0) of a micro-batch. A sample is never split over
micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 still fits fp32 with room for sums


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """What a policy loss reads of its N tokens."""

    logprobs_N: Tensor  # under the policy that is trained: carries the gradient
    old_logprobs_N: Tensor  # under the policy that the ratio is taken to
    advantages_N: Tensor
    sample_N: Tensor  # int64, number of each token's sample, ascending from 0
    chosen_N: Tensor  # bool, what the loss's entry in SELECTIONS picked out of the whole minibatch

    def sample_mean(self, values_N: Tensor) -> Tensor:
        """[N] the mean over the tokens of the same sample."""
        num_samples = int(self.sample_N.max()) + 1 if len(self.sample_N) else 0
        sums = values_N.new_zeros(num_samples).index_add(0, self.sample_N, values_N)
        counts = torch.bincount(self.sample_N, minlength=num_samples)
        return (sums / counts)[self.sample_N]


TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # (tokens, *, parameters of its own)


def ppo_clip(
    tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprob - old logprob).

    Where A < 0, at most -A dual_clip. Source: https://arxiv.org/abs/1707.06347; dual clip:
    https://arxiv.org/abs/1912.09729; clip_high > clip_low is DAPO's clip-higher.
    """
    log_ratio_N = (tokens.logprobs_N - tokens.old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    free_N = -tokens.advantages_N * ratio_N
    clipped_N = -tokens.advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = torch.maximum(free_N, clipped_N)
    ceiling_N = -tokens.advantages_N * dual_clip
    is_capped_N = (tokens.advantages_N < 0) & (loss_N > ceiling_N)
    return torch.where(is_capped_N, ceiling_N, loss_N), {
        "actor/pg_clipfrac": clipped_N > free_N,
        "actor/pg_clipfrac_lower": is_capped_N,
        "actor/ppo_kl": -log_ratio_N,
        "actor/ratio": ratio_N,
    }


LOSSES: Mapping[str, TokenLoss] = {
    "ppo_clip": ppo_clip,
}

# For losses that act on chosen tokens: which ones, judged over the whole minibatch, so that the choice does
# not depend on how it is cut.
SELECTIONS: Mapping[str, Callable[..., Tensor]] = {}
