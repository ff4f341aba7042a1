"""Attention over packed segments that form trees, on PyTorch's scaled-dot-product attention.

A row of a call holds the tokens of one segment, or of several short ones, as queries; its keys are the
tokens of their common ancestors and the row's own. A mask lets each query see its ancestors and, in its
own segment, what came before. Rows of similar length share one call; a long root has a row of its own
and needs no mask.

The plan is made once per micro-batch and used by every layer.

Letters in shapes: T tokens, N rows, Q queries of a row, K keys of a row, B keys before the row's own
(K = B + Q), H heads, G key-value heads, D size of a head.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.rope import Rotation, rotate
from services.wire.types import Bool, Int64, Segments

# A backend that cannot share a prefix takes only roots: the packer repeats the prefix in each sample.
SHARES_PREFIX = {"shared_prefix": True, "segments": False}

ROW_TOKENS = 64  # short segments join one row up to this length
SHORTEST_BUCKET = 16  # tokens; rows shorter than this share one call
MASK_LIMIT = 1 << 24  # elements of one call's mask: bounds memory where a long segment has ancestors


@dataclass(frozen=True, eq=False)
class Bucket:
    """Rows that one call computes. Padding repeats token 0 and its output is never read."""

    queries_NQ: Tensor  # token of each query
    keys_NK: Tensor  # token of each key; K is Q without a mask
    mask_N1QK: Tensor | None  # True where a query sees a key; None: causal


@dataclass(frozen=True, eq=False)
class AttentionPlan:
    """How one micro-batch's tokens go through attention calls."""

    buckets: tuple[Bucket, ...]
    outputs_T: Tensor  # each token's place in the buckets' outputs, joined


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """What Megatron hands to every layer's core attention as its `packed_seq_params`."""

    plan: AttentionPlan
    turn: Rotation
    qkv_format: str = "thd"  # read by Megatron: queries, keys and values come as [T, heads, D]


@dataclass(eq=False)
class _Row:
    """Consecutive tokens: a segment, a part of a long one, or several short ones."""

    base: int  # the segment that they hang off; -1: none
    before: Int64  # [B] tokens of `base` and of its ancestors
    start: int  # first token
    end: int
    parts: list[tuple[int, int]] = field(default_factory=list)  # of each segment: parent's last token, end
    last: dict[int, int] = field(default_factory=dict)  # of each segment: its last token; all from `start`

    def fits(self, parent: int, end: int) -> bool:
        return end - self.start <= ROW_TOKENS and (parent == self.base or parent in self.last)

    def add(self, segment: int, parent: int, end: int) -> None:
        self.end = end
        self.parts.append((self.last.get(parent, -1), end - self.start))
        self.last[segment] = end - self.start - 1

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def bucket(self) -> tuple[bool, int, int]:
        """Rows that agree in it share a call: masked or not, padded sizes."""
        masked = len(self.before) > 0 or len(self.parts) > 1
        return masked, _round_up(len(self.before)), _round_up(self.num_tokens)

    def own_mask(self) -> Bool:
        """[Q, Q] which of the row's own tokens each of them attends to."""
        sees_QQ = np.zeros((self.num_tokens, self.num_tokens), bool)
        causal_QQ = np.tri(self.num_tokens, dtype=bool)
        start = 0
        for parent, end in self.parts:
            if parent >= 0:  # it has seen all that is above
                sees_QQ[start:end] = sees_QQ[parent]
            sees_QQ[start:end, start:end] = causal_QQ[: end - start, : end - start]
            start = end
        return sees_QQ


def plan_attention(segments: Segments, device: torch.device) -> AttentionPlan:
    """Groups the segments of one micro-batch, none of them empty, into padded attention calls."""
    rows = sorted(_rows(segments), key=lambda row: row.bucket)
    buckets: list[list[_Row]] = []
    for row in rows:
        masked, before, tokens = row.bucket
        capacity = max(1, MASK_LIMIT // (tokens * (before + tokens))) if masked else len(rows)
        if not buckets or buckets[-1][0].bucket != row.bucket or len(buckets[-1]) == capacity:
            buckets.append([])
        buckets[-1].append(row)

    outputs_T = np.empty(len(segments.token_ids), np.int64)
    place = 0
    for bucket in buckets:
        width = max(row.num_tokens for row in bucket)
        for row in bucket:
            outputs_T[row.start : row.end] = np.arange(place, place + row.num_tokens)
            place += width
    return AttentionPlan(
        buckets=tuple(_pad(bucket, device) for bucket in buckets),
        outputs_T=torch.from_numpy(outputs_T).to(device),
    )


def _rows(segments: Segments) -> list[_Row]:
    offsets, parents = segments.offsets.tolist(), segments.parents.tolist()
    paths: dict[int, Int64] = {-1: np.empty(0, np.int64)}  # tokens of a parent and of its ancestors
    rows: list[_Row] = []
    for s, parent in enumerate(parents):
        start, end = offsets[s], offsets[s + 1]
        if parent not in paths:  # parents come first, so the grandparent's path is there
            own = np.arange(offsets[parent], offsets[parent + 1])
            paths[parent] = np.concatenate([paths[parents[parent]], own])
        if rows and rows[-1].fits(parent, end):
            rows[-1].add(s, parent, end)
            continue
        before = paths[parent]
        # a long segment below a prefix is cut, so that the mask of each part stays within the limit
        block = end - start if parent < 0 else max(1, MASK_LIMIT // (len(before) + end - start))
        for first in range(start, end, block):
            above = np.concatenate([before, np.arange(start, first)])
            rows.append(_Row(s if first > start else parent, above, first, first))
            rows[-1].add(s, parent, min(first + block, end))
    return rows


def _round_up(length: int) -> int:
    """The next power of two, at least SHORTEST_BUCKET; 0 stays 0."""
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()) if length else 0


def _pad(bucket: list[_Row], device: torch.device) -> Bucket:
    num_queries = max(row.num_tokens for row in bucket)
    num_before = max(len(row.before) for row in bucket)
    queries_NQ = np.zeros((len(bucket), num_queries), np.int64)
    keys_NK = np.zeros((len(bucket), num_before + num_queries), np.int64)
    masked = bucket[0].bucket[0]
    mask_NQK = np.zeros((len(bucket), num_queries, keys_NK.shape[1]) if masked else (0, 0, 0), bool)
    for n, row in enumerate(bucket):
        length = row.num_tokens
        queries_NQ[n, :length] = np.arange(row.start, row.end)
        keys_NK[n, : len(row.before)] = row.before
        keys_NK[n, num_before : num_before + length] = queries_NQ[n, :length]
        if masked:
            mask_NQK[n, :length, : len(row.before)] = True
            mask_NQK[n, :length, num_before : num_before + length] = row.own_mask()
            mask_NQK[n, length:, num_before] = True  # a query that sees nothing would be NaN
    return Bucket(
        queries_NQ=torch.from_numpy(queries_NQ).to(device),
        keys_NK=torch.from_numpy(keys_NK).to(device),
        mask_N1QK=torch.from_numpy(mask_NQK).unsqueeze(1).to(device) if masked else None,
    )


class TreeAttention(torch.nn.Module):
    """Megatron's core-attention slot; needs nothing of what Megatron passes to its constructor."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(
        self,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        attention_mask: None,
        /,
        *,
        packed_seq_params: AttentionInputs,
        **_: object,
    ) -> Tensor:
        """Turns queries and keys by their positions, then attends. Returns [T, H * D]."""
        plan, turn = packed_seq_params.plan, packed_seq_params.turn
        query_THD, key_TGD = rotate(query_THD, turn), rotate(key_TGD, turn)
        outputs = []
        for bucket in plan.buckets:
            output_NHQD = scaled_dot_product_attention(
                _take(query_THD, bucket.queries_NQ),
                _take(key_TGD, bucket.keys_NK),
                _take(value_TGD, bucket.keys_NK),
                attn_mask=bucket.mask_N1QK,
                is_causal=bucket.mask_N1QK is None,
                enable_gqa=query_THD.shape[1] != key_TGD.shape[1],
            )
            outputs.append(output_NHQD.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, plan.outputs_T)


def _take(values_THD: Tensor, tokens_NQ: Tensor) -> Tensor:
    """[N, H, Q, D] of the named tokens."""
    taken = values_THD.index_select(0, tokens_NQ.flatten())
    return taken.view(*tokens_NQ.shape, *taken.shape[1:]).transpose(1, 2)
