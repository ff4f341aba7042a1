"""Which finished groups are trained on: a filter keeps or leaves out, and new prompts replace the latter."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from atoll.config.functions import load
from atoll.config.schema import FilterConfig
from atoll.runtime.errors import AtollError, UserError
from atoll.wire.types import Group, Trajectory


def scores_differ(group: Group, *, component: str = "") -> bool:
    """Keeps groups whose samples do not all score the same: equal scores give no gradient.

    `component` compares this grader's own value instead of the score, as DAPO judges accuracy without the
    penalty on length (https://arxiv.org/abs/2503.14476, section 3.2). Raises UserError for one that the
    samples do not have.
    """
    if not component:
        return len({sample.score for sample in group.samples}) > 1
    return len({component_of(sample, component) for sample in group.samples}) > 1


def component_of(sample: Trajectory, grader: str) -> float:
    """What a grader gave over all turns, before its weight. Raises UserError where the sample lacks it."""
    there = {name for reward in sample.rewards for name in reward.components}
    if grader not in there:
        raise UserError(
            f"sample {sample.id} has no component {grader!r}, only {', '.join(sorted(there)) or 'none'}: "
            "name one of reward.graders; a dump is replayed with those that made it"
        )
    return sum(reward.components.get(grader, 0.0) for reward in sample.rewards)


FILTERS: Mapping[str, Callable[..., bool]] = {
    "scores_differ": scores_differ,
}


@dataclass(frozen=True, slots=True)
class Counters:
    """What limits are judged by; a checkpoint has it, so that a resume does not begin to count again."""

    issued: int = 0  # groups since the run began
    failed: int = 0  # of these, dropped for an error
    kept: int = 0  # by a filter, since the last batch
    filtered: int = 0


NOTHING = Counters()


class DynamicSampling:
    """Which finished groups are trained on, and for how long others are replaced by new prompts.

    From DAPO (https://arxiv.org/abs/2503.14476, section 3.2): without contrast within a group there is
    nothing to learn from it, so the batch is filled up with others.
    """

    def __init__(self, config: FilterConfig, prompts_per_step: int) -> None:
        """Raises ConfigError where `config` names no function that fits."""
        self._keep: Callable[[Group], bool] = load(config, FILTERS)
        self._name = config.name
        self.is_users_own = config.is_users_own
        self._max_refill = config.max_refill
        self._prompts_per_step = prompts_per_step
        self.num_kept = 0  # since the last batch
        self.num_filtered = 0

    def keeps(self, group: Group) -> bool:
        """From any thread. Raises AtollError if the filter fails: the user's own may raise anything."""
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
        """Raises AtollError where more than max_refill batches were left out since the last batch."""
        if self.num_filtered > self._max_refill * self._prompts_per_step:
            raise AtollError(
                f"algorithm.filter = {self._name!r} left out {self.num_filtered} of the "
                f"{self.num_filtered + self.num_kept} groups that finished since the last batch, more than "
                f"algorithm.filter.max_refill = {self._max_refill} batches of {self._prompts_per_step}; take "
                "easier or harder prompts, raise coordinator.samples_per_prompt, or allow more"
            )

    def take_metrics(self) -> dict[str, float]:
        """Of the groups that finished since the last call, which is made once per batch."""
        num_filtered, num_finished = self.num_filtered, self.num_filtered + self.num_kept
        self.num_kept = self.num_filtered = 0
        return {
            "dynamic_sampling/num_filtered": float(num_filtered),
            "dynamic_sampling/kept_fraction": 1 - num_filtered / max(num_finished, 1),
        }
