"""Decides which finished groups are trained on; filtered groups are replaced by new prompts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.config.functions import load
from atoll.config.schema import FilterConfig
from atoll.coordinator.algorithm.estimates import Float64
from atoll.runtime.errors import AtollError, UserError
from atoll.wire.types import Group, Trajectory


def scores_differ(group: Group, *, component: str = "") -> bool:
    """Keeps groups whose samples do not all score the same: equal scores give no gradient.

    `component` compares this grader's own value instead of the score, as DAPO judges accuracy without the
    penalty on length (https://arxiv.org/abs/2503.14476, section 3.2). Raises UserError if the samples lack
    it.
    """
    if not component:
        return len({sample.score for sample in group.samples}) > 1
    return len({component_of(sample, component) for sample in group.samples}) > 1


def component_of(sample: Trajectory, grader: str) -> float:
    """A grader's value summed over all turns, unweighted. Raises UserError if the sample lacks it."""
    there = {name for reward in sample.rewards for name in reward.components}
    if grader not in there:
        raise UserError(
            f"sample {sample.id} has no component {grader!r}, only {', '.join(sorted(there)) or 'none'}: "
            "name one of reward.graders; a dump must be replayed with the graders that produced it"
        )
    return sum(reward.components.get(grader, 0.0) for reward in sample.rewards)


def components_of(groups: Sequence[Group], grader: str, ungraded_agents: frozenset[str]) -> Float64:
    """[N] a grader's value for each sample, as `component_of`; NaN for those of agents that no grader
    scores."""
    return np.array(
        [
            math.nan if group.prompt.agent in ungraded_agents else component_of(sample, grader)
            for group in groups
            for sample in group.samples
        ]
    )


FILTERS: Mapping[str, Callable[..., bool]] = {
    "scores_differ": scores_differ,
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts that limits are checked against; saved in checkpoints, so that a resume continues counting."""

    issued: int = 0  # groups since the run began
    failed: int = 0  # of these, dropped after an error
    kept: int = 0  # by a filter, since the last batch
    filtered: int = 0


NO_COUNTS = Counters()


class DynamicSampling:
    """Which finished groups are trained on, and for how long others are replaced by new prompts.

    From DAPO (https://arxiv.org/abs/2503.14476, section 3.2): a group without contrast gives no gradient, so
    the batch is filled with other groups.
    """

    def __init__(self, config: FilterConfig, prompts_per_step: int) -> None:
        """Raises ConfigError if `config` does not name a suitable function."""
        self._keep: Callable[[Group], bool] = load(config, FILTERS)
        self._name = config.name
        self.is_users_own = config.is_users_own
        self._max_refill = config.max_refill
        self._prompts_per_step = prompts_per_step
        self.num_kept = 0  # since the last batch
        self.num_filtered = 0

    def accepts(self, group: Group) -> bool:
        """Callable from any thread. Raises AtollError if the filter fails: user code may raise anything."""
        try:
            keep = self._keep(group)
            if not isinstance(keep, bool | np.bool_):
                raise TypeError(f"it returned {keep!r}, expected True or False")
        except Exception as error:
            raise AtollError(
                f"algorithm.filter = {self._name!r} failed on group {group.prompt.id}: "
                f"{type(error).__name__}: {error}; fix the function or its parameters, "
                "then continue with --resume"
            ) from error
        return bool(keep)

    def count(self, keep: bool) -> None:
        self.num_kept += keep
        self.num_filtered += not keep

    def check(self) -> None:
        """Raises AtollError if more than max_refill batches were left out since the last batch."""
        if self.num_filtered > self._max_refill * self._prompts_per_step:
            raise AtollError(
                f"algorithm.filter = {self._name!r} left out {self.num_filtered} of the "
                f"{self.num_filtered + self.num_kept} groups that finished since the last batch, more than "
                f"algorithm.filter.max_refill = {self._max_refill} batches of {self._prompts_per_step}; use "
                "easier or harder prompts, raise coordinator.samples_per_prompt, or raise the limit"
            )

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the groups that finished since the last call (one call per batch)."""
        num_filtered, num_finished = self.num_filtered, self.num_filtered + self.num_kept
        self.num_kept = self.num_filtered = 0
        return {
            "dynamic_sampling/num_filtered": float(num_filtered),
            "dynamic_sampling/kept_fraction": 1 - num_filtered / max(num_finished, 1),
        }
