"""Log-probabilities and entropy of target tokens, straight from hidden states.

The logits of all positions never exist at once: rows go through in chunks, and the backward pass
computes each chunk's logits again. The vocabulary may be split over a tensor-parallel group.

Letters in shapes: N target tokens, n rows of one chunk, H hidden size, V vocabulary rows of this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

CHUNK_LOGITS = 1 << 24  # logits that exist at once: 64 MiB in fp32


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float,
    tensor_parallel: ProcessGroup,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets_N` under softmax(hidden_NH @ weight_VH.T / temperature), and its entropy.

    `weight_VH` holds this rank's rows, an equal share in rank order; `hidden_NH` is the same on every
    rank. Returns two tensors [N] in nats, at least fp32; an entropy that is not differentiated costs nothing.
    """
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, temperature, tensor_parallel, max(1, chunk_logits // len(weight_VH))
    )
    return logprobs_N, entropy_N


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperature: float,
        group: ProcessGroup,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        own_N = targets_N - group.rank() * len(weight_VH)  # row of the target in this rank's share
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, entropy_N, logsumexp_N = hidden_NH.new_empty(3, len(targets_N), dtype=dtype)
        for start in range(0, len(targets_N), rows):
            n = slice(start, start + rows)
            logits_nV = vocabulary_logits(hidden_NH[n], weight_VH, temperature)
            peak_n = logits_nV.amax(-1)
            reduce_over(group, peak_n, ReduceOp.MAX)
            logits_nV -= peak_n[:, None]
            exp_nV = logits_nV.exp()
            is_here_n = (own_N[n] >= 0) & (own_N[n] < len(weight_VH))
            target_n = logits_nV.gather(-1, own_N[n].clamp(0, len(weight_VH) - 1)[:, None])[:, 0]
            norm_n = exp_nV.sum(-1)
            weighted_n = exp_nV.mul_(logits_nV).sum(-1)  # in place: no third chunk of logits
            sums_3n = torch.stack([norm_n, weighted_n, target_n * is_here_n])
            reduce_over(group, sums_3n, ReduceOp.SUM)
            norm_n, weighted_n, target_n = sums_3n
            logprobs_N[n] = target_n - norm_n.log()
            entropy_N[n] = norm_n.log() - weighted_n / norm_n
            logsumexp_N[n] = peak_n + norm_n.log()
        ctx.save_for_backward(hidden_NH, weight_VH, own_N, logsumexp_N, entropy_N)
        ctx.temperature, ctx.group, ctx.rows = temperature, group, rows
        ctx.set_materialize_grads(False)  # None for an output that is not differentiated
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """d logprob / d logit_j = [j is the target] - p_j; d entropy / d logit_j = -p_j (log p_j + H)."""
        hidden_NH, weight_VH, own_N, logsumexp_N, entropy_N = ctx.saved_tensors
        grad_N = torch.zeros_like(logsumexp_N) if grads[0] is None else grads[0]
        grad_entropy_N = grads[1]

        def gradient(n: slice, logits_nV: Tensor) -> Tensor:
            logp_nV = logits_nV.sub_(logsumexp_N[n, None])
            slope_nV = -grad_N[n, None]
            if grad_entropy_N is not None:
                slope_nV = slope_nV - grad_entropy_N[n, None] * (logp_nV + entropy_N[n, None])
            grad_nV = logp_nV.exp_().mul_(slope_nV)
            is_here_n = (own_N[n] >= 0) & (own_N[n] < len(weight_VH))
            column_n = own_N[n].clamp(0, len(weight_VH) - 1)[:, None]
            return grad_nV.scatter_add_(-1, column_n, (grad_N[n] * is_here_n)[:, None])

        into_hidden_NH, into_weight_VH = gradients_through_logits(
            hidden_NH, weight_VH, ctx.temperature, ctx.group, ctx.rows, gradient
        )
        return into_hidden_NH, into_weight_VH, None, None, None, None


def vocabulary_logits(hidden_nH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """[n, V] this rank's share of a chunk's logits, in a new tensor, at least fp32."""
    logits_nV = hidden_nH @ weight_VH.T
    return logits_nV.to(torch.promote_types(logits_nV.dtype, torch.float32)).div_(temperature)


def gradients_through_logits(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    temperature: float,
    group: ProcessGroup,
    rows: int,
    gradient: Callable[[slice, Tensor], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the hidden states and of the weight, from those of each chunk's logits; none of a weight
    that does not learn, as below adapters.

    `gradient(n, logits_nV)` is called for chunks of `rows` rows and may overwrite the logits.
    """
    grad_hidden_NH = torch.empty_like(hidden_NH)
    grad_weight_VH = None
    if weight_VH.requires_grad:
        grad_weight_VH = torch.zeros_like(
            weight_VH, dtype=torch.promote_types(weight_VH.dtype, torch.float32)
        )
    for start in range(0, len(hidden_NH), rows):
        n = slice(start, start + rows)
        logits_nV = vocabulary_logits(hidden_NH[n], weight_VH, temperature)
        grad_nV = gradient(n, logits_nV).to(weight_VH.dtype)
        grad_hidden_NH[n] = grad_nV @ weight_VH / temperature
        if grad_weight_VH is None:
            continue
        if grad_nV.dtype == grad_weight_VH.dtype:
            grad_weight_VH.addmm_(grad_nV.T, hidden_NH[n])  # without a second [V, H] for each chunk
        else:
            grad_weight_VH += grad_nV.T @ hidden_NH[n]
    reduce_over(group, grad_hidden_NH, ReduceOp.SUM)  # every rank saw only its rows of the vocabulary
    if grad_weight_VH is not None:
        grad_weight_VH = grad_weight_VH.div_(temperature).to(weight_VH.dtype)
    return grad_hidden_NH, grad_weight_VH


def reduce_over(group: ProcessGroup, tensor: Tensor, op: Any) -> None:
    """In place, over the ranks that share the vocabulary."""
    if group.size() > 1:
        all_reduce(tensor, op=op, group=group)
