"""Scored groups -> the flat arrays that estimators read and trainers consume. Pure numpy.

Letters in shapes: N samples, T tokens of the batch, R its loss-masked tokens (an estimator's T): those are
in the order of the samples, each sample's in the order in which they were produced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from atoll.coordinator.algorithm.advantage import Float64
from atoll.wire.types import Bool, Float32, Group, Int32, Int64, Segments


@dataclass(frozen=True, eq=False)
class Layout:
    """Groups laid out flat: each prompt once, then its samples' nodes as segments below it."""

    segments: Segments
    loss_mask_T: Bool
    rollout_logprobs_T: Float32
    sample_T: Int32  # number of each token's sample over all groups; -1 in prompts
    group_N: Int64
    last_N: Int64  # flat index of each sample's last token; of the prompt's where it has none
    rewards_R: Float64  # each turn's reward at its last loss-masked token, or the last one before it

    @property
    def num_samples(self) -> int:
        return len(self.group_N)

    @cached_property
    def trained_samples(self) -> Int32:
        """[R] number of each loss-masked token's sample."""
        return self.sample_T[self.loss_mask_T]

    @cached_property
    def lengths(self) -> Int64:
        """[N] loss-masked tokens of each sample."""
        return np.bincount(self.trained_samples, minlength=self.num_samples)

    def pick(self, values_T: Float32) -> Float64:
        """[R]"""
        return values_T[self.loss_mask_T].astype(np.float64)

    def place(self, values_R: Float64) -> Float32:
        """[T] the inverse of `pick`; 0 where no token is trained."""
        values_T = np.zeros(len(self.loss_mask_T), np.float32)
        values_T[self.loss_mask_T] = values_R
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


def lay_out(groups: Sequence[Group]) -> Layout:
    """Two samples `46`, `47` of the prompt `12+34=` become segments [prompt, 46, 47], parents [-1, 0, 0]."""
    tokens, masks, logprobs = [], [], []
    parents: list[int] = []
    group_of: list[int] = []  # each segment's
    sample_of: list[int] = []  # each segment's
    last_segment: list[int] = []  # each sample's
    turns: list[tuple[int, int, float]] = []  # sample, segment and value of each reward
    for number, group in enumerate(groups):
        root = len(parents)
        tokens.append(group.prompt.token_ids)
        masks.append(np.zeros(len(group.prompt.token_ids), np.bool_))
        logprobs.append(np.zeros(len(group.prompt.token_ids), np.float32))
        parents.append(-1)
        group_of.append(number)
        sample_of.append(-1)
        for sample in group.samples:
            first = len(parents)
            turns += [(len(last_segment), first + reward.node, reward.value) for reward in sample.rewards]
            for node in sample.nodes:
                tokens.append(node.token_ids)
                masks.append(node.loss_mask)
                logprobs.append(node.logprobs)
                parents.append(root if node.parent < 0 else first + node.parent)
                group_of.append(number)
                sample_of.append(len(last_segment))
            filled = (s for s in range(len(parents) - 1, first - 1, -1) if len(tokens[s]))
            last_segment.append(next(filled, root))
    lengths_S = np.fromiter(map(len, tokens), np.int64, len(tokens))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_S)])
    loss_mask_T = np.concatenate(masks)
    sample_T = np.repeat(np.array(sample_of, np.int32), lengths_S)
    return Layout(
        segments=Segments(
            token_ids=np.concatenate(tokens).astype(np.int32, copy=False),
            offsets=offsets,
            parents=np.array(parents, np.int32),
            groups=np.array(group_of, np.int32),
        ),
        loss_mask_T=loss_mask_T,
        rollout_logprobs_T=np.concatenate(logprobs).astype(np.float32, copy=False),
        sample_T=sample_T,
        group_N=np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups]),
        last_N=offsets[np.array(last_segment, np.int64) + 1] - 1,
        rewards_R=_rewards(turns, offsets, loss_mask_T, sample_T, len(last_segment)),
    )


def _rewards(
    turns: Sequence[tuple[int, int, float]],
    offsets: Int64,
    loss_mask_T: Bool,
    sample_T: Int32,
    num_samples: int,
) -> Float64:
    """[R]; rewards of a sample without a loss-masked token are left out."""
    lengths_N = np.bincount(sample_T[loss_mask_T], minlength=num_samples)
    starts_N = np.cumsum(lengths_N) - lengths_N
    trained_before = np.concatenate([[0], np.cumsum(loss_mask_T)])  # a flat index -> its number in R
    rewards_R = np.zeros(trained_before[-1])
    for sample, segment, value in turns:
        if lengths_N[sample]:
            at = trained_before[offsets[segment + 1]] - 1
            rewards_R[max(at, starts_N[sample])] += value  # a turn before the first token: at the first one
    return rewards_R


def loss_weights(
    loss_mask_T: Bool, sample_T: Int32, weight_N: Float64, aggregation: str, max_length: int
) -> Float32:
    """[T] weights that turn a sum over the tokens of a minibatch into the wanted mean over it.

    With m_n loss-masked tokens and weight w_n of its N samples (1 unless a recipe reweights them), a
    token of sample n gets

        token_mean                w_n / sum(w m)
        seq_mean_token_mean       w_n / (m_n N)
        seq_mean_token_sum        w_n / N
        seq_mean_token_sum_norm   w_n / (N max_length)     Dr.GRPO, https://arxiv.org/abs/2503.20783

    An empty response counts among the N samples. `weight_N` covers the samples that `sample_T` names.
    """
    trained_T = sample_T[loss_mask_T]
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
    weights_T[loss_mask_T] = scale_N[trained_T]
    return weights_T


@dataclass(frozen=True, slots=True)
class Part:
    """A minibatch: some groups of a layout, as slices of its arrays."""

    segments: Segments
    tokens: slice
    samples: slice


def split(layout: Layout, num_minibatches: int) -> list[Part]:
    """Consecutive runs of whole groups, as equal as they go."""
    groups, segments = layout.segments.groups, layout.segments
    bounds = np.linspace(0, int(groups[-1]) + 1, num_minibatches + 1).astype(int)
    segment_bounds = np.searchsorted(groups, bounds)
    sample_bounds = np.searchsorted(layout.group_N, bounds)
    return [
        Part(*segments.part(int(segment_bounds[i]), int(segment_bounds[i + 1])), _slice(sample_bounds, i))
        for i in range(num_minibatches)
    ]


def _slice(bounds: Int64, i: int) -> slice:
    return slice(int(bounds[i]), int(bounds[i + 1]))


def supervised(rows: Sequence[tuple[Int32, Int32]]) -> tuple[Segments, Float32]:
    """Rows of (prompt ids, response ids) as segments and loss weights [T]: the mean over response tokens.

    Nothing shares a prompt here, so a row is one segment, which needs no mask of its ancestors.
    """
    lengths_S = np.array([len(prompt) + len(response) for prompt, response in rows], np.int64)
    segments = Segments(
        token_ids=np.concatenate([part for row in rows for part in row]).astype(np.int32, copy=False),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_S)]),
        parents=np.full(len(rows), -1, np.int32),
        groups=np.arange(len(rows), dtype=np.int32),
    )
    starts_T = np.repeat([len(prompt) for prompt, _ in rows], lengths_S)  # of each token's response
    loss_mask_T = segments.positions >= starts_T
    return segments, (loss_mask_T / loss_mask_T.sum()).astype(np.float32)
