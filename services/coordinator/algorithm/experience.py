"""Converts scored groups to the flat arrays that estimators and trainers consume. Pure numpy.

Letters in shapes: N samples, T tokens of the batch, R its loss-masked tokens (an estimator's T): those are
in the order of the samples, each sample's in the order in which they were produced. D nodes and prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from atoll.coordinator.algorithm.branches import Branches, find_branches
from atoll.coordinator.algorithm.estimates import Float64
from atoll.runtime.trajectory import inserted_node
from atoll.wire.types import (
    BELOW_PROMPT,
    NEW_CONVERSATION,
    WHOLE,
    Bool,
    Float32,
    Group,
    Int32,
    Int64,
    Node,
    Routes,
    Segments,
)


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """Groups laid out flat: each prompt once, then its samples' trees as segments below it."""

    segments: Segments
    loss_mask_T: Bool
    rollout_logprobs_T: Float32
    sample_T: Int32  # number of each token's sample over all groups; -1 in prompts and what samples share
    lengths: Int64  # [N] loss-masked tokens of each sample
    flat_R: Int64 | None  # flat index of each loss-masked token; None: R is the flat order
    group_N: Int64
    last_N: Int64  # flat index of the last token of each sample's last conversation; -1: it has no token
    rewards_R: Float64  # each turn's reward at its last loss-masked token; a turn without one has none
    branches: Branches | None  # of the R tokens; None: no sample has alternatives
    turn_lengths: Int64  # of the R tokens, those of each turn that has any

    @property
    def num_samples(self) -> int:
        return len(self.group_N)

    @property
    def trained(self) -> Int64 | Bool:
        """Index by which a flat array gives those of R."""
        return self.loss_mask_T if self.flat_R is None else self.flat_R

    @cached_property
    def trained_samples(self) -> Int32:
        """[R] number of each loss-masked token's sample."""
        return self.sample_T[self.trained]

    def pick(self, values_T: Float32) -> Float64:
        """[R]"""
        return values_T[self.trained].astype(np.float64)

    def place(self, values_R: Float64) -> Float32:
        """[T] the inverse of `pick`; 0 where no token is trained."""
        values_T = np.zeros(len(self.loss_mask_T), np.float32)
        values_T[self.trained] = values_R
        return values_T

    def sums(self, values_R: Float64) -> Float64:
        """[N] over the tokens of each sample."""
        sums_N = np.bincount(self.trained_samples, values_R, minlength=self.num_samples)
        return sums_N.astype(np.float64, copy=False)

    def at_the_end(self, values_N: Float64) -> Float64:
        """[R] each sample's number at its last loss-masked token; an empty sample's is nowhere."""
        values_R = np.zeros(int(self.lengths.sum()))
        has_tokens_N = self.lengths > 0
        values_R[np.cumsum(self.lengths)[has_tokens_N] - 1] = values_N[has_tokens_N]
        return values_R


NO_SAMPLE = -1  # in place of a sample's number: what no sample has to itself


@dataclass(frozen=True, eq=False)
class _Nodes:
    """A batch's prompts and nodes by group, sample and time; what samples share stands once."""

    tokens: list[Int32] = field(default_factory=list)
    masks: list[Bool] = field(default_factory=list)
    logprobs: list[Float32] = field(default_factory=list)
    routes: list[Routes | None] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # -1: none
    groups: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)

    def add(self, node: Node, parent: int, group: int, sample: int) -> int:
        self.tokens.append(node.token_ids)
        self.masks.append(node.loss_mask)
        self.logprobs.append(node.logprobs)
        self.routes.append(node.routes)
        self.parents.append(parent)
        self.groups.append(group)
        self.samples.append(sample)
        return len(self.parents) - 1


def lay_out(groups: Sequence[Group]) -> BatchLayout:
    """Two samples `46`, `47` of the prompt `12+34=` become segments [prompt, 46, 47], parents [-1, 0, 0].

    A node joins its parent's segment if the two are of one sample and the parent has no other child. Equal
    first nodes of a group's samples, such as system prompts, are one segment if the policy did not produce
    them. Nothing is below an empty prompt: its samples' first nodes are roots.

    Raises ValueError for a reward that names a node in which the policy produced nothing.
    """
    nodes = _Nodes()
    ends: list[int] = []  # each sample's last node
    rewards: list[tuple[int, int, float]] = []  # sample, node or WHOLE, value
    branches: dict[int, list[tuple[int, int]]] = {}  # of samples that have alternatives
    for number, group in enumerate(groups):
        ids = group.prompt.token_ids
        prompt = nodes.add(inserted_node(-1, ids), -1, number, NO_SAMPLE)
        above = {BELOW_PROMPT: prompt if len(ids) else -1, NEW_CONVERSATION: -1}
        first_nodes: dict[tuple[int, bytes], int] = {}
        for sample in group.samples:
            placed: list[int] = []
            for node in sample.nodes:
                parent = placed[node.parent] if node.parent >= 0 else above[node.parent]
                if node.parent < 0 and len(sample.nodes) > 1 and not node.loss_mask.any():
                    key = parent, node.token_ids.tobytes()
                    if (first := first_nodes.setdefault(key, len(nodes.parents))) < len(nodes.parents):
                        nodes.samples[first] = NO_SAMPLE
                        placed.append(first)
                        continue
                placed.append(nodes.add(node, parent, number, len(ends)))
            for reward in sample.rewards:
                if not WHOLE <= reward.node < len(placed):
                    raise ValueError(
                        f"sample {sample.id}: a reward names node {reward.node} of {len(placed)}, expected "
                        f"one of these, or {WHOLE} for the whole trajectory"
                    )
                of = WHOLE if reward.node == WHOLE else placed[reward.node]
                rewards.append((len(ends), of, reward.value))
            if len(placed) > 1 and len(found := find_branches(sample.nodes)) > 1:
                branches[len(ends)] = found
            ends.append(placed[-1] if placed else prompt)
    return _flatten(groups, nodes, ends, rewards, branches)


def _flatten(
    groups: Sequence[Group],
    nodes: _Nodes,
    ends: Sequence[int],
    rewards: Sequence[tuple[int, int, float]],
    branches: Mapping[int, Sequence[tuple[int, int]]],
) -> BatchLayout:
    parents_D, samples_D = np.array(nodes.parents), np.array(nodes.samples, np.int32)
    lengths_D = np.fromiter(map(len, nodes.tokens), np.int64, len(nodes.tokens))
    segments_D = _join(parents_D, samples_D)
    order_D = np.argsort(segments_D, kind="stable")  # of the nodes in the flat arrays
    starts_D = np.empty(len(order_D), np.int64)
    starts_D[order_D] = np.cumsum(lengths_D[order_D]) - lengths_D[order_D]
    firsts_S = np.unique(segments_D, return_index=True)[1]  # node that each segment begins with
    above_S = parents_D[firsts_S]
    loss_mask_T = np.concatenate([nodes.masks[d] for d in order_D])
    counts_D = np.fromiter(map(np.count_nonzero, nodes.masks), np.int64, len(nodes.masks))
    lengths_N = np.zeros(len(ends), np.int64)
    np.add.at(lengths_N, samples_D[samples_D >= 0], counts_D[samples_D >= 0])
    flat_R = None
    if (np.diff(segments_D) < 0).any():  # conversations interleave
        node_T = np.repeat(np.arange(len(order_D)), lengths_D)
        flat_T = np.arange(len(node_T)) + (starts_D - (np.cumsum(lengths_D) - lengths_D))[node_T]
        flat_R = flat_T[loss_mask_T[flat_T]]
    return BatchLayout(
        segments=Segments(
            token_ids=np.concatenate([nodes.tokens[d] for d in order_D]).astype(np.int32, copy=False),
            offsets=np.append(starts_D[firsts_S], len(loss_mask_T)),
            parents=np.where(above_S >= 0, segments_D[above_S], -1).astype(np.int32),
            groups=np.array(nodes.groups, np.int32)[firsts_S],
            routes=_routes(nodes, starts_D, lengths_D),
        ),
        loss_mask_T=loss_mask_T,
        rollout_logprobs_T=np.concatenate([nodes.logprobs[d] for d in order_D]).astype(
            np.float32, copy=False
        ),
        sample_T=np.repeat(samples_D[order_D], lengths_D[order_D]),
        lengths=lengths_N,
        flat_R=flat_R,
        group_N=np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups]),
        last_N=_last_tokens(np.array(ends, np.int64), parents_D, starts_D, lengths_D),
        rewards_R=_rewards(groups, rewards, lengths_D, counts_D, lengths_N),
        branches=_branches(branches, lengths_N),
        turn_lengths=counts_D[counts_D > 0],
    )


def _routes(nodes: _Nodes, starts_D: Int64, lengths_D: Int64) -> Routes | None:
    """[T, Y, C] of all nodes; None: nothing is recorded. Of what samples share, the first record counts."""
    first = next((routes for routes in nodes.routes if routes is not None), None)
    if first is None:
        return None
    num_tokens = int(lengths_D.sum())
    routes_TYC = np.full((num_tokens, *first.shape[1:]), np.iinfo(first.dtype).max, first.dtype)
    is_known_T = np.zeros(num_tokens, np.bool_)
    for d, routes in enumerate(nodes.routes):
        if routes is None:
            continue
        path = np.empty(0, np.int64)  # flat indices of the last tokens down to this node's
        above = d
        while above >= 0 and len(path) <= len(routes):
            own = np.arange(starts_D[above], starts_D[above] + lengths_D[above])
            path, above = np.concatenate([own, path]), nodes.parents[above]
        path = path[max(len(path) - 1 - len(routes), 0) : -1]
        is_new = ~is_known_T[path]
        routes_TYC[path[is_new]] = routes[len(routes) - len(path) :][is_new]
        is_known_T[path] = True
    return routes_TYC


def _join(parents_D: Int64, samples_D: Int32) -> Int64:
    """[D] the segment of each node."""
    num_children = np.bincount(parents_D[parents_D >= 0], minlength=len(parents_D))
    joins_D = (parents_D >= 0) & (samples_D[parents_D] != NO_SAMPLE) & (num_children[parents_D] == 1)
    segments_D = np.cumsum(~joins_D) - 1
    for d in np.flatnonzero(joins_D):  # parents come first
        segments_D[d] = segments_D[parents_D[d]]
    return segments_D


def _last_tokens(ends_N: Int64, parents_D: Int64, starts_D: Int64, lengths_D: Int64) -> Int64:
    """[N] of each end, or of what is above it if it is empty; -1: all that is above is empty."""
    while (is_empty_N := (ends_N >= 0) & (lengths_D[ends_N] == 0)).any():
        ends_N = np.where(is_empty_N, parents_D[ends_N], ends_N)
    return np.where(ends_N >= 0, starts_D[ends_N] + lengths_D[ends_N] - 1, -1)


def _rewards(
    groups: Sequence[Group],
    rewards: Sequence[tuple[int, int, float]],
    lengths_D: Int64,
    counts_D: Int64,
    lengths_N: Int64,
) -> Float64:
    """[R]; a reward of a turn or sample without a loss-masked token is left out. `counts_D` counts these."""
    rewards_R = np.zeros(int(lengths_N.sum()))
    if not rewards:
        return rewards_R
    samples, nodes, values = map(np.array, zip(*rewards, strict=True))
    is_wrong = (nodes != WHOLE) & (counts_D[nodes] == 0) & (lengths_D[nodes] > 0) & (lengths_N[samples] > 0)
    if is_wrong.any():
        ids = [sample.id for group in groups for sample in group.samples]
        raise ValueError(
            f"sample {ids[samples[is_wrong][0]]}: a reward names a node that the policy did not produce; "
            f"name one that it did, or {WHOLE} for the whole trajectory"
        )
    has_tokens = np.where(nodes == WHOLE, lengths_N[samples], counts_D[nodes]) > 0
    last = np.where(nodes == WHOLE, np.cumsum(lengths_N)[samples], np.cumsum(counts_D)[nodes]) - 1
    np.add.at(rewards_R, last[has_tokens], values[has_tokens])
    return rewards_R


def _branches(found: Mapping[int, Sequence[tuple[int, int]]], lengths_N: Int64) -> Branches | None:
    """Those of all samples; `found` has those of samples with alternatives."""
    if not found:
        return None
    lengths: list[int] = []
    parents: list[int] = []
    samples: list[int] = []
    for sample, length in enumerate(lengths_N.tolist()):
        first = len(lengths)
        for tokens, parent in found.get(sample, [(length, -1)]):
            lengths.append(tokens)
            parents.append(first + parent if parent >= 0 else -1)
            samples.append(sample)
    return Branches(np.array(lengths), np.array(parents), np.array(samples))


def fresh_tokens(groups: Sequence[Group], oldest: int) -> Bool:
    """[R] whether no token of the same turn is of a version before number `oldest`."""
    nodes = [node for group in groups for sample in group.samples for node in sample.nodes]
    numbers = np.fromiter((node.oldest_number or 0 for node in nodes), np.int64, len(nodes))
    return _of_tokens(numbers >= oldest, nodes)


def weighing_tokens(groups: Sequence[Group], oldest: int) -> Bool | None:
    """[R] whether a token has weight in the loss: its turn is neither `untrained` nor, if `oldest` is not 0,
    of a version before that number, and its trajectory is not aborted. None: all have."""
    samples = [sample for group in groups for sample in group.samples]
    untrained = [sample.untrained_nodes() for sample in samples]
    if not any(untrained):
        return fresh_tokens(groups, oldest) if oldest else None
    nodes = [node for sample in samples for node in sample.nodes]
    weighs = np.array(
        [
            node not in left_out
            for sample, left_out in zip(samples, untrained, strict=True)
            for node in range(len(sample.nodes))
        ]
    )
    return _of_tokens(weighs, nodes) & fresh_tokens(groups, oldest)


def _of_tokens(values: Bool, nodes: Sequence[Node]) -> Bool:
    """[R] from one value for each node."""
    counts = np.fromiter((node.num_produced for node in nodes), np.int64, len(nodes))
    return np.repeat(values, counts)


def loss_weights(
    loss_mask_T: Bool,
    sample_T: Int32,
    weight_N: Float64,
    aggregation: str,
    max_length: int,
    first: int = 0,
) -> Float32:
    """[T] weights that turn a sum over the tokens of a minibatch into the wanted mean over it.

    With m_n loss-masked tokens and weight w_n of its N samples (1 unless a recipe reweights them), a
    token of sample n gets

        token_mean                w_n / sum(w m)
        seq_mean_token_mean       w_n / (m_n N)
        seq_mean_token_sum        w_n / N
        seq_mean_token_sum_norm   w_n / (N max_length)     Dr.GRPO, https://arxiv.org/abs/2503.20783

    An empty response counts among the N samples, which are those from number `first` on.
    """
    trained_T = sample_T[loss_mask_T]  # a copy
    trained_T -= first
    length_N = np.bincount(trained_T, minlength=len(weight_N))
    num_samples = len(weight_N)
    match aggregation:
        case "token_mean":
            scale_N = weight_N / max(float((weight_N * length_N).sum()), 1e-8)
        case "seq_mean_token_mean":
            scale_N = weight_N / (np.maximum(length_N, 1) * num_samples)
        case "seq_mean_token_sum":
            scale_N = weight_N / num_samples
        case _:
            scale_N = weight_N / (num_samples * max_length)
    weights_T = np.zeros(len(loss_mask_T), np.float32)
    weights_T[loss_mask_T] = scale_N.astype(np.float32)[trained_T]
    return weights_T


@dataclass(frozen=True, slots=True)
class MinibatchSlice:
    """A minibatch: some groups of a layout, as slices of its arrays."""

    segments: Segments
    tokens: slice
    samples: slice


def split(layout: BatchLayout, num_minibatches: int) -> list[MinibatchSlice]:
    """Consecutive runs of whole groups, as equal as they go."""
    groups, segments = layout.segments.groups, layout.segments
    bounds = np.linspace(0, int(groups[-1]) + 1, num_minibatches + 1).astype(int)
    segment_bounds = np.searchsorted(groups, bounds)
    sample_bounds = np.searchsorted(layout.group_N, bounds)
    return [
        MinibatchSlice(
            *segments.part(int(segment_bounds[i]), int(segment_bounds[i + 1])), _slice(sample_bounds, i)
        )
        for i in range(num_minibatches)
    ]


def _slice(bounds: Int64, i: int) -> slice:
    return slice(int(bounds[i]), int(bounds[i + 1]))


def lay_out_supervised(sequences: Sequence[tuple[Int32, Bool]]) -> tuple[Segments, Float32]:
    """Sequences of (token ids [T], loss mask [T]) as segments and loss weights [T]: the mean over the learned
    tokens of all.

    Nothing shares a prompt here, so a sequence is one segment, which needs no mask of its ancestors.
    """
    ids, masks = zip(*sequences, strict=True)
    segments = Segments(
        token_ids=np.concatenate(ids),
        offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        parents=np.full(len(ids), -1, np.int32),
        groups=np.arange(len(ids), dtype=np.int32),
    )
    loss_mask_T = np.concatenate(masks)
    return segments, (loss_mask_T / loss_mask_T.sum()).astype(np.float32)
