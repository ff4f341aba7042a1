"""Importance weights for the mismatch between rollout engine and trainer. Pure numpy.

The engine that samples and the trainer that learns compute slightly different logprobs for the same weights,
so the data is slightly off-policy. N: samples; T: loss-masked tokens of all samples, as in advantage.py;
U: units that have one weight each: the tokens, or the samples that have tokens.
"""

from dataclasses import dataclass

import numpy as np

from atoll.coordinator.algorithm.advantage import Float64, Floats
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

    Metrics describe the raw weights, over units that have tokens; masked_fraction is the share
    of tokens that are masked or rejected. A batch without tokens has no metrics.

    Raises ValueError for an unknown level or method.
    """
    log_ratio_T = old_T.astype(np.float64) - rollout_T
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
    return Correction(weights_T, keep_T, _metrics(log_ratio_T, raw_U, (weights_T == 0) | ~keep_T))


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


def _metrics(log_ratio_T: Float64, raw_U: Float64, is_masked_T: Bool) -> dict[str, float]:
    """kl: of the rollout's policy from the trainer's, nats per token; ess: share of U that counts."""
    if len(log_ratio_T) == 0:
        return {}
    clamped_T = np.clip(log_ratio_T, -MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    return {
        "rollout_corr/is_weight_mean": float(raw_U.mean()),
        "rollout_corr/is_weight_max": float(raw_U.max()),
        "rollout_corr/is_weight_min": float(raw_U.min()),
        "rollout_corr/ess": float(raw_U.sum() ** 2 / (len(raw_U) * (raw_U**2).sum())),
        "rollout_corr/masked_fraction": float(is_masked_T.mean()),
        "rollout_corr/kl": float(-log_ratio_T.mean()),
        "rollout_corr/k3_kl": float((np.exp(clamped_T) - clamped_T - 1).mean()),
    }
