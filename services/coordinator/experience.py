"""Scored groups -> batches that the trainer consumes. Pure numpy. Shapes: N samples, T tokens."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from services.coordinator.advantage import Float64
from services.wire.types import Bool, Float32, Group, Int32, Int64, Segments


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Groups laid out flat: each prompt once, then its samples' nodes as segments below it."""

    segments: Segments
    loss_mask_T: Bool
    rollout_logprobs_T: Float32
    sample_T: Int64  # sample's number over all groups; -1 for prompt tokens
    num_samples: int


def lay_out(groups: Sequence[Group]) -> Layout:
    """Two samples `46`, `47` of the prompt `12+34=` become segments [prompt, 46, 47], parents [-1, 0, 0]."""
    tokens, masks, logprobs = [], [], []
    parents: list[int] = []
    group_of: list[int] = []
    sample_of: list[int] = []
    num_samples = 0
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
            for node in sample.nodes:
                tokens.append(node.token_ids)
                masks.append(node.loss_mask)
                logprobs.append(node.logprobs)
                parents.append(root if node.parent < 0 else first + node.parent)
                group_of.append(number)
                sample_of.append(num_samples)
            num_samples += 1
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    return Layout(
        segments=Segments(
            token_ids=np.concatenate(tokens).astype(np.int32, copy=False),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            parents=np.array(parents, np.int32),
            groups=np.array(group_of, np.int32),
        ),
        loss_mask_T=np.concatenate(masks),
        rollout_logprobs_T=np.concatenate(logprobs).astype(np.float32, copy=False),
        sample_T=np.repeat(np.array(sample_of, np.int64), lengths),
        num_samples=num_samples,
    )


def spread(values_N: Float64, layout: Layout) -> Float32:
    """[T] each sample's value on its loss-masked tokens, 0 elsewhere."""
    return np.where(layout.loss_mask_T, values_N[layout.sample_T], 0.0).astype(np.float32)


def loss_weights(layout: Layout, aggregation: str) -> Float32:
    """[T] weights that turn a sum over tokens into the wanted mean over the minibatch.

    token_mean: 1 / (loss-masked tokens of the minibatch). seq_mean_token_mean: the mean over all
    samples of the mean over each sample's loss-masked tokens; an empty response counts as 0.
    """
    if aggregation == "token_mean":
        per_token_T = np.full(len(layout.loss_mask_T), 1.0 / max(int(layout.loss_mask_T.sum()), 1))
    else:
        length_N = np.bincount(layout.sample_T[layout.loss_mask_T], minlength=layout.num_samples)
        per_token_T = 1.0 / (np.maximum(length_N, 1)[layout.sample_T] * layout.num_samples)
    return np.where(layout.loss_mask_T, per_token_T, 0.0).astype(np.float32)


def split(groups: Sequence[Group], num_minibatches: int) -> Iterator[tuple[Sequence[Group], slice]]:
    """Consecutive runs of whole groups, as equal as they go, and the slice of their samples."""
    bounds = np.linspace(0, len(groups), num_minibatches + 1).astype(int)
    first_sample = np.cumsum([0, *(len(group.samples) for group in groups)])
    for start, end in itertools.pairwise(bounds):
        yield groups[start:end], slice(int(first_sample[start]), int(first_sample[end]))


def supervised(rows: Sequence[tuple[Int32, Int32]]) -> Layout:
    """Rows of (prompt ids, response ids) as a layout of one sample per prompt, for warm-up."""
    tokens = [part for row in rows for part in row]
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    is_response = np.arange(len(tokens)) % 2 == 1
    parents = np.where(is_response, np.arange(len(tokens)) - 1, -1)
    sample_S = np.where(is_response, np.arange(len(tokens)) // 2, -1)
    return Layout(
        segments=Segments(
            token_ids=np.concatenate(tokens).astype(np.int32, copy=False),
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            parents=parents.astype(np.int32),
            groups=(np.arange(len(tokens)) // 2).astype(np.int32),
        ),
        loss_mask_T=np.repeat(is_response, lengths),
        rollout_logprobs_T=np.zeros(int(lengths.sum()), np.float32),
        sample_T=np.repeat(sample_S, lengths),
        num_samples=len(rows),
    )
