"""The KL divergence from the reference policy, per token: estimated from logprobs, or over the vocabulary.

Letters in shapes: N tokens, n rows of one chunk, H hidden size, V vocabulary rows of this rank, v columns of
one chunk.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from atoll.trainer.losses.logprobs import (
    default_chunk,
    gradients_through_logits,
    reduce_over,
    vocabulary_logits,
)

MAX_LOG_RATIO = 20.0  # e^20 still fits fp32 with room for sums
MAX_K3 = 10.0


def kl_penalty(logprobs_N: Tensor, ref_logprobs_N: Tensor, estimator: str) -> Tensor:
    """[N] in nats. With x = logprob - reference logprob of the sampled token:

    k1: x; abs: |x|; k2: x^2 / 2; k3: e^-x + x - 1, x within +-20, at most 10. k1 and k3 have the KL as their
    mean, but k2 alone has the gradient of the KL: "k1+" and "k3+" have their value and the gradient of k2.
    Raises ValueError for another name. Source: http://joschu.net/blog/kl-approx.html.
    """
    if estimator in ("k1+", "k3+"):
        k2_N = kl_penalty(logprobs_N, ref_logprobs_N, "k2")
        value_N = kl_penalty(logprobs_N, ref_logprobs_N, estimator[:-1])
        return k2_N - k2_N.detach() + value_N.detach()  # straight-through
    log_ratio_N = logprobs_N - ref_logprobs_N
    match estimator:
        case "k1":
            return log_ratio_N
        case "abs":
            return log_ratio_N.abs()
        case "k2":
            return 0.5 * log_ratio_N.square()
        case "k3":
            log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            return (torch.expm1(-log_ratio_N) + log_ratio_N).clamp(max=MAX_K3)
    raise ValueError(f"KL estimator {estimator!r} is unknown: choose k1, abs, k2, k3, k1+ or k3+")


def full_kl(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    ref_hidden_NH: Tensor,
    ref_weight_VH: Tensor,
    temperature: float,
    tensor_parallel: ProcessGroup,
    chunk_logits: int | None = None,
) -> Tensor:
    """[N] KL(policy || reference) in nats over the whole vocabulary: sum of p (log p - log q), at least fp32.

    p = softmax(hidden_NH @ weight_VH.T / temperature), q likewise of the reference, to which no gradient
    goes. The weights hold this rank's rows, an equal share in rank order; the hidden states are the same on
    every rank. Of both policies together, `chunk_logits` exist at once; the default depends on the device.
    """
    each = (chunk_logits or default_chunk(hidden_NH.device)) // 2
    kl_N: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, ref_hidden_NH, ref_weight_VH, temperature, tensor_parallel, each
    )
    return kl_N


class _FullKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        ref_hidden_NH: Tensor,
        ref_weight_VH: Tensor,
        temperature: float,
        group: ProcessGroup,
        chunk_logits: int,
    ) -> Tensor:
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        kl_N = hidden_NH.new_empty(len(hidden_NH), dtype=dtype)
        logsumexp_2N = kl_N.new_empty(2, len(hidden_NH))  # of the policy, of the reference
        rows = max(1, chunk_logits // len(weight_VH))
        for start in range(0, len(hidden_NH), rows):
            n = slice(start, start + rows)
            logits_nV = vocabulary_logits(hidden_NH[n], weight_VH, temperature)
            ref_logits_nV = vocabulary_logits(ref_hidden_NH[n], ref_weight_VH, temperature)
            peak_2n = torch.stack([logits_nV.amax(-1), ref_logits_nV.amax(-1)])
            reduce_over(group, peak_2n, ReduceOp.MAX)
            logits_nV -= peak_2n[0, :, None]
            ref_logits_nV -= peak_2n[1, :, None]
            exp_nV = logits_nV.exp()
            weighted_n = (exp_nV * (logits_nV - ref_logits_nV)).sum(-1)
            sums_3n = torch.stack([exp_nV.sum(-1), ref_logits_nV.exp_().sum(-1), weighted_n])
            reduce_over(group, sums_3n, ReduceOp.SUM)
            norm_n, ref_norm_n, weighted_n = sums_3n
            kl_N[n] = weighted_n / norm_n - norm_n.log() + ref_norm_n.log()
            logsumexp_2N[:, n] = peak_2n + sums_3n[:2].log()
        ctx.save_for_backward(hidden_NH, weight_VH, ref_hidden_NH, ref_weight_VH, logsumexp_2N, kl_N)
        ctx.temperature, ctx.group, ctx.chunk_logits = temperature, group, chunk_logits
        return kl_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d KL / d logit_j = p_j (log p_j - log q_j - KL)."""
        hidden_NH, weight_VH, ref_hidden_NH, ref_weight_VH, logsumexp_2N, kl_N = ctx.saved_tensors

        grad_N1 = grads[0][:, None] / ctx.temperature  # of the logits before they are divided by it

        def gradient(v: slice, logits_Nv: Tensor) -> Tensor:
            ref_logits_Nv = vocabulary_logits(ref_hidden_NH, ref_weight_VH[v], ctx.temperature)
            logp_Nv = logits_Nv.sub_(logsumexp_2N[0, :, None])
            logq_Nv = ref_logits_Nv.sub_(logsumexp_2N[1, :, None])
            slope_Nv = logq_Nv.neg_().add_(logp_Nv).sub_(kl_N[:, None]).mul_(grad_N1)
            return logp_Nv.exp_().mul_(slope_Nv)

        into_hidden_NH, into_weight_VH = gradients_through_logits(
            hidden_NH, weight_VH, ctx.temperature, ctx.group, ctx.chunk_logits, gradient
        )
        return into_hidden_NH, into_weight_VH, None, None, None, None, None
