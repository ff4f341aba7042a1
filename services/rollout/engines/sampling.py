"""Samples tokens. Pure: what is drawn depends on logits, settings and the sample's own random stream,
never on the batch.

Letters in shapes: B rows, V vocabulary.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.wire.types import Float32, Int64, TurnId, UInt64

Float64 = NDArray[np.float64]

_MASK = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood, 2014)
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# numpy's own integers, made once: making one takes as long as mixing a batch
_GOLDEN_U, _MIX_1_U, _MIX_2_U = np.uint64(_GOLDEN), np.uint64(_MIX_1), np.uint64(_MIX_2)
_1, _12, _27, _30, _31 = (np.uint64(n) for n in (1, 12, 27, 30, 31))


def stream_key(seed: int, id: TurnId) -> int:
    """Names a turn's random stream: 64 bits. Another attempt at a turn draws the same."""
    (group, index), turn, branch = id.sample, id.turn, id.branch
    numbers = [seed, group.epoch, group.prompt, index]
    if turn or branch:  # first turns draw what they drew when there were no others
        numbers += [turn, branch]
    key = 0
    for number in numbers:
        key = _mix_one((key + _GOLDEN + number) & _MASK)
    return key


def uniforms(keys_B: UInt64, positions_B: Int64) -> Float64:
    """float64 [B] in [0, 1): number `position` of each stream. SplitMix64's state after n draws is
    key + n * golden, so any position can be had at once."""
    z = keys_B + (positions_B.astype(np.uint64) + _1) * _GOLDEN_U
    z = (z ^ (z >> _30)) * _MIX_1_U
    z = (z ^ (z >> _27)) * _MIX_2_U
    z ^= z >> _31
    # 52 bits, not 53: u * total then stays below total after rounding, for any total
    fractions: Float64 = np.ldexp(z >> _12, -52)
    return fractions


def _mix_one(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


def draw(
    logits_BV: torch.Tensor,
    uniforms_B: Float64,
    temperatures_B: Float64,
    top_ps_B: Float64,
    top_ks_B: Int64,
) -> tuple[Int64, Float32]:
    """Tokens [B] and their logprobs [B] under the distribution drawn from: logits / temperature, cut to
    the top k and then to the smallest set of probability top_p, renormalised. A temperature of 0 takes
    the largest logit, with its logprob at temperature 1. Raises FloatingPointError for NaN and infinity.

    `logits_BV` is float32 and may be overwritten. top_k 0 and top_p 1 cut nothing.
    """
    greedy_B, cut_B = temperatures_B == 0, (top_ps_B < 1) | (top_ks_B > 0)
    plain = not ((temperatures_B != 1) | cut_B).any()  # every row draws from the logits as they are
    if not plain:
        divisors_B = np.where(greedy_B, 1, temperatures_B).astype(np.float32)
        logits_BV /= torch.from_numpy(divisors_B).unsqueeze(1)
        cut_B &= ~greedy_B
        if cut_B.any():
            rows = torch.from_numpy(np.flatnonzero(cut_B))
            logits_BV[rows] = _cut(logits_BV[rows], top_ps_B[cut_B], top_ks_B[cut_B])
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    # inverse of the cumulative distribution: the first token whose sum passes u * total
    sums_BV = logprobs_BV.exp().cumsum(-1, dtype=torch.float64)
    totals_B = sums_BV[:, -1].numpy()
    if not np.isfinite(totals_B).all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights are damaged, or training has diverged; "
            "look at actor/grad_norm, and lower trainer.optimizer.learning_rate"
        )
    targets_B1 = torch.from_numpy(uniforms_B * totals_B).unsqueeze(1)
    tokens_B1 = torch.searchsorted(sums_BV, targets_B1, right=True)
    if not plain and greedy_B.any():
        largest_B1 = logits_BV.argmax(-1, keepdim=True)
        tokens_B1 = torch.where(torch.from_numpy(greedy_B).unsqueeze(1), largest_B1, tokens_B1)
    logprobs_B1 = logprobs_BV.gather(1, tokens_B1)
    return tokens_B1.squeeze(1).numpy(), logprobs_B1.squeeze(1).numpy()


def _cut(logits_BV: torch.Tensor, top_ps_B: Float64, top_ks_B: Int64) -> torch.Tensor:
    """-inf outside the top k, then outside the smallest set of at least top_p of what is left."""
    sorted_BV, order_BV = logits_BV.sort(stable=True, dim=-1, descending=True)
    V = logits_BV.shape[1]
    ks_B1 = torch.from_numpy(np.where(top_ks_B > 0, top_ks_B, V)).unsqueeze(1)
    sorted_BV.masked_fill_(torch.arange(V) >= ks_B1, -torch.inf)
    probs_BV = sorted_BV.softmax(-1)
    before_BV = probs_BV.cumsum(-1, dtype=torch.float64) - probs_BV
    sorted_BV.masked_fill_(before_BV >= torch.from_numpy(top_ps_B).unsqueeze(1), -torch.inf)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)
