"""Context parallelism: which tokens of a micro-batch a rank holds, and what ranks exchange.

Each rank computes a part of the tokens, in all layers, and gathers the keys and values of all of them
(Llama 3, arXiv:2407.21783, section 3.3.2). TransformerEngine's ring passes keys and values from rank to rank
instead, for whole causal segments alone: it cannot share a prefix. What gathering costs is the memory of one
layer's keys and values, little where several query heads share a key head.

Letters in shapes: T tokens of a micro-batch, t of them on this rank, N tokens that someone asks about, n of
them on this rank.
"""

from dataclasses import dataclass
from math import lcm

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from atoll.wire.types import Int64


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """A micro-batch is cut into 2 * size equal chunks. Rank r holds chunk r from the front and chunk r from
    the back, so that early tokens, which see little, and late ones, which see much, are dealt out evenly."""

    rank: int = 0
    size: int = 1

    def multiple(self, parts: int) -> int:
        """What the number of tokens must be a multiple of, where each rank's are split into `parts` again."""
        return parts if self.size == 1 else self.size * lcm(2, parts)

    def spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """Tokens [start, end) that this rank holds: two chunks, or one span where they touch."""
        front, back = self.rank, 2 * self.size - 1 - self.rank
        borders = [i * num_tokens // (2 * self.size) for i in (front, front + 1, back, back + 1)]
        if borders[1] == borders[2]:
            return [(borders[0], borders[3])]
        return [(borders[0], borders[1]), (borders[2], borders[3])]

    def local_tokens(self, num_tokens: int) -> Int64:
        """[t] the tokens that this rank holds, ascending."""
        return np.concatenate([np.arange(*span) for span in self.spans(num_tokens)])

    def local_index(self, num_tokens: int) -> Int64:
        """[T] each token's place among those that this rank holds; -1 for the others."""
        held = self.local_tokens(num_tokens)
        places_T = np.full(num_tokens, -1)
        places_T[held] = np.arange(len(held))
        return places_T

    def gathered_index(self, num_tokens: int) -> Int64:
        """[T] each token's place after `gather_tokens`: all of rank 0, then all of rank 1, ..."""
        ranks = [ContextSplit(rank, self.size).local_tokens(num_tokens) for rank in range(self.size)]
        places_T = np.empty(num_tokens, np.int64)
        places_T[np.concatenate(ranks)] = np.arange(num_tokens)
        return places_T


def gather_tokens(x_t: Tensor, context: ProcessGroup) -> Tensor:
    """[T, ...] of all ranks. Backward, each rank gets the sum of what all ranks say about its tokens."""
    return gather_from_sequence_parallel_region(x_t, group=context)  # type: ignore[no-any-return]


def join(values_n: Tensor, which_n: Tensor, count: int, context: ProcessGroup) -> Tensor:
    """[N] values of which this rank has computed numbers `which_n`, and others the rest.

    Every rank continues with all of them and computes the same loss. Backward, each takes the gradient of its
    own values alone, so that the sum over ranks has everything once.
    """
    values_N = torch.zeros(count, dtype=values_n.dtype, device=values_n.device)
    values_N = values_N.index_copy(0, which_n, values_n)
    return reduce_from_tensor_model_parallel_region(values_N, group=context)  # type: ignore[no-any-return]
