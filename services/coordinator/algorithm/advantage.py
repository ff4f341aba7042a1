"""Advantage estimators. Pure numpy.

Letters in shapes: N samples, G groups, K graders, T loss-masked tokens of all samples, one sample after
the other, each sample's in the order in which they were produced. Prompt, tool and template tokens are
excluded, so what an estimator carries from token to token passes over them. B branches (branches.py): only
answers drawn side by side from one context are alternatives, and nothing is carried from one to another. What
comes before them gets what is carried from each, once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le
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

    def spread(self, per_sample_N: Float64) -> Float64:
        """[T] each sample's value, repeated for all of its tokens."""
        return np.repeat(per_sample_N, self.lengths_N)


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    advantages_T: Float64
    returns_T: Float64  # targets of the critic


Estimator = Callable[..., Estimate]  # (trajectories, *, parameters of its own)


# Over time: every token has its own advantage.


def gae(
    trajectories: Trajectories,
    *,
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0,
    lam: Annotated[float, Ge(0), Le(1)] = 1.0,
) -> Estimate:
    """Generalized advantage estimation, whitened over the batch; returns are A + V before whitening.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}; V and A are 0 past the end.

    Source: https://arxiv.org/abs/1506.02438. Raises ValueError without a critic's values.
    """
    values_T = _values(trajectories, "gae")
    errors_T = _temporal_differences(trajectories, values_T, gamma)
    advantages_T = discounted_sums(trajectories, errors_T, gamma * lam)
    return Estimate(whiten(advantages_T), advantages_T + values_T)


def vapo(
    trajectories: Trajectories,
    *,
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0,
    value_lam: Annotated[float, Ge(0), Le(1)] = 1.0,
    length_alpha: Annotated[float, Gt(0)] = 0.05,
) -> Estimate:
    """Decoupled, length-adaptive GAE: one lambda for the policy, `value_lam` for the critic's targets.

    A sample of l tokens has the policy lambda 1 - 1 / (length_alpha l), at least 0: longer samples propagate
    errors further back. Whitened over the batch as in gae.

    Source: VAPO, https://arxiv.org/abs/2504.05118. Raises ValueError without a critic's values.
    """
    values_T = _values(trajectories, "vapo")
    errors_T = _temporal_differences(trajectories, values_T, gamma)
    lengths_N = trajectories.lengths_N
    policy_lam_N = np.clip(1 - 1 / (length_alpha * np.maximum(lengths_N, 1)), 0, 1)
    advantages_T = discounted_sums(trajectories, errors_T, gamma * policy_lam_N)
    targets_T = discounted_sums(trajectories, errors_T, gamma * value_lam) + values_T
    return Estimate(whiten(advantages_T), targets_T)


def reinforce_pp(trajectories: Trajectories, *, gamma: Annotated[float, Ge(0), Le(1)] = 1.0) -> Estimate:
    """REINFORCE++: discounted return from each token on, whitened over the batch.

    Source: https://arxiv.org/abs/2501.03262.
    """
    returns_T = discounted_sums(trajectories, trajectories.rewards_T, gamma)
    return Estimate(whiten(returns_T), returns_T)


def remax(trajectories: Trajectories) -> Estimate:
    """Return from each token on, minus the score of the greedy sample of the same prompt.

    Source: https://arxiv.org/abs/2310.10505. Raises ValueError without greedy samples.
    """
    if trajectories.baselines_N is None:
        raise ValueError(
            "remax subtracts the score of a greedy sample and there is none: set "
            "coordinator.greedy_baseline = true"
        )
    returns_T = discounted_sums(trajectories, trajectories.rewards_T, 1.0)
    return Estimate(returns_T - trajectories.spread(trajectories.baselines_N), returns_T)


# Over groups: all tokens of a sample share one advantage. A group of one sample keeps its score. An empty
# response takes part in the statistics of its group, although it has no token to train on.


def grpo(trajectories: Trajectories) -> Estimate:
    """Group-relative: (s - mean_g) / (std_g + 1e-6), std unbiased.

    Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, eq. 3.
    """
    return _broadcast_to_tokens(trajectories, _standardize(trajectories.scores_N, trajectories.group_N))


def dr_grpo(trajectories: Trajectories) -> Estimate:
    """GRPO without dividing by std_g, which favours prompts that are almost always or almost never solved: s
    - mean_g.

    Its loss goes with aggregation "seq_mean_token_sum_norm". Source: https://arxiv.org/abs/2503.20783.
    """
    return _broadcast_to_tokens(trajectories, _center(trajectories.scores_N, trajectories.group_N))


def rloo(trajectories: Trajectories) -> Estimate:
    """Leave-one-out: s minus the mean of the group's other samples, which is n / (n - 1) (s - mean_g).

    Source: https://arxiv.org/abs/2402.14740.
    """
    count_N = np.bincount(trajectories.group_N)[trajectories.group_N]
    factor_N = np.where(count_N == 1, 1.0, count_N / np.maximum(count_N - 1, 1))
    return _broadcast_to_tokens(trajectories, factor_N * _center(trajectories.scores_N, trajectories.group_N))


def reinforce_pp_baseline(trajectories: Trajectories) -> Estimate:
    """REINFORCE++-baseline: s - mean_g on each token, then whitened over the batch's tokens.

    Source: https://arxiv.org/abs/2501.03262.
    """
    centred_T = trajectories.spread(_center(trajectories.scores_N, trajectories.group_N))
    advantages_T = whiten(centred_T)
    return Estimate(advantages_T, advantages_T)


def opo(trajectories: Trajectories) -> Estimate:
    """Optimal baseline: s minus the group's mean score weighted by length, sum(l s) / sum(l).

    A group of only empty responses has no baseline. Source: https://arxiv.org/abs/2505.23585.
    """
    group_N, scores_N, lengths_N = trajectories.group_N, trajectories.scores_N, trajectories.lengths_N
    tokens_G = np.maximum(np.bincount(group_N, lengths_N), 1)
    baseline_G = np.bincount(group_N, lengths_N * scores_N) / tokens_G
    is_alone_N = np.bincount(group_N)[group_N] == 1
    return _broadcast_to_tokens(trajectories, scores_N - np.where(is_alone_N, 0.0, baseline_G[group_N]))


def gpg(trajectories: Trajectories) -> Estimate:
    """alpha (s - mean_g), alpha = number of samples / max(1, number of scores that are not 0).

    Source: https://arxiv.org/abs/2504.02546.
    """
    scores_N = trajectories.scores_N
    alpha = len(scores_N) / max(1, int((scores_N != 0).sum()))
    return _broadcast_to_tokens(trajectories, alpha * _center(scores_N, trajectories.group_N))


def pass_at_k(trajectories: Trajectories) -> Estimate:
    """The group's best sample gets (best - second best) / (std_g + 1e-6), all others 0; ties get 0.

    Source: https://arxiv.org/abs/2503.19595. Raises ValueError for a group of one sample.
    """
    group_N, scores_N = trajectories.group_N, trajectories.scores_N
    count_G = np.bincount(group_N)
    if 1 in count_G:
        raise ValueError(
            f"pass_at_k compares a group's two best samples and group {np.argmin(count_G)} has one: "
            "set coordinator.samples_per_prompt to 2 or more"
        )
    ascending_N = np.lexsort((scores_N, group_N))  # by group, then score
    best_G = ascending_N[np.cumsum(count_G) - 1]
    second_G = ascending_N[np.cumsum(count_G) - 2]
    advantages_N = np.zeros(len(scores_N))
    lead_G = scores_N[best_G] - scores_N[second_G]
    advantages_N[best_G] = lead_G / (_standard_deviations(scores_N, group_N)[best_G] + 1e-6)
    return _broadcast_to_tokens(trajectories, advantages_N)


def gdpo(trajectories: Trajectories) -> Estimate:
    """Several rewards: weighted sum of each grader's GRPO advantages, whitened over the batch's tokens.

    Uses only the graders' components: anything else in the score (a KL penalty, shaping) is ignored.

    Source: https://arxiv.org/abs/2601.05242.
    """
    components_NK, weights_K = trajectories.components_NK, trajectories.weights_K
    advantages_N = np.zeros(len(components_NK))
    for k, weight in enumerate(weights_K):
        advantages_N += weight * _standardize(components_NK[:, k], trajectories.group_N)
    advantages_T = whiten(trajectories.spread(advantages_N))
    return Estimate(advantages_T, advantages_T)


ADVANTAGES: Mapping[str, Estimator] = {
    "gae": gae,
    "vapo": vapo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
}

# What an estimator asks of other settings; without it a config is refused (services/config/rules.py).
# needs_values: a [critic]. needs_baseline: coordinator.greedy_baseline. group_relative: at least two samples
# per prompt. reads_components: a score by reward.graders and nothing else.
TRAITS: Mapping[str, tuple[str, ...]] = {
    "gae": ("needs_values",),
    "vapo": ("needs_values",),
    "grpo": ("group_relative",),
    "dr_grpo": ("group_relative",),
    "rloo": ("group_relative",),
    "reinforce_pp_baseline": ("group_relative",),
    "remax": ("needs_baseline",),
    "opo": ("group_relative",),
    "gpg": ("group_relative",),
    "pass_at_k": ("group_relative",),
    "gdpo": ("group_relative", "reads_components"),
}


def discounted_sums(trajectories: Trajectories, terms_T: Float64, discount: float | Float64) -> Float64:
    """[T] y_t = x_t + discount times the sum of y over the tokens that follow t: one within a branch, the
    first of each branch that follows, none at a sample's end. `discount` is one number or [N].

    Walks back from the ends of all branches at once, level by level: as many vector operations as the longest
    sample has tokens, if none has alternatives.
    """
    branches = _branches(trajectories)
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


def _values(trajectories: Trajectories, name: str) -> Float64:
    if trajectories.values_T is None:
        raise ValueError(f"{name} needs a critic's values and there are none: add a [critic] table")
    return trajectories.values_T


def _temporal_differences(trajectories: Trajectories, values_T: Float64, gamma: float) -> Float64:
    """[T] r_t + gamma V_{t+1} - V_t, where V_{t+1} is the sum over all tokens that follow, 0 if none does."""
    branches = _branches(trajectories)
    next_values_T = np.zeros(len(values_T))
    next_values_T[:-1] = values_T[1:]
    next_values_T[(branches.ends - 1)[branches.lengths_B > 0]] = 0
    following = np.flatnonzero(branches.parents_B >= 0)
    first_values = values_T[(branches.ends - branches.lengths_B)[following]]
    np.add.at(next_values_T, branches.ends[branches.parents_B[following]] - 1, first_values)
    return trajectories.rewards_T + gamma * next_values_T - values_T


def _branches(trajectories: Trajectories) -> Branches:
    return trajectories.branches or Branches.unbranched(trajectories.lengths_N)


def _broadcast_to_tokens(trajectories: Trajectories, advantages_N: Float64) -> Estimate:
    advantages_T = trajectories.spread(advantages_N)
    return Estimate(advantages_T, advantages_T)


def _center(scores_N: Float64, group_N: Int64) -> Float64:
    """[N] s - mean_g; the only sample of its group keeps s."""
    count_G = np.bincount(group_N)
    baseline_G = np.where(count_G == 1, 0.0, np.bincount(group_N, scores_N) / count_G)
    return scores_N - baseline_G[group_N]


def _standard_deviations(scores_N: Float64, group_N: Int64) -> Float64:
    """[N] unbiased standard deviation of the sample's group; meaningless for the only sample of its group."""
    squares_G = np.bincount(group_N, _center(scores_N, group_N) ** 2)
    return np.sqrt(squares_G / np.maximum(np.bincount(group_N) - 1, 1))[group_N]


def _standardize(scores_N: Float64, group_N: Int64) -> Float64:
    """[N] (s - mean_g) / (std_g + 1e-6); the only sample of its group keeps s."""
    centred_N = _center(scores_N, group_N)
    is_alone_N = np.bincount(group_N)[group_N] == 1
    return np.where(is_alone_N, scores_N, centred_N / (_standard_deviations(scores_N, group_N) + 1e-6))
