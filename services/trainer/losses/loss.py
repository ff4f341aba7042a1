"""Policy losses, as pure functions of log-probabilities; the value loss.

A loss says what each token contributes; the caller sums loss_weights * token loss. The weights carry the
normalisation over the whole minibatch and all ranks, so nothing here divides by a number of tokens or
samples. Beside its tokens' losses, each function returns token values that are reported as means.

Importance weights that correct for the rollout engine come in with the advantages. So AReaL's decoupled PPO
(https://arxiv.org/abs/2505.24298) is `ppo_clip` around the trainer's own old logprobs, the proximal policy,
with advantages that carry the weight from the behaviour policy to it.

Letters in shapes: N trained tokens (loss weight not 0) of a micro-batch; N may be 0. A sample is never
split over micro-batches. A selection's N tokens are those of the whole minibatch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

MAX_LOG_RATIO = 20.0  # e^20 still fits fp32 with room for sums


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTokens:
    """What a policy loss reads of its N tokens."""

    logprobs_N: Tensor  # under the policy that is trained: carries the gradient
    old_logprobs_N: Tensor  # under the policy that the ratio is taken to
    advantages_N: Tensor
    sample_N: Tensor  # int64, number of each token's sample, from 0 without gaps
    chosen_N: Tensor  # bool, what the loss's entry in SELECTIONS picked out of the whole minibatch

    def sample_mean(self, values_N: Tensor) -> Tensor:
        """[N] the mean over the tokens of the same sample."""
        zeros_N = torch.zeros_like(values_N)  # a slot for each sample: there are at most as many as tokens
        sums_N = zeros_N.index_add(0, self.sample_N, values_N)
        counts_N = zeros_N.index_add(0, self.sample_N, torch.ones_like(values_N))
        return sums_N[self.sample_N] / counts_N[self.sample_N]


TokenLoss = Callable[..., tuple[Tensor, dict[str, Tensor]]]  # (tokens, *, parameters of its own)


def ppo_clip(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Ge(0), Le(1)] = 0.2,
    clip_high: Annotated[float, Ge(0)] = 0.2,
    dual_clip: Annotated[float, Gt(1)] = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprob - old logprob).

    Where A < 0, at most -A dual_clip. Source: https://arxiv.org/abs/1707.06347; dual clip:
    https://arxiv.org/abs/1912.09729; clip_high > clip_low is DAPO's clip-higher.
    """
    log_ratio_N, ratio_N = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    free_N, clipped_N = _surrogates(ratio_N, tokens.advantages_N, clip_low, clip_high)
    loss_N = torch.maximum(free_N, clipped_N)
    ceiling_N = -tokens.advantages_N * dual_clip
    is_capped_N = (tokens.advantages_N < 0) & (loss_N > ceiling_N)
    return torch.where(is_capped_N, ceiling_N, loss_N), {
        "actor/pg_clipfrac": clipped_N > free_N,
        "actor/pg_clipfrac_lower": is_capped_N,
        "actor/ppo_kl": -log_ratio_N,
        "actor/ratio": ratio_N,
    }


def gspo(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Ge(0), Le(1)] = 3e-4,
    clip_high: Annotated[float, Ge(0)] = 4e-4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip on the sequence ratio s = exp(mean over the sample of logprob - old logprob), at most e^10.

    The value of each token's ratio is s, and its gradient flows through the token's own logprob (GSPO-token).
    Needs aggregation = "seq_mean_token_mean". Source: https://arxiv.org/abs/2507.18071, eq. 7 and 13.
    """
    log_ratio_N, _ = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    sequence_N = tokens.sample_mean((tokens.logprobs_N - tokens.old_logprobs_N).detach())
    ratio_N = (tokens.logprobs_N - tokens.logprobs_N.detach() + sequence_N).clamp(max=10.0).exp()
    free_N, clipped_N = _surrogates(ratio_N, tokens.advantages_N, clip_low, clip_high)
    return torch.maximum(free_N, clipped_N), {
        "actor/pg_clipfrac": clipped_N > free_N,
        "actor/ppo_kl": -log_ratio_N,
        "actor/ratio": ratio_N,
    }


def gmpo(
    tokens: PolicyTokens, *, clip_low: Annotated[float, Ge(0)] = 0.4, clip_high: Annotated[float, Ge(0)] = 0.4
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean over the sample of d): the geometric mean of clipped ratios.

    d = logprob - old logprob, within +-20, at most clip_high where A > 0, else at least -clip_low. Made for
    one advantage per sample. Needs aggregation = "seq_mean_token_mean". pg_clipfrac are the clipped tokens
    with A > 0, pg_clipfrac_lower the other clipped ones. Source: https://arxiv.org/abs/2507.20673.
    """
    log_ratio_N, _ = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    is_good_N = tokens.advantages_N > 0
    clipped_N = torch.where(is_good_N, log_ratio_N.clamp(max=clip_high), log_ratio_N.clamp(min=-clip_low))
    ratio_N = tokens.sample_mean(clipped_N).exp()
    is_clipped_N = clipped_N != log_ratio_N
    return -tokens.advantages_N * ratio_N, {
        "actor/pg_clipfrac": is_clipped_N & is_good_N,
        "actor/pg_clipfrac_lower": is_clipped_N & ~is_good_N,
        "actor/ppo_kl": -log_ratio_N,
        "actor/ratio": ratio_N,
    }


def sapo(
    tokens: PolicyTokens,
    *,
    tau_positive: Annotated[float, Gt(0)] = 1.0,
    tau_negative: Annotated[float, Gt(0)] = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sigmoid(tau (r - 1)) 4 / tau: a soft gate in place of the clip, of slope 1 at r = 1.

    tau is tau_positive where A > 0, else tau_negative. Needs aggregation = "seq_mean_token_mean".
    Source: https://arxiv.org/abs/2511.20347.
    """
    log_ratio_N, ratio_N = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    tau_N = torch.full_like(ratio_N, tau_negative).masked_fill(tokens.advantages_N > 0, tau_positive)
    gate_N = torch.sigmoid(tau_N * (ratio_N - 1)) * 4 / tau_N
    return -tokens.advantages_N * gate_N, {"actor/ppo_kl": -log_ratio_N, "actor/ratio": ratio_N}


def cispo(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Ge(0), Le(1)] = 1.0,
    clip_high: Annotated[float, Ge(0)] = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob: clipped tokens keep a gradient.

    clip_low = 1 is no lower bound, as in the paper. Source: MiniMax-M1, https://arxiv.org/abs/2506.13585.
    """
    log_ratio_N, ratio_N = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    clipped_N = ratio_N.clamp(1 - clip_low, 1 + clip_high).detach()
    return -clipped_N * tokens.advantages_N * tokens.logprobs_N, {
        "actor/pg_clipfrac": clipped_N != ratio_N,
        "actor/ppo_kl": -log_ratio_N,
        "actor/ratio": ratio_N,
    }


def dppo_tv(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Ge(0), Le(1)] = 0.15,
    clip_high: Annotated[float, Ge(0), Le(1)] = 0.15,
    max_ratio: Annotated[float, Ge(1)] = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A sg(min(r, max_ratio)) logprob, 0 where the token's probability already moved too far A's way.

    Too far: up by more than clip_high where A > 0, else down by more than clip_low; the change in
    probability is the total variation of this token against all others. pg_clipfrac_lower are the tokens
    that count with a truncated ratio; verl truncates it at 3 by default. Source: https://arxiv.org/abs/2602.04879.
    """
    log_ratio_N, ratio_N = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    rise_N = tokens.logprobs_N.exp() - tokens.old_logprobs_N.exp()
    is_far_N = torch.where(tokens.advantages_N > 0, rise_N > clip_high, rise_N < -clip_low)
    weights_N = ratio_N.clamp(max=max_ratio).detach() * ~is_far_N
    return -tokens.advantages_N * weights_N * tokens.logprobs_N, {
        "actor/pg_clipfrac": is_far_N,
        "actor/pg_clipfrac_lower": (ratio_N > max_ratio) & ~is_far_N,
        "actor/ppo_kl": -log_ratio_N,
        "actor/ratio": ratio_N,
    }


def clip_cov(
    tokens: PolicyTokens,
    *,
    clip_low: Annotated[float, Ge(0), Le(1)] = 0.2,
    clip_high: Annotated[float, Ge(0)] = 0.2,
    share: Annotated[float, Gt(0), Le(1)] = 2e-4,
    min_cov: float = 1.0,
    max_cov: Annotated[float, Gt("min_cov")] = 5.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clip (without dual clip), 0 for chosen tokens: what would cost the most entropy is left out.

    pg_clipfrac are the chosen tokens. `choose_clip_cov` reads share, min_cov and max_cov.
    Source: https://arxiv.org/abs/2505.22617.
    """
    log_ratio_N, ratio_N = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    free_N, clipped_N = _surrogates(ratio_N, tokens.advantages_N, clip_low, clip_high)
    return torch.maximum(free_N, clipped_N) * ~tokens.chosen_N, {
        "actor/pg_clipfrac": tokens.chosen_N,
        "actor/ppo_kl": -log_ratio_N,
        "actor/ratio": ratio_N,
    }


def kl_cov(
    tokens: PolicyTokens, *, share: Annotated[float, Gt(0), Le(1)] = 2e-4, coef: Annotated[float, Ge(0)] = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r, and for chosen tokens + coef |logprob - old logprob|, which holds them where they were.

    `choose_kl_cov` reads share. Source: https://arxiv.org/abs/2505.22617.
    """
    log_ratio_N, ratio_N = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    penalty_N = coef * (tokens.logprobs_N - tokens.old_logprobs_N).abs() * tokens.chosen_N
    loss_N = -tokens.advantages_N * ratio_N + penalty_N
    return loss_N, {"actor/ppo_kl": -log_ratio_N, "actor/ratio": ratio_N}


def reinforce(tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """-A logprob: the plain policy gradient. Source: Williams, https://doi.org/10.1007/BF00992696."""
    log_ratio_N, ratio_N = _ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    loss_N = -tokens.advantages_N * tokens.logprobs_N
    return loss_N, {"actor/ppo_kl": -log_ratio_N, "actor/ratio": ratio_N}


LOSSES: Mapping[str, TokenLoss] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "reinforce": reinforce,
}

# What a loss asks of other settings; without it a config is refused (services/config/rules.py).
# sequence_mean: aggregation = "seq_mean_token_mean". without_ratio: one update per step, on samples of the
# policy itself or with a correction.
TRAITS: Mapping[str, tuple[str, ...]] = {
    "gspo": ("sequence_mean",),
    "gmpo": ("sequence_mean",),
    "sapo": ("sequence_mean",),
    "reinforce": ("without_ratio",),
}


def choose_clip_cov(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    seed: int,
    *,
    clip_low: Annotated[float, Ge(0), Le(1)] = 0.2,
    clip_high: Annotated[float, Ge(0)] = 0.2,
    share: Annotated[float, Gt(0), Le(1)] = 2e-4,
    min_cov: float = 1.0,
    max_cov: Annotated[float, Gt("min_cov")] = 5.0,
) -> Tensor:
    """[N] bool: max(1, int(share N)) tokens with min_cov < covariance < max_cov, drawn with `seed`.

    Tokens that the ratio clips are not among them; where too few are left, all of those.
    """
    _, ratio_N = _ratio(logprobs_N, old_logprobs_N)
    free_N, clipped_N = _surrogates(ratio_N, advantages_N, clip_low, clip_high)
    covariance_N = _covariance(logprobs_N, advantages_N)
    is_candidate_N = (covariance_N > min_cov) & (covariance_N < max_cov) & ~(clipped_N > free_N)
    candidates = is_candidate_N.nonzero()[:, 0]
    # counter-based and on the CPU, so that every rank and kind of device draws the same tokens
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(candidates))
    drawn = torch.from_numpy(order[: _num_chosen(share, len(logprobs_N))]).to(candidates.device)
    return torch.zeros_like(is_candidate_N).index_fill(0, candidates[drawn], True)


def choose_kl_cov(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    seed: int,
    *,
    share: Annotated[float, Gt(0), Le(1)] = 2e-4,
    coef: Annotated[float, Ge(0)] = 1.0,
) -> Tensor:
    """[N] bool: the max(1, int(share N)) tokens of largest covariance, of equal ones the first. No draw."""
    order = _covariance(logprobs_N, advantages_N).argsort(descending=True, stable=True)
    top = order[: _num_chosen(share, len(order))]
    return torch.zeros_like(advantages_N, dtype=torch.bool).index_fill(0, top, True)


# For losses that act on chosen tokens: which ones, judged over the whole minibatch, so that the choice does
# not depend on how it is cut. Called with (logprobs_N, old_logprobs_N, advantages_N, seed, *, the loss's
# parameters), without gradient.
SELECTIONS: Mapping[str, Callable[..., Tensor]] = {
    "clip_cov": choose_clip_cov,
    "kl_cov": choose_kl_cov,
}


def value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """0.5 max((v - R)^2, (clip(v, V - clip, V + clip) - R)^2), V being the old values.

    The names of the token values that are reported as means carry no role: the caller puts it before them.
    Source: PPO's reference implementation, https://github.com/openai/baselines, ppo2.
    """
    free_N = (values_N - returns_N).square()
    clipped_N = (values_N.clamp(old_values_N - clip, old_values_N + clip) - returns_N).square()
    loss_N = 0.5 * torch.maximum(free_N, clipped_N)
    return loss_N, {"vf_clipfrac": clipped_N > free_N, "vpred_mean": values_N}


def _ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> tuple[Tensor, Tensor]:
    """The log ratio, within +-MAX_LOG_RATIO, and the ratio."""
    log_ratio_N = (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio_N, log_ratio_N.exp()


def _surrogates(
    ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """-A r, and -A r with r clipped. The clip counts where the second is larger."""
    return -advantages_N * ratio_N, -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)


def _covariance(logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """What each token contributes to the covariance of advantage and logprob over all N tokens."""
    return (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())


def _num_chosen(share: float, num_tokens: int) -> int:
    return max(1, int(share * num_tokens))
