"""Advantage estimators. Pure numpy; shapes as in estimates.py. Those that count turns are in
advantage_turns.py."""

from collections.abc import Mapping
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le

from atoll.coordinator.algorithm.advantage_turns import episode_grpo, turn_gae, turn_returns
from atoll.coordinator.algorithm.estimates import (
    Estimate,
    Estimator,
    Trajectories,
    broadcast_to_tokens,
    center,
    critic_values,
    discounted_sums,
    standard_deviations,
    standardize,
    temporal_differences,
    whiten,
)

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
    values_T = critic_values(trajectories, "gae")
    errors_T = temporal_differences(trajectories, values_T, gamma)
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
    values_T = critic_values(trajectories, "vapo")
    errors_T = temporal_differences(trajectories, values_T, gamma)
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
    return broadcast_to_tokens(trajectories, standardize(trajectories.scores_N, trajectories.group_N))


def dr_grpo(trajectories: Trajectories) -> Estimate:
    """GRPO without dividing by std_g, which favours prompts that are almost always or almost never solved: s
    - mean_g.

    Its loss goes with aggregation "seq_mean_token_sum_norm". Source: https://arxiv.org/abs/2503.20783.
    """
    return broadcast_to_tokens(trajectories, center(trajectories.scores_N, trajectories.group_N))


def rloo(trajectories: Trajectories) -> Estimate:
    """Leave-one-out: s minus the mean of the group's other samples, which is n / (n - 1) (s - mean_g).

    Source: https://arxiv.org/abs/2402.14740.
    """
    count_N = np.bincount(trajectories.group_N)[trajectories.group_N]
    factor_N = np.where(count_N == 1, 1.0, count_N / np.maximum(count_N - 1, 1))
    return broadcast_to_tokens(trajectories, factor_N * center(trajectories.scores_N, trajectories.group_N))


def reinforce_pp_baseline(trajectories: Trajectories) -> Estimate:
    """REINFORCE++-baseline: s - mean_g on each token, then whitened over the batch's tokens.

    Source: https://arxiv.org/abs/2501.03262.
    """
    centred_T = trajectories.spread(center(trajectories.scores_N, trajectories.group_N))
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
    return broadcast_to_tokens(trajectories, scores_N - np.where(is_alone_N, 0.0, baseline_G[group_N]))


def gpg(trajectories: Trajectories) -> Estimate:
    """alpha (s - mean_g), alpha = number of samples / max(1, number of scores that are not 0).

    Source: https://arxiv.org/abs/2504.02546.
    """
    scores_N = trajectories.scores_N
    alpha = len(scores_N) / max(1, int((scores_N != 0).sum()))
    return broadcast_to_tokens(trajectories, alpha * center(scores_N, trajectories.group_N))


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
    advantages_N[best_G] = lead_G / (standard_deviations(scores_N, group_N)[best_G] + 1e-6)
    return broadcast_to_tokens(trajectories, advantages_N)


def gdpo(trajectories: Trajectories) -> Estimate:
    """Several rewards: weighted sum of each grader's GRPO advantages, whitened over the batch's tokens.

    Uses only the graders' components: anything else in the score (a KL penalty, shaping) is ignored.

    Source: https://arxiv.org/abs/2601.05242.
    """
    components_NK, weights_K = trajectories.components_NK, trajectories.weights_K
    advantages_N = np.zeros(len(components_NK))
    for k, weight in enumerate(weights_K):
        advantages_N += weight * standardize(components_NK[:, k], trajectories.group_N)
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
    "turn_gae": turn_gae,
    "turn_returns": turn_returns,
    "episode_grpo": episode_grpo,
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
    "turn_gae": ("needs_values",),
    "episode_grpo": ("group_relative",),
}
