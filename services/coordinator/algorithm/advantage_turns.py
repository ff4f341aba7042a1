"""Advantage estimators that count time in turns. Pure numpy; shapes as in estimates.py.

A turn is one call of the policy, in whatever conversation. Turns follow each other as their tokens do: in
time order, but for answers drawn side by side. r_k is the sum of the rewards at turn k's tokens. No time
passes within a turn.
"""

from dataclasses import replace
from typing import Annotated

import numpy as np
from annotated_types import Ge, Le

from atoll.coordinator.algorithm.estimates import (
    Estimate,
    Float64,
    Trajectories,
    branches_of,
    broadcast_to_tokens,
    critic_values,
    discounted_sums,
    standardize,
    temporal_differences,
    whiten,
)
from atoll.wire.types import Int64


def turn_gae(
    trajectories: Trajectories,
    *,
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0,
    lam: Annotated[float, Ge(0), Le(1)] = 1.0,
) -> Estimate:
    """GAE from turn to turn, whitened over the batch's tokens; returns are A + V before whitening.

    V_k is the critic's value of the state before turn k's first token; delta_k = r_k + gamma V_{k+1} - V_k
    and A_k = delta_k + gamma lam A_{k+1}; V and A are 0 past the end. All tokens of turn k have advantage A_k
    and return A_k + V_k. But for a KL penalty, a turn's reward stands at its last token, so what is still to
    come is the same at all of its tokens, and the critic learns from each of them instead of from one state
    per turn.

    With turns of one token, this is gae. With samples of one turn, rewarded at the last token, the returns
    are those of gae with gamma = lam = 1, and so are, before whitening, the advantages of first tokens.

    Source: Turn-PPO, https://arxiv.org/abs/2512.17008. Raises ValueError without a critic's values.
    """
    turns, lengths_U = _by_turn(trajectories)
    values_U = critic_values(turns, "turn_gae")
    advantages_U = discounted_sums(turns, temporal_differences(turns, values_U, gamma), gamma * lam)
    return Estimate(
        whiten(np.repeat(advantages_U, lengths_U)), returns_T=np.repeat(advantages_U + values_U, lengths_U)
    )


def turn_returns(trajectories: Trajectories, *, gamma: Annotated[float, Ge(0), Le(1)] = 1.0) -> Estimate:
    """Discounted return from each turn on, G_k = r_k + gamma G_{k+1}, whitened over the batch's tokens.

    With turns of one token, this is reinforce_pp; with samples of one turn, rewarded at the last token, it is
    reinforce_pp with gamma = 1.

    Source: the returns of Kevin, https://arxiv.org/abs/2507.11948; whitened as in REINFORCE++,
    https://arxiv.org/abs/2501.03262.
    """
    turns, lengths_U = _by_turn(trajectories)
    returns_T = np.repeat(discounted_sums(turns, turns.rewards_T, gamma), lengths_U)
    return Estimate(whiten(returns_T), returns_T)


def episode_grpo(trajectories: Trajectories, *, gamma: Annotated[float, Ge(0), Le(1)] = 1.0) -> Estimate:
    """GRPO on discounted episodes: s = sum_k gamma^k r_k, then (s - mean_g) / (std_g + 1e-6), std unbiased.

    k counts the turns that come before, so alternatives have the same k. A reward without a token is not
    discounted. With gamma = 1, or samples of one turn, this is grpo.

    Source: episode-level advantages of GiGPO, https://arxiv.org/abs/2505.10978, which does not discount them.
    """
    turns, _ = _by_turn(trajectories)
    branches, num_samples = branches_of(turns), len(turns.scores_N)
    returns_U = discounted_sums(turns, turns.rewards_T, gamma)
    begins_B = (branches.parents_B < 0) & (branches.lengths_B > 0)
    first_U = (branches.ends - branches.lengths_B)[begins_B]
    episodes_N = np.bincount(branches.samples_B[begins_B], returns_U[first_U], num_samples)
    samples_U = np.repeat(np.arange(num_samples), turns.lengths_N)
    without_token_N = turns.scores_N - np.bincount(samples_U, turns.rewards_T, num_samples)
    return broadcast_to_tokens(trajectories, standardize(episodes_N + without_token_N, turns.group_N))


def _by_turn(trajectories: Trajectories) -> tuple[Trajectories, Int64]:
    """The batch with one step per turn in place of its tokens, and how many tokens [U] each stands for."""
    lengths_N, lengths_U = trajectories.lengths_N, trajectories.turn_lengths_U
    if lengths_U is None:
        lengths_U = lengths_N[lengths_N > 0]
    ends_U = np.cumsum(lengths_U)
    first_U = ends_U - lengths_U

    def num_turns(lengths: Int64) -> Int64:
        """Of consecutive runs of whole turns, by their tokens."""
        return np.diff(np.searchsorted(ends_U, np.cumsum(lengths), side="right"), prepend=0)

    values_T, branches = trajectories.values_T, trajectories.branches
    rewards_U: Float64 = np.add.reduceat(trajectories.rewards_T, first_U)
    turns = replace(
        trajectories,
        lengths_N=num_turns(lengths_N),
        rewards_T=rewards_U,
        values_T=None if values_T is None else values_T[first_U],
        branches=None if branches is None else replace(branches, lengths_B=num_turns(branches.lengths_B)),
        turn_lengths_U=None,
    )
    return turns, lengths_U
