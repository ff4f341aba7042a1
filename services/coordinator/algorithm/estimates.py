"""What advantage estimators take and give, and the arithmetic that several of them share. Pure numpy.

Letters in shapes: N samples, G groups, K graders, T loss-masked tokens of all samples, one sample after
the other, each sample's in the order in which they were produced. Prompt, tool and template tokens are
excluded, so what an estimator carries from token to token passes over them. U turns with such tokens, in the
same order. B branches (branches.py): only answers drawn side by side from one context are alternatives, and
nothing is carried from one to another. What comes before them gets what is carried from each, once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.coordinator.algorithm.branches import Branches
from atoll.wire.types import Int64

Float64 = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]  # of any precision


@dataclass(frozen=True, slots=True, eq=False)
class Trajectories:
    """The batch seen by estimators."""

    group_N: Int64  # ascending from 0
    lengths_N: Int64  # tokens of each sample; 0 for an empty response
    scores_N: Float64  # sum of a sample's rewards, including a KL penalty in the reward
    rewards_T: Float64  # at the token that earned it; an empty response has a score but no token
    components_NK: Float64  # each grader's value, unweighted; NaN if the sample's session brought its reward
    weights_K: Float64  # of the graders
    values_T: Float64 | None = None  # the critic's value of the state before each token
    baselines_N: Float64 | None = None  # score of the greedy sample of the same prompt
    branches: Branches | None = None  # None: no sample has alternatives
    turn_lengths_U: Int64 | None = None  # tokens of each turn; None: each sample is one turn

    def spread(self, per_sample_N: Float64) -> Float64:
        """[T] each sample's value, repeated for all of its tokens."""
        return np.repeat(per_sample_N, self.lengths_N)


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    advantages_T: Float64
    returns_T: Float64  # targets of the critic


Estimator = Callable[..., Estimate]  # (trajectories, *, parameters of its own)


def discounted_sums(trajectories: Trajectories, terms_T: Float64, discount: float | Float64) -> Float64:
    """[T] y_t = x_t + discount times the sum of y over the tokens that follow t: one within a branch, the
    first of each branch that follows, none at a sample's end. `discount` is one number or [N].

    Walks back from the ends of all branches at once, level by level: as many vector operations as the longest
    sample has tokens, if none has alternatives.
    """
    branches = branches_of(trajectories)
    discount_N = np.broadcast_to(discount, len(trajectories.lengths_N))
    sums_T = np.zeros(len(terms_T))
    following_B = np.zeros(len(branches.parents_B))  # sum of y over what follows each branch
    for level in branches.children_first():
        longest_first = level[np.argsort(-branches.lengths_B[level])]
        lengths = branches.lengths_B[longest_first]
        last = branches.ends[longest_first] - 1
        discounts = discount_N[branches.samples_B[longest_first]]
        running = following_B[longest_first]
        for k in range(lengths.max(initial=0)):
            reaching = np.searchsorted(-lengths, -k)  # number of branches with more than k tokens
            at = last[:reaching] - k
            running[:reaching] = terms_T[at] + discounts[:reaching] * running[:reaching]
            sums_T[at] = running[:reaching]
        parents = branches.parents_B[longest_first]
        np.add.at(following_B, parents[parents >= 0], running[parents >= 0])
    return sums_T


def temporal_differences(trajectories: Trajectories, values_T: Float64, gamma: float) -> Float64:
    """[T] r_t + gamma V_{t+1} - V_t, where V_{t+1} is the sum over all tokens that follow, 0 if none does."""
    branches = branches_of(trajectories)
    next_values_T = np.zeros(len(values_T))
    next_values_T[:-1] = values_T[1:]
    next_values_T[(branches.ends - 1)[branches.lengths_B > 0]] = 0
    following = np.flatnonzero(branches.parents_B >= 0)
    first_values = values_T[(branches.ends - branches.lengths_B)[following]]
    np.add.at(next_values_T, branches.ends[branches.parents_B[following]] - 1, first_values)
    return trajectories.rewards_T + gamma * next_values_T - values_T


def whiten(values_T: Float64) -> Float64:
    """[T] (x - mean) / sqrt(var + 1e-8), var unbiased, over the batch's tokens.

    A single token becomes 0; a batch without tokens stays empty. Both happen (all responses empty, all
    samples rejected), and the run continues with its next batch.
    """
    if len(values_T) == 0:
        return values_T
    centred_T = values_T - values_T.mean()
    variance = (centred_T**2).sum() / max(len(values_T) - 1, 1)
    return np.asarray(centred_T / np.sqrt(variance + 1e-8))


def critic_values(trajectories: Trajectories, name: str) -> Float64:
    """[T] Raises ValueError in the name of an estimator if there are none."""
    if trajectories.values_T is None:
        raise ValueError(f"{name} needs a critic's values and there are none: add a [critic] table")
    return trajectories.values_T


def branches_of(trajectories: Trajectories) -> Branches:
    return trajectories.branches or Branches.unbranched(trajectories.lengths_N)


def broadcast_to_tokens(trajectories: Trajectories, advantages_N: Float64) -> Estimate:
    """One advantage for all tokens of a sample."""
    advantages_T = trajectories.spread(advantages_N)
    return Estimate(advantages_T, advantages_T)


def center(scores_N: Float64, group_N: Int64) -> Float64:
    """[N] s - mean_g; the only sample of its group keeps s."""
    count_G = np.bincount(group_N)
    baseline_G = np.where(count_G == 1, 0.0, np.bincount(group_N, scores_N) / count_G)
    return scores_N - baseline_G[group_N]


def standard_deviations(scores_N: Float64, group_N: Int64) -> Float64:
    """[N] unbiased standard deviation of the sample's group; meaningless for the only sample of its group."""
    squares_G = np.bincount(group_N, center(scores_N, group_N) ** 2)
    return np.sqrt(squares_G / np.maximum(np.bincount(group_N) - 1, 1))[group_N]


def standardize(scores_N: Float64, group_N: Int64) -> Float64:
    """[N] (s - mean_g) / (std_g + 1e-6); the only sample of its group keeps s."""
    centred_N = center(scores_N, group_N)
    is_alone_N = np.bincount(group_N)[group_N] == 1
    return np.where(is_alone_N, scores_N, centred_N / (standard_deviations(scores_N, group_N) + 1e-6))
