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
    """Segments side by side below one path of ancestors."""

    base: int  # the segment that they hang off; -1: none
    before: Int64  # [B] tokens of `base` and of its ancestors
    tokens: Int64  # [Q]
    parents: list[int] = field(default_factory=list)  # of each segment: place in the row, or -1
    ends: list[int] = field(default_factory=list)  # of each segment, in `tokens`
    members: dict[int, int] = field(default_factory=dict)  # segment -> place in the row

    def fits(self, parent: int, length: int) -> bool:
        return len(self.tokens) + length <= ROW_TOKENS and (parent == self.base or parent in self.members)

    def add(self, segment: int, parent: int, tokens: Int64) -> None:
        self.members[segment] = len(self.parents)
        self.parents.append(self.members.get(parent, -1))
        self.tokens = np.concatenate([self.tokens, tokens])
        self.ends.append(len(self.tokens))

    @property
    def bucket(self) -> tuple[bool, int, int]:
        """Rows that agree in it share a call: masked or not, padded sizes."""
        masked = len(self.before) > 0 or len(self.ends) > 1
        return masked, _round_up(len(self.before)), _round_up(len(self.tokens))

    def own_mask(self) -> Bool:
        """Which of the row's own tokens each of them attends to."""
        sees = np.zeros((len(self.tokens), len(self.tokens)), bool)
        start = 0
        for parent, end in zip(self.parents, self.ends, strict=True):
            if parent >= 0:  # its parent's last token has seen all that is above
                sees[start:end] = sees[self.ends[parent] - 1]
            sees[start:end, start:end] = np.tri(end - start, dtype=bool)
            start = end
        return sees


def plan_attention(segments: Segments, device: torch.device) -> AttentionPlan:
    """Groups the segments of one micro-batch into padded attention calls."""
    rows = sorted(_rows(segments), key=lambda row: row.bucket)
    buckets: list[list[_Row]] = []
    for row in rows:
        masked, before, tokens = row.bucket
        capacity = max(1, MASK_LIMIT // (tokens * (before + tokens))) if masked else len(rows)
        if not buckets or buckets[-1][0].bucket != row.bucket or len(buckets[-1]) == capacity:
            buckets.append([])
        buckets[-1].append(row)

    outputs_T = np.empty(len(segments.token_ids), np.int64)
    start = 0
    for bucket in buckets:
        width = max(len(row.tokens) for row in bucket)
        for n, row in enumerate(bucket):
            outputs_T[row.tokens] = np.arange(len(row.tokens)) + start + n * width
        start += len(bucket) * width
    return AttentionPlan(
        buckets=tuple(_pad(bucket, device) for bucket in buckets),
        outputs_T=torch.from_numpy(outputs_T).to(device),
    )


def _rows(segments: Segments) -> list[_Row]:
    rows: list[_Row] = []
    paths: list[Int64] = []  # of each segment: its ancestors' tokens and its own
    tokens_T = np.arange(len(segments.token_ids), dtype=np.int64)
    for s, parent in enumerate(segments.parents.tolist()):  # parents come first
        tokens = tokens_T[segments.offsets[s] : segments.offsets[s + 1]]
        before = paths[parent] if parent >= 0 else tokens[:0]
        paths.append(np.concatenate([before, tokens]))
        if rows and rows[-1].fits(parent, len(tokens)):
            rows[-1].add(s, parent, tokens)
            continue
        # a long segment below a prefix is cut, so that the mask of each part stays within the limit
        block = len(tokens) if parent < 0 else max(1, MASK_LIMIT // len(paths[s]))
        for first in range(0, len(tokens), max(1, block)):
            base = s if first else parent
            rows.append(_Row(base, paths[s][: len(before) + first], tokens[:0]))
            rows[-1].add(s, parent, tokens[first : first + block])
    return rows


def _round_up(length: int) -> int:
    """The next power of two, at least SHORTEST_BUCKET; 0 stays 0."""
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()) if length else 0


def _pad(bucket: list[_Row], device: torch.device) -> Bucket:
    num_queries = max(len(row.tokens) for row in bucket)
    num_before = max(len(row.before) for row in bucket)
    queries_NQ = np.zeros((len(bucket), num_queries), np.int64)
    keys_NK = np.zeros((len(bucket), num_before + num_queries), np.int64)
    masked = bucket[0].bucket[0]
    mask_NQK = np.zeros((len(bucket), num_queries, keys_NK.shape[1]) if masked else (0, 0, 0), bool)
    for n, row in enumerate(bucket):
        length = len(row.tokens)
        queries_NQ[n, :length] = row.tokens
        keys_NK[n, : len(row.before)] = row.before
        keys_NK[n, num_before : num_before + length] = row.tokens
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
