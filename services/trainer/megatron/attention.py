"""Attention over packed segments that form trees.

With PyTorch's scaled-dot-product attention, the queries of a row of a call are the tokens of one segment, or
of several short ones; its keys are those of their common ancestors and the row's own. A mask lets each query
attend to its ancestors and to earlier tokens of its own segment. Rows of similar length share one call; a
long root has its own row and needs no mask.

With a kernel for sequences of different lengths, on GPUs: all segments in one call, without padding or masks.

The plan is made once per micro-batch, on the host, and used by every layer. If the micro-batch is split over
context ranks, each rank plans its own queries; keys and values are those of all ranks.

Letters in shapes: T tokens of the micro-batch, t of them on this context rank, N rows, Q queries of a row,
K its keys, B keys before the row's own (K = B + Q), S segments, C keys of all of them, H heads, G key-value
heads, D size of a head.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from atoll.runtime.errors import UserError
from atoll.trainer.megatron.context import ContextSplit, gather_tokens
from atoll.trainer.megatron.rope import Rotation, rotate
from atoll.wire.types import Int64, Segments

ROW_TOKENS = 64  # short segments join one row up to this length
SHORTEST_BUCKET = 16  # tokens; rows shorter than this share one call
GPU_MULTIPLE = 16  # of padded sizes on a GPU: PyTorch copies a mask whose rows are not aligned
MASK_LIMIT = 1 << 24  # elements of one call's mask: bounds memory for long segments with ancestors


class AttentionPlan(Protocol):
    """How one micro-batch's tokens are distributed over attention calls."""

    def attend(self, query_tHD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
        """[t, H * D]. Keys and values are those of the whole micro-batch, in the gathered order of
        context.py."""
        ...


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Passed by Megatron to every layer and its core attention as `packed_seq_params`."""

    plan: AttentionPlan
    rotation: Rotation
    routes_tYC: Tensor | None  # experts to use, see Replay
    qkv_format: str = "thd"  # read by Megatron: queries, keys and values come as [T, heads, D]


class TreeAttention(torch.nn.Module):
    """Fills Megatron's core-attention slot; of the constructor's arguments it needs only the ranks."""

    def __init__(self, *, pg_collection: ProcessGroupCollection, **_: object) -> None:
        super().__init__()
        self._context = pg_collection.cp

    def forward(
        self,
        query_tHD: Tensor,
        key_tGD: Tensor,
        value_tGD: Tensor,
        attention_mask: None,
        /,
        *,
        packed_seq_params: AttentionInputs,
        **_: object,
    ) -> Tensor:
        """Rotates queries and keys by their positions, then attends. Returns [t, H * D]."""
        plan, rotation = packed_seq_params.plan, packed_seq_params.rotation
        query_tHD, key_tGD = rotate(query_tHD, rotation), rotate(key_tGD, rotation)
        if self._context.size() == 1:
            return plan.attend(query_tHD, key_tGD, value_tGD)
        both_T2GD = gather_tokens(torch.stack([key_tGD, value_tGD], 1), self._context)
        return plan.attend(query_tHD, *both_T2GD.unbind(1))


class SegmentPart(NamedTuple):
    """Consecutive tokens of one segment."""

    segment: int
    base: int  # what they follow: the segment's parent, or their own segment's earlier tokens; -1: nothing
    before: Int64  # tokens that all of them attend to: of the segment's ancestors, and its own earlier ones
    start: int
    end: int


def cut_segments(segments: Segments, spans: list[tuple[int, int]]) -> Iterator[SegmentPart]:
    """The parts of the segments inside the `spans` of tokens, in order."""
    offsets, parents = segments.offsets.tolist(), segments.parents.tolist()
    paths: dict[int, Int64] = {-1: np.empty(0, np.int64)}  # tokens of a parent and its ancestors
    for s, parent in enumerate(parents):
        first, last = offsets[s], offsets[s + 1]
        if parent not in paths:  # parents come first, so the grandparent's path is there
            own = np.arange(offsets[parent], offsets[parent + 1])
            paths[parent] = np.concatenate([paths[parents[parent]], own])
        for span_start, span_end in spans:
            start, end = max(first, span_start), min(last, span_end)
            if start == first < end:
                yield SegmentPart(s, parent, paths[parent], start, end)
            elif start < end:
                yield SegmentPart(s, s, np.concatenate([paths[parent], np.arange(first, start)]), start, end)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Rows that one call computes. Padding repeats some token and its output is never read."""

    queries_NQ: Tensor  # index of each query among this rank's tokens
    keys_NK: Tensor  # index of each key among all tokens; without a mask, K is Q
    before_N: Tensor  # how many of the B keys before its own a row has; the rest is padding
    # A row's segments are numbered depth first, so that a segment and what is below it are consecutive.
    nodes_NQ: Tensor  # int16: number of each token's segment
    ends_NQ: Tensor  # int16: the number after those below it
    is_causal: bool  # no row needs a mask

    @cached_property
    def mask(self) -> Tensor | None:
        """[N, 1, Q, K] True if a query attends to a key; None: causal. Computed on the device, once for all
        layers."""
        if self.is_causal:
            return None
        query_NQ1, key_N1Q = self.nodes_NQ.unsqueeze(2), self.nodes_NQ.unsqueeze(1)
        own_NQQ = ((key_N1Q <= query_NQ1) & (query_NQ1 < self.ends_NQ.unsqueeze(1))).tril()
        num_queries = self.queries_NQ.shape[1]
        num_before = self.keys_NK.shape[1] - num_queries
        before_NB = torch.arange(num_before, device=own_NQQ.device) < self.before_N.unsqueeze(1)
        before_NQB = before_NB.unsqueeze(1).expand(-1, num_queries, -1)
        return torch.cat([before_NQB, own_NQQ], 2).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class TreePlan:
    """Padded rows, batched into as few calls as their lengths allow."""

    buckets: tuple[Bucket, ...]
    outputs_t: Tensor  # each token's index in the concatenated outputs of the buckets

    def attend(self, query_tHD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
        outputs = []
        for bucket in self.buckets:
            output_NHQD = scaled_dot_product_attention(
                _take(query_tHD, bucket.queries_NQ),
                _take(key_TGD, bucket.keys_NK),
                _take(value_TGD, bucket.keys_NK),
                attn_mask=bucket.mask,
                is_causal=bucket.is_causal,
                enable_gqa=query_tHD.shape[1] != key_TGD.shape[1],
            )
            outputs.append(output_NHQD.transpose(1, 2).flatten(2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self.outputs_t)


def _take(values_THD: Tensor, tokens_NQ: Tensor) -> Tensor:
    """[N, H, Q, D] values of these tokens."""
    taken = values_THD.index_select(0, tokens_NQ.flatten())
    return taken.view(*tokens_NQ.shape, *taken.shape[1:]).transpose(1, 2)


@dataclass(eq=False)
class _AttentionRow:
    """Consecutive tokens: a segment, a part of a long one, or several short ones."""

    base: int  # the segment that they follow; -1: none
    before: Int64  # [B] tokens that all of them attend to
    start: int  # first token
    end: int
    lengths: list[int] = field(default_factory=list)  # of the segments
    bases: list[int] = field(default_factory=list)  # which of the row's segments each follows; -1: none
    places: dict[int, int] = field(default_factory=dict)  # of each segment in these lists

    def fits(self, part: SegmentPart) -> bool:
        follows = part.start == self.end and part.end - self.start <= ROW_TOKENS
        return follows and (part.base == self.base or part.base in self.places)

    def add(self, segment: int, base: int, end: int) -> None:
        self.lengths.append(end - self.end)
        self.bases.append(self.places.get(base, -1))
        self.places[segment] = len(self.places)
        self.end = end

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def bucket(self) -> tuple[bool, int, int]:
        """Key of the call: whether masked, and padded sizes."""
        masked = len(self.before) > 0 or len(self.lengths) > 1
        return masked, _round_up(len(self.before)), _round_up(self.num_tokens)

    def nodes(self) -> tuple[Int64, Int64]:
        """[Q] the depth-first number of each token's segment, and [Q] the number after those below it."""
        sizes = [1] * len(self.bases)  # of each segment: itself and those below it
        for place in reversed(range(len(sizes))):  # bases come first
            if self.bases[place] >= 0:
                sizes[self.bases[place]] += sizes[place]
        numbers: list[int] = []
        free = [0]  # next number below each segment; the last one: of a segment that follows none
        for base, size in zip(self.bases, sizes, strict=True):
            numbers.append(free[base])
            free[base] += size
            free.insert(-1, numbers[-1] + 1)
        return np.repeat(numbers, self.lengths), np.repeat(np.add(numbers, sizes), self.lengths)


def plan_rows(segments: Segments, device: torch.device, split: ContextSplit) -> TreePlan:
    """Groups the segments of one micro-batch into padded attention calls on `device`."""
    num_tokens = len(segments.token_ids)
    rows = sorted(_rows(segments, split), key=lambda row: row.bucket)
    buckets: list[list[_AttentionRow]] = []
    for row in rows:
        masked, before, tokens = row.bucket
        capacity = max(1, MASK_LIMIT // (tokens * (before + tokens))) if masked else len(rows)
        if not buckets or buckets[-1][0].bucket != row.bucket or len(buckets[-1]) == capacity:
            buckets.append([])
        buckets[-1].append(row)

    outputs_T = np.empty(num_tokens, np.int64)
    place = 0
    for bucket in buckets:
        width = _padded([row.num_tokens for row in bucket], device)
        for row in bucket:
            outputs_T[row.start : row.end] = np.arange(place, place + row.num_tokens)
            place += width
    query_places_T = np.maximum(split.local_index(num_tokens), 0)  # padding may refer to another rank's token
    key_places_T = split.gathered_index(num_tokens)
    return TreePlan(
        buckets=tuple(_pad(bucket, query_places_T, key_places_T, device) for bucket in buckets),
        outputs_t=torch.from_numpy(outputs_T[split.local_tokens(num_tokens)]),
    )


def _rows(segments: Segments, split: ContextSplit) -> list[_AttentionRow]:
    rows: list[_AttentionRow] = []
    for part in cut_segments(segments, split.spans(len(segments.token_ids))):
        if rows and rows[-1].fits(part):
            rows[-1].add(part.segment, part.base, part.end)
            continue
        # a long segment below a prefix is cut, so that the mask of each piece stays within the limit
        length = part.end - part.start
        block = max(1, MASK_LIMIT // (len(part.before) + length)) if len(part.before) else length
        for first in range(part.start, part.end, block):
            above = np.concatenate([part.before, np.arange(part.start, first)])
            rows.append(_AttentionRow(part.segment if first > part.start else part.base, above, first, first))
            rows[-1].add(part.segment, part.base, min(first + block, part.end))
    return rows


def _round_up(length: int) -> int:
    """The next power of two, at least SHORTEST_BUCKET; 0 stays 0."""
    return max(SHORTEST_BUCKET, 1 << (length - 1).bit_length()) if length else 0


def _padded(lengths: list[int], device: torch.device) -> int:
    multiple = 1 if device.type == "cpu" else GPU_MULTIPLE
    return -(-max(lengths) // multiple) * multiple


def _pad(
    bucket: list[_AttentionRow], query_places_T: Int64, key_places_T: Int64, device: torch.device
) -> Bucket:
    num_queries = _padded([row.num_tokens for row in bucket], device)
    num_before = _padded([len(row.before) for row in bucket], device)
    queries_NQ = np.zeros((len(bucket), num_queries), np.int64)
    # of rows with one segment, and of padding: it attends to itself, as a query without keys would give NaN
    nodes_NQ, ends_NQ = np.zeros_like(queries_NQ, np.int16), np.ones_like(queries_NQ, np.int16)
    keys_NK = np.zeros((len(bucket), num_before + num_queries), np.int64)
    for n, row in enumerate(bucket):
        length = row.num_tokens
        queries_NQ[n, :length] = np.arange(row.start, row.end)
        keys_NK[n, : len(row.before)] = row.before
        keys_NK[n, num_before : num_before + length] = queries_NQ[n, :length]
        if len(row.lengths) > 1:
            nodes_NQ[n, :length], ends_NQ[n, :length] = row.nodes()
    return Bucket(
        queries_NQ=torch.from_numpy(query_places_T[queries_NQ]),
        keys_NK=torch.from_numpy(key_places_T[keys_NK]),
        before_N=torch.tensor([len(row.before) for row in bucket]),
        nodes_NQ=torch.from_numpy(nodes_NQ),
        ends_NQ=torch.from_numpy(ends_NQ),
        is_causal=not bucket[0].bucket[0],
    )


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """Every segment of this rank is one sequence of a FlashAttention kernel (Dao 2023, arXiv:2307.08691). Its
    tokens are the queries, its ancestors' tokens and its own the keys. The kernel's causal mask is aligned to
    the end: the last query attends to all keys, the one before to all but the last, and so on; so each
    attends to all ancestors, and to earlier tokens of its own segment."""

    kernel: Kernel
    keys_C: Tensor  # index of each key among all tokens
    query_bounds: Tensor  # [S+1] int32: the queries of sequence s are tokens [s, s+1) of these
    key_bounds: Tensor  # [S+1] int32
    max_queries: int  # of one sequence
    max_keys: int

    def attend(self, query_tHD: Tensor, key_TGD: Tensor, value_TGD: Tensor) -> Tensor:
        return self.kernel(
            query_tHD,
            key_TGD.index_select(0, self.keys_C),
            value_TGD.index_select(0, self.keys_C),
            self.query_bounds,
            self.key_bounds,
            self.max_queries,
            self.max_keys,
        ).flatten(1)


def plan_sequences(
    segments: Segments, device: torch.device, split: ContextSplit, kernel: Kernel
) -> SequencePlan:
    num_tokens = len(segments.token_ids)
    parts = list(cut_segments(segments, split.spans(num_tokens)))
    num_queries = [part.end - part.start for part in parts]
    num_keys = [len(part.before) + part.end - part.start for part in parts]
    keys = [tokens for part in parts for tokens in (part.before, np.arange(part.start, part.end))]

    def bounds(lengths: list[int]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))

    return SequencePlan(
        kernel=kernel,
        keys_C=torch.from_numpy(split.gathered_index(num_tokens)[np.concatenate(keys)]),
        query_bounds=bounds(num_queries),
        key_bounds=bounds(num_keys),
        max_queries=max(num_queries),
        max_keys=max(num_keys),
    )


def _torch_kernel(*arguments: Any) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes a second

    # the window means causal
    return varlen_attn(*arguments, window_size=(-1, 0), enable_gqa=True)  # type: ignore[return-value]


def _flash_kernel(*arguments: Any) -> Tensor:
    from flash_attn import flash_attn_varlen_func  # 2.1 or later

    return flash_attn_varlen_func(*arguments, causal=True)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Backend:
    """How attention is computed."""

    plan: Callable[[Segments, torch.device, ContextSplit], AttentionPlan]  # the plan is on the host
    shares_prefix: bool  # otherwise it takes only roots: each sample gets its own copy of the prompt


BACKENDS = {
    "shared_prefix": Backend(plan_rows, shares_prefix=True),
    "segments": Backend(plan_rows, shares_prefix=False),
    "varlen": Backend(partial(plan_sequences, kernel=_torch_kernel), shares_prefix=True),
    "flash": Backend(partial(plan_sequences, kernel=_flash_kernel), shares_prefix=True),
}


def backend(name: str, dtype: torch.dtype) -> Backend:
    """`auto`: varlen on a GPU in half precision, else shared_prefix. Raises UserError if this machine cannot
    compute it."""
    on_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "varlen" if on_gpu and dtype is not torch.float32 else "shared_prefix"
    if name in ("varlen", "flash") and not on_gpu:
        raise UserError(
            f'attention = "{name}" needs a GPU, but there is no CUDA device here: set attention = "auto"'
        )
    if name == "flash":
        _check_flash()
    # it compiles a plan for each new shape, which takes longer than the call, and every micro-batch has some
    torch.backends.cuda.enable_cudnn_sdp(False)
    return BACKENDS[name]


def _check_flash() -> None:
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except ImportError as error:  # flash-attn-4 has a package of this name, too
        raise UserError(
            f'attention = "flash" calls flash_attn_varlen_func of the flash-attn package, got {error}: '
            'install flash-attn 2 as README.md says, or set attention = "auto"'
        ) from error
