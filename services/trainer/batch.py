"""Cuts a batch into micro-batches and spreads them over data-parallel ranks. Pure numpy.

A tree (a root segment and everything below it) is never split, so a shared prompt is computed once.
All functions are deterministic: every rank derives the same plan from the same batch.

Letters in shapes: T tokens, S segments.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from atoll.runtime.errors import UserError
from atoll.wire.types import Batch, Bool, Float32, Int32, Int64, PolicyBatch, Segments

B = TypeVar("B", bound=Batch)


@dataclass(frozen=True, eq=False)
class Selection:
    """A renumbered subset of segments, and the positions of its tokens in the original."""

    segments: Segments
    source: Int64  # [T]


def check_segments(segments: Segments, vocab_size: int, max_length: int) -> None:
    """Raises UserError if the model cannot compute `segments`."""
    offsets, parents, tokens = segments.offsets, segments.parents, segments.token_ids
    lengths = np.diff(offsets)
    well_formed = (
        len(offsets) == len(parents) + 1 == len(segments.groups) + 1
        and len(parents) > 0
        and offsets[0] == 0
        and offsets[-1] == len(tokens)
        and bool((lengths >= 0).all())
        and bool((parents < np.arange(len(parents))).all())
        and bool((parents >= -1).all())
        and bool((np.diff(segments.groups) >= 0).all())
    )
    if not well_formed:
        raise UserError(
            f"malformed segments: {len(tokens)} tokens, {len(parents)} parents, {len(offsets)} offsets; "
            "expected at least one segment, offsets ascending from 0 to the number of tokens, parents "
            "before their children, groups ascending"
        )
    unknown = (tokens < 0) | (tokens >= vocab_size)
    if unknown.any():
        raise UserError(
            f"token id {int(tokens[unknown][0])} is outside the model's vocabulary of {vocab_size}: "
            "the tokenizer does not match the model"
        )
    longest = int(segments.positions.max(initial=-1)) + 1
    if longest > max_length:
        raise UserError(
            f"a sequence has {longest} tokens, the model takes at most {max_length}: "
            "lower data.max_prompt_tokens or rollout.sampling.max_new_tokens"
        )


def check_batch(batch: Batch) -> None:
    """Raises UserError if the per-token arrays do not fit `batch.segments`, or each other."""
    num_tokens = len(batch.segments.token_ids)
    for name, array in _arrays(batch).items():
        if len(array) != num_tokens:
            raise UserError(f"the batch has {num_tokens} tokens, but {len(array)} {name}")
        if not np.isfinite(array).all():
            raise UserError(f"the batch's {name} hold NaN or infinity: see its rewards")
    if batch.loss_weights[batch.segments.predecessors < 0].any():
        raise UserError("the first token of a root has a loss weight, but nothing before it predicts it")
    if isinstance(batch, PolicyBatch):
        _check_samples(batch)


def _check_samples(batch: PolicyBatch) -> None:
    trained = np.flatnonzero(batch.loss_weights)
    samples_N = batch.samples[trained]
    if (samples_N < 0).any():
        raise UserError("a token that belongs to no sample has a loss weight: prompts are not trained on")
    if (np.diff(samples_N) < 0).any():
        raise UserError("the numbers of the trained tokens' samples must ascend: lay samples out in order")
    groups_T = np.repeat(batch.segments.groups, np.diff(batch.segments.offsets))
    is_split_N = (np.diff(samples_N) == 0) & (np.diff(groups_T[trained]) != 0)
    if is_split_N.any():
        sample = int(samples_N[1:][is_split_N][0])
        raise UserError(f"the trained tokens of sample {sample} lie in two groups, expected them in one")


def plan_microbatches(
    segments: Segments,
    is_asked: Bool,
    max_tokens: int,
    num_ranks: int,
    samples: Int32 | None = None,
    alike: bool = False,
    multiple: int = 1,
) -> list[list[Int64]]:
    """Segment numbers, ascending, of every micro-batch of every rank.

    Trees without a token that `is_asked` ([T]) are left out. Groups go to ranks balanced by token count;
    within a rank, trees go to micro-batches of nearly equal size, at most `max_tokens` tokens; a larger tree
    is alone in its own. With `samples` ([T], -1 for none), trees that hold one sample stay together: those of
    its conversations, and those that `flatten_trees` makes of its branches.

    Empty micro-batches fill up if ranks need equally many (`alike`: a collective between data-parallel
    ranks runs inside of each), or a multiple of some number of them. Else a rank may get none.
    """
    lengths = np.diff(segments.offsets)
    roots = _roots(segments)
    if samples is not None:
        roots = _roots_by_sample(segments, roots, samples)
    asked = np.unique(np.repeat(roots, lengths)[is_asked])  # trees, named by their roots
    tree_tokens = np.bincount(roots, lengths, minlength=len(roots)).astype(np.int64)[asked]
    _, group_of_tree = np.unique(segments.groups[asked], return_inverse=True)
    group_tokens = np.bincount(group_of_tree, tree_tokens).astype(np.int64)
    plan: list[list[Int64]] = []
    for groups in karmarkar_karp(group_tokens.tolist(), num_ranks):
        own = np.isin(group_of_tree, groups)
        parts = _balance(tree_tokens[own].tolist(), max_tokens)
        plan.append([np.flatnonzero(np.isin(roots, asked[own][trees])) for trees in parts])
    counts = [-(-len(parts) // multiple) * multiple for parts in plan]
    nothing = np.zeros(0, np.int64)
    return [
        parts + [nothing] * ((max(counts) if alike else count) - len(parts))
        for parts, count in zip(plan, counts, strict=True)
    ]


def _roots(segments: Segments) -> Int64:
    """[S] the root above each segment."""
    roots = np.arange(len(segments.parents), dtype=np.int64)
    for s, parent in enumerate(segments.parents.tolist()):  # parents come first
        if parent >= 0:
            roots[s] = roots[parent]
    return roots


def _roots_by_sample(segments: Segments, roots: Int64, samples: Int32) -> Int64:
    """[S] the first root among those that samples connect: each holds one that the next holds, too."""
    is_sample_T = samples >= 0
    sample_of = samples[is_sample_T]
    root_of = np.repeat(roots, np.diff(segments.offsets))[is_sample_T]
    first_root = np.arange(len(roots))  # of each root, so far
    while True:
        of_sample = np.full(sample_of.max(initial=-1) + 1, len(roots))
        np.minimum.at(of_sample, sample_of, first_root[root_of])
        joined = first_root.copy()
        np.minimum.at(joined, root_of, of_sample[sample_of])
        if (joined == first_root).all():
            return joined[roots]
        first_root = joined


def _balance(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Item numbers in as few parts as first fit needs, or fewer, of nearly equal size, none above `capacity`;
    a larger item is alone."""
    alone = [[item] for item, size in enumerate(sizes) if size > capacity]
    items = [item for item, size in enumerate(sizes) if size <= capacity]
    costs = [sizes[item] for item in items]
    parts = _first_fit(costs, capacity)
    for num_parts in range(-(-sum(costs) // capacity), len(parts) + 1):
        balanced = karmarkar_karp(costs, num_parts)
        if all(sum(costs[i] for i in part) <= capacity for part in balanced):
            parts = balanced
            break
    return alone + [[items[i] for i in part] for part in parts]


def _first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Item numbers in parts of at most `capacity`, the largest items first."""
    bins: list[list[int]] = []
    free: list[int] = []
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fitting = next((i for i, room in enumerate(free) if room >= sizes[item]), None)
        if fitting is None:
            bins.append([item])
            free.append(capacity - sizes[item])
        else:
            bins[fitting].append(item)
            free[fitting] -= sizes[item]
    return bins


def karmarkar_karp(costs: Sequence[int], num_parts: int) -> list[list[int]]:
    """Splits item numbers into `num_parts` lists of nearly equal total cost.

    Largest differencing method (Karmarkar & Karp 1982): the two partitions whose sums differ most are
    merged, the heaviest part of one with the lightest of the other.
    """
    if not costs:
        return [[] for _ in range(num_parts)]
    Parts = list[tuple[int, list[int]]]  # (sum, items) of each part, ascending
    heap: list[tuple[int, int, Parts]] = []  # (minus the spread, first item, partition)
    for item, cost in enumerate(costs):
        heap.append((-cost, item, [*((0, []) for _ in range(num_parts - 1)), (cost, [item])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, left), (_, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        merged = sorted(
            (a + b, items + more) for (a, items), (b, more) in zip(left, reversed(right), strict=True)
        )
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], first, merged))
    return [sorted(items) for _, items in heap[0][2]]


def select(segments: Segments, chosen: Int64) -> Selection:
    """The `chosen` segments (ascending, whole trees) as segments of their own."""
    source, offsets = _gather(segments.offsets, chosen)
    number = np.full(len(segments.parents) + 1, -1, np.int32)  # the last one answers parent -1
    number[chosen] = np.arange(len(chosen))
    return Selection(
        Segments(
            token_ids=segments.token_ids[source],
            offsets=offsets,
            parents=number[segments.parents[chosen]],
            groups=segments.groups[chosen],
            routes=segments.routes_of(source),
        ),
        source,
    )


def pad(segments: Segments, multiple: int, at_least: int = 1) -> Segments:
    """With a root of padding tokens behind the others, where their number is below `at_least` or no multiple
    of `multiple`. Nothing attends to it, and no loss weight is there."""
    num_tokens = len(segments.token_ids)
    missing = -(-max(num_tokens, at_least) // multiple) * multiple - num_tokens
    if not missing:
        return segments
    routes = segments.routes
    if routes is not None:
        unknown = np.full((missing, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)
        routes = np.concatenate([routes, unknown])
    return Segments(
        token_ids=np.append(segments.token_ids, np.zeros(missing, np.int32)),
        offsets=np.append(segments.offsets, np.int64(num_tokens + missing)),
        parents=np.append(segments.parents, np.int32(-1)),
        groups=np.append(segments.groups, segments.groups.max(initial=0)),
        routes=routes,
    )


def flatten_trees(segments: Segments) -> tuple[Selection, Bool]:
    """One segment for each path from a root to a leaf, for a backend that cannot share a prefix.

    The flags ([T]) tell each token's first copy: only this one carries the token's loss weight.
    """
    is_leaf = np.ones(len(segments.parents), bool)
    is_leaf[segments.parents[segments.parents >= 0]] = False
    path: list[int] = []  # segments, path after path
    lengths: list[int] = []  # tokens of each path
    for leaf in np.flatnonzero(is_leaf).tolist():
        nodes = [leaf]
        while (parent := int(segments.parents[nodes[-1]])) >= 0:
            nodes.append(parent)
        path += reversed(nodes)
        lengths.append(int(segments.offsets[[n + 1 for n in nodes]].sum() - segments.offsets[nodes].sum()))
    source, bounds = _gather(segments.offsets, np.array(path))
    first_of_path = np.zeros(len(path), bool)
    first_of_path[np.unique(path, return_index=True)[1]] = True
    flat = Segments(
        token_ids=segments.token_ids[source],
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        parents=np.full(len(lengths), -1, np.int32),
        groups=segments.groups[is_leaf],
        routes=segments.routes_of(source),
    )
    return Selection(flat, source), np.repeat(first_of_path, np.diff(bounds))


def take(batch: B, selection: Selection) -> B:
    """The per-token arrays of the batch for the tokens of `selection`."""
    taken: dict[str, Any] = {name: array[selection.source] for name, array in _arrays(batch).items()}
    return replace(batch, segments=selection.segments, **taken)


def _arrays(batch: Batch) -> dict[str, Float32 | Int32]:
    """All per-token arrays of the batch, each [T]."""
    return {name: value for name, value in vars(batch).items() if isinstance(value, np.ndarray)}


def _gather(offsets: Int64, chosen: Int64) -> tuple[Int64, Int64]:
    """Flat token numbers of the `chosen` segments one after another, and their own offsets."""
    lengths = np.diff(offsets)[chosen]
    own = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return np.repeat(offsets[chosen] - own[:-1], lengths) + np.arange(own[-1]), own
