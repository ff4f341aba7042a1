"""Divergence checks. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.runtime.errors import AtollError


class GuardError(AtollError):
    """A guard has stopped a diverging run."""


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """As in [guards]; None: not checked."""

    max_ppo_kl: float | None = None
    max_logprob_diff: float | None = None
    min_entropy: float | None = None
    max_entropy: float | None = None
    reward_drop: float | None = None
    window: int = 10  # steps


def check_divergence(
    metrics: Mapping[str, float], scores: Sequence[float], limits: GuardLimits
) -> str | None:
    """Why the run has diverged, naming metric, value, limit and setting; None if it has not.

    `metrics` are those of the step, and one that it lacks (the actor waits while its critic warms up) is not
    judged; `scores` the mean scores of all steps so far. A non-finite metric of a model always counts as
    divergence, except a gradient norm: the optimizer has skipped that update.
    """
    for name, value in metrics.items():
        is_models = name.startswith(("actor/", "critic/", "cost_critic/")) and not name.endswith("/grad_norm")
        if is_models and not math.isfinite(value):
            return f"{name} is {value}: training has diverged; lower the learning rate (always checked)"
    for name, setting, limit in (
        ("actor/ppo_kl", "max_ppo_kl", limits.max_ppo_kl),
        ("rollout_corr/logprob_diff_mean", "max_logprob_diff", limits.max_logprob_diff),
        ("actor/entropy", "min_entropy", limits.min_entropy),
        ("actor/entropy", "max_entropy", limits.max_entropy),
    ):
        if limit is None or name not in metrics:
            continue
        size = abs(metrics[name])  # an estimate of a KL divergence can be negative
        is_within = size >= limit if setting.startswith("min_") else size <= limit
        if not is_within:  # nor is NaN
            return f"{name} is {metrics[name]:.4g}, beyond guards.{setting} = {limit}"
    return _reward_drop(scores, limits)


def _reward_drop(scores: Sequence[float], limits: GuardLimits) -> str | None:
    """The mean of the last `window` scores against the best mean of as many consecutive ones so far."""
    if limits.reward_drop is None or len(scores) < limits.window:
        return None
    means = np.lib.stride_tricks.sliding_window_view(np.asarray(scores, np.float64), limits.window).mean(
        axis=1
    )
    best, last = means.max(), means[-1]
    if best - last <= limits.reward_drop:
        return None
    return (
        f"the mean of critic/score/mean over the last {limits.window} steps is {last:.4g}, "
        f"{best - last:.4g} below its best, {best:.4g}: more than guards.reward_drop = {limits.reward_drop}"
    )
