"""Groups on their way: which samples are there, which are missing, and how old they are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from services.config.functions import load
from services.config.schema import FilterConfig
from services.runtime.errors import AtollError, UserError
from services.wire.types import (
    Graded,
    Group,
    GroupId,
    GroupRequest,
    Prompt,
    Sample,
    SampleId,
    Sampling,
    TurnReward,
    Version,
)


def staleness(sample: Sample, current: Version) -> int:
    """The version being trained minus the version of the sample's oldest loss-masked token.

    Numbers go on through the lineages of one run: the journal gives back only samples whose
    versions lie on the path that led to `current`.
    """
    oldest = sample.oldest_number
    return 0 if oldest is None else current.number - oldest


@dataclass(slots=True, eq=False)
class PendingGroup:
    """One prompt's samples while they are generated and graded. Mutable, private to the coordinator."""

    prompt: Prompt
    order: int  # of issue: batches are put together in this order
    sampling: Sampling
    samples: list[Sample | None]  # by index; None: being generated
    issued: int  # version number at issue
    has_baseline: bool = False  # the last sample is the greedy one, which is not trained on
    alone: bool = False  # it is asked for in a call of its own
    graded: list[bool] = field(init=False)
    attempts: list[int] = field(init=False)
    failures: list[int] = field(init=False)  # attempts that were lost, by index
    oldest: list[int] = field(
        init=False
    )  # number of the oldest version that each has or may turn out to have

    def __post_init__(self) -> None:
        self.graded = [False] * len(self.samples)
        self.attempts = [0 if sample is None else sample.attempt for sample in self.samples]
        self.failures = [0] * len(self.samples)
        self.oldest = [self.issued] * len(self.samples)
        for sample in self.samples:
            self._date(sample)

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(index for index, sample in enumerate(self.samples) if sample is None)

    def requests(self) -> list[GroupRequest]:
        """For what is missing: one request for the samples, one for the greedy baseline."""
        missing = self.missing
        if self.has_baseline and missing and missing[-1] == len(self.samples) - 1:
            greedy = [self._request(missing[-1:], replace(self.sampling, temperature=0.0))]
            return [self._request(missing[:-1], self.sampling), *greedy] if missing[:-1] else greedy
        return [self._request(missing, self.sampling)]

    def _request(self, indices: tuple[int, ...], sampling: Sampling) -> GroupRequest:
        return GroupRequest(
            group=self.prompt.id,
            prompt_ids=self.prompt.token_ids,
            indices=indices,
            attempts=tuple(self.attempts[index] for index in indices),
            sampling=sampling,
        )

    @property
    def complete(self) -> bool:
        return all(self.graded)

    def accept(self, sample: Sample) -> bool:
        """The first finished attempt wins; False for a later one."""
        if self.samples[sample.id.index] is not None:
            return False
        self.samples[sample.id.index] = sample
        self._date(sample)
        return True

    def forget(self, sample: Sample) -> None:
        """It was accepted, and is not to be: its attempt is still to come."""
        if self.samples[sample.id.index] is sample:
            self.samples[sample.id.index] = None

    def _date(self, sample: Sample | None) -> None:
        if sample is not None and (number := sample.oldest_number) is not None:
            self.oldest[sample.id.index] = number

    def grade(self, verdict: Graded) -> None:
        index = verdict.id.index
        sample = self.samples[index]
        if sample is None:
            return  # replaced while it was being graded
        reward = TurnReward(len(sample.nodes) - 1, verdict.value, verdict.components, verdict.reasons)
        self.samples[index] = sample.with_rewards((reward,))
        self.graded[index] = True

    def again(self, indices: Sequence[int]) -> None:
        """Forget these samples; their next attempt replaces them."""
        for index in indices:
            self.samples[index] = None
            self.graded[index] = False
            self.attempts[index] += 1

    def stale(self, current: Version, max_staleness: int) -> list[int]:
        """Indices of finished samples that are too old to train on at `current`."""
        limit = current.number - max_staleness
        return [
            index
            for index, (sample, number) in enumerate(zip(self.samples, self.oldest, strict=True))
            if number < limit and sample is not None
        ]

    def group(self) -> Group:
        assert self.complete
        samples = tuple(sample for sample in self.samples if sample is not None)
        if self.has_baseline:
            return Group(self.prompt, samples[:-1], baseline=samples[-1])
        return Group(self.prompt, samples)

    def ids(self) -> list[SampleId]:
        return [SampleId(self.prompt.id, index) for index in range(len(self.samples))]


class Sink(Protocol):
    """Where groups go. A training run journals them, a validation only counts."""

    async def finished(self, samples: Sequence[Sample], payload: bytes) -> None:
        """These samples are generated, not yet graded; `payload` holds them as they came."""
        ...

    async def retried(self, samples: Sequence[SampleId], reason: str) -> None: ...

    async def completed(self, group: PendingGroup) -> None: ...

    async def dropped(self, group: PendingGroup, reason: str) -> None: ...


InFlight = dict[GroupId, tuple[PendingGroup, Sink]]  # groups on their way, and where each goes


def scores_differ(group: Group, *, component: str = "") -> bool:
    """Keeps groups whose samples do not all score the same: equal scores give no gradient.

    `component` compares this grader's own value instead of the score, as DAPO judges accuracy without the
    penalty on length (https://arxiv.org/abs/2503.14476, section 3.2). Raises UserError for one that the
    samples do not have.
    """
    if not component:
        return len({sample.score for sample in group.samples}) > 1
    return len({component_of(sample, component) for sample in group.samples}) > 1


def component_of(sample: Sample, grader: str) -> float:
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
