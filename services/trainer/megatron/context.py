"""Context parallelism: which tokens of a micro-batch a rank holds, and what ranks exchange.

Each rank computes some of the tokens in all layers, and gathers the keys and values of all tokens (Llama 3,
arXiv:2407.21783, section 3.3.2). TransformerEngine's ring attention instead passes keys and values from rank
to rank, but only supports whole causal segments, so it cannot share a prefix. Gathering costs the memory of
one layer's keys and values, which is small if several query heads share a key head.

Letters in shapes: T tokens of a micro-batch, t of them on this rank, N requested tokens, n of them on this
rank.
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
    the back, to balance early tokens, which attend to few others, with late ones, which attend to many."""

    rank: int = 0
    size: int = 1

    def multiple(self, parts: int) -> int:
        """The number of tokens must be a multiple of this, if each rank's tokens are split into `parts`
        again."""
        return parts if self.size == 1 else self.size * lcm(2, parts)

    def spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """Tokens [start, end) that this rank holds: two chunks, or one span if they are adjacent."""
        front, back = self.rank, 2 * self.size - 1 - self.rank
        borders = [i * num_tokens // (2 * self.size) for i in (front, front + 1, back, back + 1)]
        if borders[1] == borders[2]:
            return [(borders[0], borders[3])]
        return [(borders[0], borders[1]), (borders[2], borders[3])]

    def local_tokens(self, num_tokens: int) -> Int64:
        """[t] indices of this rank's tokens, ascending."""
        return np.concatenate([np.arange(*span) for span in self.spans(num_tokens)])

    def local_index(self, num_tokens: int) -> Int64:
        """[T] each token's index among this rank's tokens; -1 for the others."""
        held = self.local_tokens(num_tokens)
        places_T = np.full(num_tokens, -1)
        places_T[held] = np.arange(len(held))
        return places_T

    def gathered_index(self, num_tokens: int) -> Int64:
        """[T] each token's index after `gather_tokens`: all of rank 0, then all of rank 1, ..."""
        ranks = [ContextSplit(rank, self.size).local_tokens(num_tokens) for rank in range(self.size)]
        places_T = np.empty(num_tokens, np.int64)
        places_T[np.concatenate(ranks)] = np.arange(num_tokens)
        return places_T


def gather_tokens(x_t: Tensor, context: ProcessGroup) -> Tensor:
    """[T, ...] of all ranks. In the backward pass, each rank gets the sum of all ranks' gradients of its
    tokens."""
    return gather_from_sequence_parallel_region(x_t, group=context)  # type: ignore[no-any-return]


def join(values_n: Tensor, which_n: Tensor, count: int, context: ProcessGroup) -> Tensor:
    """[N] values, of which this rank has computed those with indices `which_n`, and others the rest.

    Every rank continues with all of them and computes the same loss. In the backward pass, each takes only
    the gradient of its own values, so that the sum over ranks counts everything once.
    """
    values_N = torch.zeros(count, dtype=values_n.dtype, device=values_n.device)
    values_N = values_N.index_copy(0, which_n, values_n)
    return reduce_from_tensor_model_parallel_region(values_N, group=context)  # type: ignore[no-any-return]
