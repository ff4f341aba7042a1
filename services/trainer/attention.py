"""Attention over packed segments that form trees, on PyTorch's scaled-dot-product attention.

Each segment's tokens are the queries of one padded row, and the keys of that row are the tokens of
its ancestors and its own. Rows of similar length share one call. A root needs no mask (plain causal),
so a batch without shared prefixes never builds one.

The plan is made once per micro-batch and used by every layer.

Letters in shapes: T tokens, N rows, Q queries per row, K keys per row, H heads, G key-value heads,
D size of a head.
"""

from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.wire.types import Int64, Segments

# A backend that cannot share a prefix takes only roots: the packer repeats the prefix in each sample.
SHARES_PREFIX = {"shared_prefix": True, "segments": False}

SHORTEST_BUCKET = 16  # tokens; rows shorter than this share one call
MASK_LIMIT = 1 << 24  # elements of one call's mask: bounds memory where a long segment has ancestors


@dataclass(frozen=True, eq=False)
class Bucket:
    """Rows that one call computes. Padding repeats token 0 and its output is never read."""

    queries_NQ: Tensor  # token of each query
    keys_NK: Tensor  # token of each key: K is Q for roots
    mask_N1QK: Tensor | None  # True where a query sees a key; None: causal


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """What every layer's core attention needs; travels through Megatron as `packed_seq_params`."""

    buckets: tuple[Bucket, ...]
    rows_T: Tensor  # each token's place in the buckets' outputs, joined
    # Read by Megatron: queries and keys keep their [T, 1, H, D] shape and get one rotation per token.
    qkv_format: str = "sbhd"


@dataclass(frozen=True, eq=False)
class _Row:
    """A block of one segment's tokens, and the tokens before it in its own sequence."""

    before: Int64
    tokens: Int64

    @property
    def bucket(self) -> tuple[int, int]:
        """Padded sizes: rows that share them share a call."""
        return _round_up(len(self.before)), _round_up(len(self.tokens))


def plan_attention(segments: Segments, device: torch.device) -> AttentionPlan:
    """Groups the segments of one micro-batch into padded attention calls."""
    rows = sorted(_rows(segments), key=lambda row: row.bucket)
    buckets: list[list[_Row]] = []
    for row in rows:
        before, tokens = row.bucket
        capacity = max(1, MASK_LIMIT // (tokens * (before + tokens))) if before else len(rows)
        if not buckets or buckets[-1][0].bucket != row.bucket or len(buckets[-1]) == capacity:
            buckets.append([])
        buckets[-1].append(row)

    rows_T = np.empty(len(segments.token_ids), np.int64)
    start = 0
    for bucket in buckets:
        width = max(len(row.tokens) for row in bucket)
        for n, row in enumerate(bucket):
            rows_T[row.tokens] = np.arange(len(row.tokens)) + start + n * width
        start += len(bucket) * width
    return AttentionPlan(
        buckets=tuple(_pad(bucket, device) for bucket in buckets),
        rows_T=torch.from_numpy(rows_T).to(device),
    )


def _rows(segments: Segments) -> list[_Row]:
    """One row per non-empty segment; a long one below a prefix is cut so that its mask fits the limit."""
    rows = []
    befores: list[Int64] = []
    tokens_T = np.arange(len(segments.token_ids), dtype=np.int64)
    for s, parent in enumerate(segments.parents):  # parents come first
        tokens = tokens_T[segments.offsets[s] : segments.offsets[s + 1]]
        before = tokens[:0]
        if parent >= 0:
            above = tokens_T[segments.offsets[parent] : segments.offsets[parent + 1]]
            before = np.concatenate([befores[parent], above])
        befores.append(before)
        block = len(tokens) if parent < 0 else MASK_LIMIT // (len(before) + len(tokens) + 1)
        for first in range(0, len(tokens), max(block, 1)):
            rows.append(_Row(np.concatenate([before, tokens[:first]]), tokens[first : first + block]))
    return rows


def _round_up(length: int) -> int:
    """The next power of two, at least SHORTEST_BUCKET; 0 stays 0."""
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()) if length else 0


def _pad(bucket: list[_Row], device: torch.device) -> Bucket:
    num_queries = max(len(row.tokens) for row in bucket)
    num_before = max(len(row.before) for row in bucket)
    queries_NQ = np.zeros((len(bucket), num_queries), np.int64)
    keys_NK = np.zeros((len(bucket), num_before + num_queries), np.int64)
    for n, row in enumerate(bucket):
        queries_NQ[n, : len(row.tokens)] = row.tokens
        keys_NK[n, : len(row.before)] = row.before
    keys_NK[:, num_before:] = queries_NQ
    mask_NQK = None
    if num_before:
        lengths_N = np.array([len(row.before) for row in bucket])
        mask_NQK = np.empty((len(bucket), num_queries, num_before + num_queries), bool)
        mask_NQK[:, :, :num_before] = (np.arange(num_before) < lengths_N[:, None])[:, None]
        mask_NQK[:, :, num_before:] = np.tri(num_queries, dtype=bool)
    return Bucket(
        queries_NQ=torch.from_numpy(queries_NQ).to(device),
        keys_NK=torch.from_numpy(keys_NK).to(device),
        mask_N1QK=None if mask_NQK is None else torch.from_numpy(mask_NQK).unsqueeze(1).to(device),
    )


class TreeAttention(torch.nn.Module):
    """Megatron's core-attention slot. The constructor's arguments are those that Megatron passes."""

    def __init__(self, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        assert config.attention_dropout == 0
        assert config.softmax_scale is None

    def forward(
        self,
        query_T1HD: Tensor,
        key_T1GD: Tensor,
        value_T1GD: Tensor,
        attention_mask: None,
        /,
        *,
        packed_seq_params: AttentionPlan,
        **_: object,
    ) -> Tensor:
        """Returns [T, 1, H * D]."""
        plan = packed_seq_params
        outputs = []
        for bucket in plan.buckets:
            output_NHQD = scaled_dot_product_attention(
                _take(query_T1HD, bucket.queries_NQ),
                _take(key_T1GD, bucket.keys_NK),
                _take(value_T1GD, bucket.keys_NK),
                attn_mask=bucket.mask_N1QK,
                is_causal=bucket.mask_N1QK is None,
                enable_gqa=query_T1HD.shape[2] != key_T1GD.shape[2],
            )
            outputs.append(output_NHQD.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, plan.rows_T).unsqueeze(1)


def _take(values_T1HD: Tensor, tokens_NQ: Tensor) -> Tensor:
    """[N, H, Q, D] of the named tokens."""
    taken = values_T1HD.squeeze(1).index_select(0, tokens_NQ.flatten())
    return taken.view(*tokens_NQ.shape, *taken.shape[1:]).transpose(1, 2)
