"""Importance weights for the mismatch between rollout engine and trainer. Pure numpy.

The engine that samples and the trainer that learns compute slightly different logprobs for the same weights,
so the data is slightly off-policy. Metrics are defined as in verl. N: samples; T: loss-masked tokens of all
samples, as in advantage.py; U: units that have one weight each: the tokens, or the samples that have tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.algorithm.estimates import Float64, Floats
from atoll.wire.types import Bool, Int64

MAX_LOG_WEIGHT = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    weights_T: Float64  # multiplied into the advantages
    keep_T: Bool  # False: rejected, the token leaves the loss mask
    metrics: dict[str, float]


def correct(
    old_T: Floats, rollout_T: Floats, lengths_N: Int64, level: str, method: str, low: float, high: float
) -> Correction:
    """Weights w = exp(clamp(d, +-20)) that turn the rollout's distribution into the trainer's.

    d is a token's old (trainer's) minus rollout logprob at level "token", its sum over the sample's tokens at
    "sequence", its mean at "geometric". `method` decides what happens to a weight:
    - "truncate": min(w, high). TIS, https://fengyao.notion.site/off-policy-rl
    - "mask": w in [low, high], else 0: the token counts in the loss's denominator without adding to its sum.
      IcePop at level "token", https://arxiv.org/abs/2510.18855; MIS at "sequence" and "geometric",
      https://richardli.xyz/rl-collapse
    - "reject": 1 in [low, high]; outside, the token, or at the other levels the whole sample, is not kept.

    A token that both give probability 0 weighs 1. Metrics describe the raw weights, over units that have
    tokens; truncated_fraction is the share of tokens whose weight was lowered, masked_fraction of those that
    are masked or rejected. A batch without tokens has no metrics.

    Raises ValueError for an unknown level or method.
    """
    log_ratio_T = np.zeros(len(old_T))
    np.subtract(old_T, rollout_T, out=log_ratio_T, where=old_T != rollout_T, dtype=np.float64)
    log_ratio_U, tokens_U = _units(log_ratio_T, lengths_N, level)
    raw_U = np.exp(np.clip(log_ratio_U, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT))
    is_inside_U = (low <= raw_U) & (raw_U <= high)
    everything_U = np.ones(len(raw_U), np.bool_)
    match method:
        case "truncate":
            weights_U, keep_U = np.minimum(raw_U, high), everything_U
        case "mask":
            weights_U, keep_U = np.where(is_inside_U, raw_U, 0.0), everything_U
        case "reject":
            weights_U, keep_U = np.ones(len(raw_U)), is_inside_U
        case _:
            raise ValueError(f'method "{method}" is unknown: use "truncate", "mask" or "reject"')
    weights_T, keep_T = np.repeat(weights_U, tokens_U), np.repeat(keep_U, tokens_U)
    if len(log_ratio_T) == 0:
        return Correction(weights_T, keep_T, {})
    num_truncated = int(tokens_U[raw_U > high].sum()) if method == "truncate" else 0
    metrics = {
        "rollout_corr/is_weight_mean": float(raw_U.mean()),
        "rollout_corr/is_weight_std": float(raw_U.std()),
        "rollout_corr/is_weight_max": float(raw_U.max()),
        "rollout_corr/is_weight_min": float(raw_U.min()),
        "rollout_corr/ess": float(raw_U.sum() ** 2 / (len(raw_U) * (raw_U**2).sum())),  # share of U
        "rollout_corr/truncated_fraction": num_truncated / len(old_T),
        "rollout_corr/masked_fraction": _masked_fraction(weights_T, keep_T),
    }
    return Correction(weights_T, keep_T, metrics | _mismatch(old_T, rollout_T, log_ratio_T, lengths_N))


def combine(corrections: Sequence[Correction]) -> Correction:
    """All of them on one batch: weights multiply, and a token is kept if all keep it. Metrics are the first
    one's, masked_fraction is that of all together."""
    weights_T = np.prod([part.weights_T for part in corrections], axis=0)
    keep_T = np.all([part.keep_T for part in corrections], axis=0)
    metrics = dict(corrections[0].metrics)
    if metrics:
        metrics["rollout_corr/masked_fraction"] = _masked_fraction(weights_T, keep_T)
    return Correction(weights_T, keep_T, metrics)


def _masked_fraction(weights_T: Float64, keep_T: Bool) -> float:
    return float(((weights_T == 0) | ~keep_T).mean())


def _units(log_ratio_T: Float64, lengths_N: Int64, level: str) -> tuple[Float64, Int64]:
    """Log weight and number of tokens of each unit."""
    if level == "token":
        return log_ratio_T, np.ones(len(log_ratio_T), np.int64)
    tokens_U = lengths_N[lengths_N > 0]
    sums_U = np.add.reduceat(log_ratio_T, np.cumsum(tokens_U) - tokens_U)
    if level == "sequence":
        return sums_U, tokens_U
    if level == "geometric":
        return sums_U / tokens_U, tokens_U
    raise ValueError(f'level "{level}" is unknown: use "token", "sequence" or "geometric"')


def _mismatch(old_T: Floats, rollout_T: Floats, log_ratio_T: Float64, lengths_N: Int64) -> dict[str, float]:
    """How far the two policies are from each other, whatever the weights' level.

    kl: of the rollout's policy from the trainer's, nats per token. ppl: each policy's exp(-mean logprob) of a
    sample, averaged over samples with tokens. chi2: E[w^2] - 1, of tokens' and of whole samples' weights.
    """
    clamped_T = np.clip(log_ratio_T, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    clamped_N = np.clip(_units(log_ratio_T, lengths_N, "sequence")[0], -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    means = {
        name: _units(logprobs_T.astype(np.float64), lengths_N, "geometric")[0]
        for name, logprobs_T in (("training", old_T), ("rollout", rollout_T))
    }
    return {
        "rollout_corr/kl": float(-log_ratio_T.mean()),
        "rollout_corr/k3_kl": float((np.exp(clamped_T) - clamped_T - 1).mean()),
        **{f"rollout_corr/{name}_ppl": float(np.exp(-mean_N).mean()) for name, mean_N in means.items()},
        "rollout_corr/chi2_token": float(np.exp(2 * clamped_T).mean() - 1),
        "rollout_corr/chi2_seq": float(np.exp(2 * clamped_N).mean() - 1),
    }
