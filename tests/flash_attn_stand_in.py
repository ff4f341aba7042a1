"""flash-attn's function in plain torch: for machines without a GPU, and as reference on others."""

import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch


def stand_in(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=varlen))


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    max_queries: int,
    max_keys: int,
    *,
    causal: bool,
) -> torch.Tensor:
    """flash_attn_varlen_func as documented, sequence by sequence, in plain torch."""
    assert causal
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert max_queries == query_bounds.diff().max()
    assert max_keys == key_bounds.diff().max()
    return torch.cat(
        [
            torch.einsum(
                "hqk,khd->qhd", weights(q[a], k[b]), v[b].repeat_interleave(q.shape[1] // v.shape[1], 1)
            )
            for a, b in sequences(query_bounds, key_bounds)
        ]
    )


def sequences(query_bounds: torch.Tensor, key_bounds: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """The queries and the keys of each sequence."""
    for a, b in zip(query_bounds.unfold(0, 2, 1).tolist(), key_bounds.unfold(0, 2, 1).tolist(), strict=True):
        yield slice(*a), slice(*b)


def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[heads, queries, keys] of one sequence."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) / math.sqrt(q.shape[-1])
    # "aligned to the bottom right corner": query i sees keys up to i + (keys - queries)
    visible = torch.arange(len(k)) <= torch.arange(len(q))[:, None] + len(k) - len(q)
    return scores.masked_fill(~visible, -math.inf).softmax(-1)
