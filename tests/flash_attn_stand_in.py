"""flash-attn's function in plain torch: for machines without a GPU, and as reference on others."""

import math
import sys
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
    outputs, repeats = [], q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(
        query_bounds.unfold(0, 2, 1).tolist(), key_bounds.unfold(0, 2, 1).tolist(), strict=True
    ):
        keys, values = k[c:d].repeat_interleave(repeats, 1), v[c:d].repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) / math.sqrt(q.shape[-1])
        # "aligned to the bottom right corner": query i sees keys up to i + (keys - queries)
        visible = torch.arange(d - c) <= torch.arange(b - a)[:, None] + (d - c) - (b - a)
        outputs.append(
            torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), values)
        )
    return torch.cat(outputs)
