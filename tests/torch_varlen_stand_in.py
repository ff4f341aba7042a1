"""A CPU kernel for the operators behind torch.nn.attention.varlen, which has one on GPUs only.

PyTorch's own Python function, its choice of arguments and its autograd formula run. Import this module before
the attention "varlen" is used.

Letters in shapes: T queries, C keys, H heads, G key-value heads, D size of a head.
"""

import math

import torch
from torch import Tensor
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward

from tests.flash_attn_stand_in import sequences, varlen, weights


@_varlen_attn.register_kernel("cpu")  # type: ignore[untyped-decorator]
def _forward(
    query_THD: Tensor,
    key_CGD: Tensor,
    value_CGD: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    max_queries: int,
    max_keys: int,
    is_causal: bool,
    scale: float | None,
    window_size: list[int],
    enable_gqa: bool,
    *rest: None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window_size == [-1, 0]
    assert scale is None
    assert enable_gqa
    output_THD = varlen(
        query_THD, key_CGD, value_CGD, query_bounds, key_bounds, max_queries, max_keys, causal=is_causal
    )
    logsumexp = query_THD.new_zeros(query_THD.shape[1], len(query_THD))  # only the real kernel reads it
    return output_THD, logsumexp, torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")  # type: ignore[untyped-decorator]
def _backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_CGD: Tensor,
    value_CGD: Tensor,
    output_THD: Tensor,
    logsumexp: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    *rest: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """By hand: an operator's kernel runs below autograd."""
    into_query, into_key, into_value = (torch.zeros_like(x) for x in (query_THD, key_CGD, value_CGD))
    groups, scale = key_CGD.shape[1], 1 / math.sqrt(query_THD.shape[-1])
    for q, k in sequences(query_bounds, key_bounds):
        weights_HQK = weights(query_THD[q], key_CGD[k])
        key_KHD, value_KHD = (
            x[k].repeat_interleave(query_THD.shape[1] // groups, 1) for x in (key_CGD, value_CGD)
        )
        slope_HQK = torch.einsum("qhd,khd->hqk", grad_THD[q], value_KHD)
        scores_HQK = scale * weights_HQK * (slope_HQK - (weights_HQK * slope_HQK).sum(-1, keepdim=True))
        into_query[q] = torch.einsum("hqk,khd->qhd", scores_HQK, key_KHD)
        for into_CGD, gradient_HQK, of_QHD in (
            (into_key, scores_HQK, query_THD[q]),
            (into_value, weights_HQK, grad_THD[q]),
        ):
            into_KHD = torch.einsum("hqk,qhd->khd", gradient_HQK, of_QHD)
            into_CGD[k] += into_KHD.unflatten(1, (groups, -1)).sum(2)
    return into_query, into_key, into_value
