"""Log-probabilities and entropy of target tokens, straight from hidden states.

The logits of all positions never exist at once. The forward pass computes them in chunks of rows, each of
which reads the whole weight once. The backward pass computes them again, in chunks of columns: each computes
its own rows of the weight's gradient, so nothing of the weight's size is summed over chunks. The vocabulary
may be split over a tensor-parallel group.

Letters in shapes: N target tokens, n rows of one chunk, H hidden size, V vocabulary rows of this rank, v
columns of one chunk.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce

CHUNK_LOGITS = 1 << 28  # logits of one chunk on a GPU: 1 GiB in fp32, 1,767 rows of 152k words
CPU_CHUNK_LOGITS = 1 << 24  # caches are smaller, and reading the weight is less of the time


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperature: float,
    tensor_parallel: ProcessGroup,
    chunk_logits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprobs of `targets_N` under softmax(hidden_NH @ weight_VH.T / temperature), and its entropy.

    `weight_VH` holds this rank's rows, an equal share in rank order; `hidden_NH` is the same on every
    rank. Returns two tensors [N] in nats, at least fp32; an entropy that is not differentiated costs nothing.
    `chunk_logits` exist at once; the default depends on the device.
    """
    logprobs_N, entropy_N = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH,
        weight_VH,
        targets_N,
        temperature,
        tensor_parallel,
        chunk_logits or default_chunk(hidden_NH.device),
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
        chunk_logits: int,
    ) -> tuple[Tensor, Tensor]:
        own_N = targets_N - group.rank() * len(weight_VH)  # row of the target in this rank's share
        dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        logprobs_N, entropy_N, logsumexp_N = hidden_NH.new_empty(3, len(targets_N), dtype=dtype)
        rows = max(1, chunk_logits // len(weight_VH))
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
            del logits_nV, exp_nV  # before the next chunk's
            sums_3n = torch.stack([norm_n, weighted_n, target_n * is_here_n])
            reduce_over(group, sums_3n, ReduceOp.SUM)
            norm_n, weighted_n, target_n = sums_3n
            logprobs_N[n] = target_n - norm_n.log()
            entropy_N[n] = norm_n.log() - weighted_n / norm_n
            logsumexp_N[n] = peak_n + norm_n.log()
        ctx.save_for_backward(hidden_NH, weight_VH, own_N, logsumexp_N, entropy_N)
        ctx.temperature, ctx.group, ctx.chunk_logits = temperature, group, chunk_logits
        ctx.set_materialize_grads(False)  # None for an output that is not differentiated
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """d logprob / d logit_j = [j is the target] - p_j; d entropy / d logit_j = -p_j (log p_j + H)."""
        hidden_NH, weight_VH, own_N, logsumexp_N, entropy_N = ctx.saved_tensors
        # of the logits before they are divided by the temperature
        grad_N = torch.zeros_like(logsumexp_N) if grads[0] is None else grads[0] / ctx.temperature
        grad_entropy_N = None if grads[1] is None else grads[1] / ctx.temperature

        def gradient(v: slice, logits_Nv: Tensor) -> Tensor:
            logp_Nv = logits_Nv.sub_(logsumexp_N[:, None])
            slope_Nv = -grad_N[:, None]
            if grad_entropy_N is not None:
                slope_Nv = (logp_Nv + entropy_N[:, None]).mul_(-grad_entropy_N[:, None]).add_(slope_Nv)
            grad_Nv = logp_Nv.exp_().mul_(slope_Nv)
            is_here_N = (own_N >= v.start) & (own_N < v.stop)
            column_N1 = (own_N - v.start).clamp(0, v.stop - v.start - 1)[:, None]
            return grad_Nv.scatter_add_(-1, column_N1, (grad_N * is_here_N)[:, None])

        into_hidden_NH, into_weight_VH = gradients_through_logits(
            hidden_NH, weight_VH, ctx.temperature, ctx.group, ctx.chunk_logits, gradient
        )
        return into_hidden_NH, into_weight_VH, None, None, None, None


def default_chunk(device: torch.device) -> int:
    """Logits of one chunk."""
    return CPU_CHUNK_LOGITS if device.type == "cpu" else CHUNK_LOGITS


def vocabulary_logits(hidden_nH: Tensor, weight_VH: Tensor, temperature: float) -> Tensor:
    """[n, V] this rank's share of a chunk's logits, in a new tensor, at least fp32."""
    dtype = torch.promote_types(hidden_nH.dtype, torch.float32)
    if _has_mixed_products(hidden_nH):
        logits_nV = torch.mm(hidden_nH, weight_VH.T, out_dtype=dtype)
    else:
        logits_nV = (hidden_nH @ weight_VH.T).to(dtype)
    return logits_nV if temperature == 1 else logits_nV.div_(temperature)


def gradients_through_logits(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    temperature: float,
    group: ProcessGroup,
    chunk_logits: int,
    gradient: Callable[[slice, Tensor], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the hidden states and of the weight, from those of each chunk's logits; none of a weight
    that does not learn, as below adapters.

    `gradient(v, logits_Nv)` is called for chunks of columns and may overwrite the logits. It returns the
    gradient of hidden_NH @ weight_VH.T in these columns.
    """
    grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.promote_types(hidden_NH.dtype, torch.float32))
    grad_weight_VH = torch.empty_like(weight_VH) if weight_VH.requires_grad else None
    columns = max(1, chunk_logits // max(1, len(hidden_NH)))
    for start in range(0, len(weight_VH), columns):
        v = slice(start, min(start + columns, len(weight_VH)))
        grad_Nv = gradient(v, vocabulary_logits(hidden_NH, weight_VH[v], temperature)).to(weight_VH.dtype)
        _add_product(grad_hidden_NH, grad_Nv, weight_VH[v])
        if grad_weight_VH is not None:
            torch.mm(grad_Nv.T, hidden_NH, out=grad_weight_VH[v])
        del grad_Nv  # before the next chunk's logits
    grad_hidden_NH = grad_hidden_NH.to(hidden_NH.dtype)
    reduce_over(group, grad_hidden_NH, ReduceOp.SUM)  # every rank saw only its rows of the vocabulary
    return grad_hidden_NH, grad_weight_VH


def _add_product(sum_NH: Tensor, a_Nv: Tensor, b_vH: Tensor) -> None:
    """In place, without rounding the product to the factors' dtype."""
    if _has_mixed_products(a_Nv):
        torch.addmm(sum_NH, a_Nv, b_vH, out_dtype=sum_NH.dtype, out=sum_NH)
    elif a_Nv.dtype == sum_NH.dtype:
        sum_NH.addmm_(a_Nv, b_vH)
    else:
        sum_NH += a_Nv @ b_vH


def _has_mixed_products(factor: Tensor) -> bool:
    """Whether PyTorch multiplies matrices of this dtype into fp32: on GPUs only."""
    return factor.device.type != "cpu" and factor.dtype in (torch.bfloat16, torch.float16)


def reduce_over(group: ProcessGroup, tensor: Tensor, op: Any) -> None:
    """In place, over the ranks that share the vocabulary."""
    if group.size() > 1:
        all_reduce(tensor, op=op, group=group)
