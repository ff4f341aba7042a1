"""Chooses a sender for each target rank among the ranks that hold the same boxes. Pure numpy.

The elements that a set of ranks has in common are laid out on a line, target after target; each rank of the
set sends one stretch. Equal stretches balance the work. To keep the number of senders per target low,
stretches end at borders of targets if possible, and ranks are ordered by the targets that they already send
to.

Letters in shapes: S sets, T targets, R trainer ranks, K ranks that share a set's line, B stretches.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.wire.types import Int64

# a set's elements by target [T], its ranks [K], what they already send [R, T] -> begins and senders [B]
Cut = Callable[[Int64, Int64, NDArray[np.float64]], tuple[Int64, Int64]]
SLACK = 0.02  # of a stretch: how far each border may move to coincide with a target's


def assign_senders(
    elements_ST: Int64,
    sets: Sequence[Sequence[int]],
    copies: Sequence[Sequence[int]],
    max_senders: int,
    tie_break: int,
) -> tuple[Int64, Int64]:
    """The beginning of each stretch on the concatenated lines of all sets [B], and its sender [B].

    `elements_ST`: number of elements that each target wants from each set; `sets`: indices of each set's
    shard layouts, small sets first; `copies`: the ranks with each shard layout. As many copies send as the
    limit allows; plans with different `tie_break` prefer different ones. If even one copy of each exceeds the
    limit, elements that several shard layouts hold come from ranks that send to the target anyway, however
    unequal the stretches.
    """
    fewest, sent_RT = _stretches(elements_ST, sets, _choose_ranks(copies, 1, tie_break), _reuse_senders)
    limit_T = np.maximum(max_senders, (sent_RT > 0).sum(axis=0))
    for most in range(max(map(len, copies)), 0, -1):
        equal, sent_RT = _stretches(elements_ST, sets, _choose_ranks(copies, most, tie_break), _cut_equally)
        if ((sent_RT > 0).sum(axis=0) <= limit_T).all():
            return equal
    return fewest


def _choose_ranks(copies: Sequence[Sequence[int]], most: int, tie_break: int) -> list[list[int]]:
    """`most` ranks of each layout, rotated by `tie_break`."""
    return [
        [ranks[(tie_break * most + i) % len(ranks)] for i in range(min(most, len(ranks)))] for ranks in copies
    ]


def _stretches(
    elements_ST: Int64, sets: Sequence[Sequence[int]], active: Sequence[Sequence[int]], cut: Cut
) -> tuple[tuple[Int64, Int64], NDArray[np.float64]]:
    """The stretches if the `active` ranks of each shard layout send, and how many elements each rank then
    sends to each target [R, T].
    """
    num_targets = elements_ST.shape[1]
    sent_RT = np.zeros((1 + max(max(ranks) for ranks in active), num_targets))
    begins, senders, line = [], [], 0
    for elements_T, shard_layouts in zip(elements_ST, sets, strict=True):
        ranks_K = np.array(sorted(rank for shard_layout in shard_layouts for rank in active[shard_layout]))
        begin_B, sender_B = cut(elements_T, ranks_K, sent_RT)
        begins.append(line + begin_B)
        senders.append(sender_B)
        end_T = np.cumsum(elements_T)
        end_B = np.append(begin_B[1:], end_T[-1])
        common_BT = np.minimum(end_B[:, None], end_T) - np.maximum(begin_B[:, None], end_T - elements_T)
        np.add.at(sent_RT, sender_B, np.maximum(common_BT, 0))
        line += int(end_T[-1])
    return (np.concatenate(begins), np.concatenate(senders)), sent_RT


def _cut_equally(elements_T: Int64, ranks_K: Int64, sent_RT: NDArray[np.float64]) -> tuple[Int64, Int64]:
    """Stretches of equal length, up to SLACK at each border."""
    sent_KT = sent_RT[ranks_K]
    middle_K = sent_KT @ np.arange(len(elements_T)) / np.maximum(sent_KT.sum(axis=1), 1)
    middle_K[~sent_KT.any(axis=1)] = np.inf
    end_T = np.cumsum(elements_T)
    begin_K = end_T[-1] * np.arange(len(ranks_K)) // len(ranks_K)
    nearest_K = end_T[np.abs(begin_K[:, None] - end_T).argmin(axis=1)]
    near_K = np.abs(nearest_K - begin_K) <= SLACK * end_T[-1] / len(ranks_K)
    near_K[0] = False
    return np.where(near_K, nearest_K, begin_K), ranks_K[np.lexsort((ranks_K, middle_K))]


def _reuse_senders(elements_T: Int64, ranks_K: Int64, sent_RT: NDArray[np.float64]) -> tuple[Int64, Int64]:
    """For each target, equal stretches for the ranks that already send to it; if there are none, one stretch
    for the rank with the least to send."""
    begins, senders = [], []
    end = 0
    for t, elements in enumerate(elements_T.tolist()):
        ranks = ranks_K[sent_RT[ranks_K, t] > 0]
        if not len(ranks):
            ranks = ranks_K[sent_RT[ranks_K].sum(axis=1).argmin()][None]
        begins.append(end + elements * np.arange(len(ranks)) // len(ranks))
        senders.append(ranks)
        end += elements
    return np.concatenate(begins), np.concatenate(senders)
