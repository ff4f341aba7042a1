"""Random token trees, and the padded rows that they represent."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atoll.wire.types import Segments


@dataclass(frozen=True, eq=False)
class Tree:
    """R rows of at most L tokens: the sequences of S segments with T tokens in all."""

    segments: Segments
    samples: np.ndarray  # [T] -1 in prompts
    ids_RL: Tensor  # 0 where a row has ended
    mask_RL: Tensor
    row_T: Tensor  # row of each token of the segments; of a prompt's tokens, the first of its rows
    column_T: Tensor

    @property
    def trained(self) -> np.ndarray:
        """The tokens of all responses."""
        return np.flatnonzero(self.samples >= 0)


def draw_tree(seed: int, num_groups: int = 4) -> Tree:
    """Groups of a prompt and one to four responses. No token 0: transformers pads with it."""
    rng = np.random.default_rng(seed)
    parents: list[int] = []
    groups: list[int] = []
    for group in range(num_groups):
        root, num_samples = len(parents), int(rng.integers(1, 5))
        parents += [-1, *[root] * num_samples]
        groups += [group] * (1 + num_samples)
    lengths = rng.integers(2, 11, len(parents))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.integers(3, 64, offsets[-1]).astype(np.int32)
    segments = Segments(tokens, offsets, np.array(parents, np.int32), np.array(groups, np.int32))
    is_response = np.array(parents) >= 0
    numbers = np.where(is_response, np.cumsum(is_response) - 1, -1)
    return Tree(segments, np.repeat(numbers, lengths).astype(np.int32), *_padded(segments))


def _padded(segments: Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    spans = [
        np.arange(start, end) for start, end in zip(segments.offsets, segments.offsets[1:], strict=False)
    ]
    rows = [
        np.concatenate([spans[parent], own])
        for parent, own in zip(segments.parents, spans, strict=True)
        if parent >= 0
    ]
    ids, mask = torch.zeros(2, len(rows), max(map(len, rows)), dtype=torch.int64)
    places = torch.zeros(2, len(segments.token_ids), dtype=torch.int64)
    for r, row in reversed(list(enumerate(rows))):
        ids[r, : len(row)] = torch.from_numpy(segments.token_ids[row])
        mask[r, : len(row)] = 1
        places[0, row], places[1, row] = r, torch.arange(len(row))
    return ids, mask, places[0], places[1]
