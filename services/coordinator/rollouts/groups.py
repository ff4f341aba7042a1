"""Groups in flight: finished and missing samples, and their age."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from atoll.coordinator.fleet.routing import ContextWork
from atoll.wire.types import (
    WHOLE,
    Graded,
    Group,
    GroupId,
    Prompt,
    SampleId,
    Sampling,
    Trajectory,
    TurnId,
    TurnRequest,
    TurnReward,
    Version,
)


@dataclass(slots=True, eq=False)
class PendingGroup:
    """One prompt's samples while they are generated and graded. Mutable, private to the coordinator."""

    prompt: Prompt
    order: int  # issue order, in which batches are formed
    sampling: Sampling
    samples: list[Trajectory | None]  # by index; None: being generated
    issued: int  # version number at issue
    has_baseline: bool = False  # the last sample is greedy and not trained on
    weighs_turns: bool = False  # a sample is as old as its freshest turn: older ones get no weight
    sent_alone: bool = False  # requested in a separate call
    graded: list[bool] = field(init=False)
    attempts: list[int] = field(init=False)
    failures: list[int] = field(init=False)  # lost attempts, by index
    oldest: list[int] = field(init=False)  # lower bound of the version that each sample's age is judged by

    _begun: set[int] = field(default_factory=set)  # samples whose session has a turn

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

    def requests(self) -> list[TurnRequest]:
        """Requests for missing samples: one for the samples, one for the greedy baseline."""
        missing = self.missing
        if self.has_baseline and missing and missing[-1] == len(self.samples) - 1:
            greedy = [self._request(missing[-1:], replace(self.sampling, temperature=0.0))]
            return [self._request(missing[:-1], self.sampling), *greedy] if missing[:-1] else greedy
        return [self._request(missing, self.sampling)]

    @property
    def oldest_number(self) -> int:
        """Lower bound of the version that its age is judged by. An agent's open session, whose next turn is
        as fresh as can be, has none where turns are weighed."""
        if not (self.weighs_turns and self.prompt.agent):
            return min(self.oldest)
        numbers = [n for n, sample in zip(self.oldest, self.samples, strict=True) if sample is not None]
        return min(numbers, default=sys.maxsize)

    @property
    def key(self) -> GroupId:
        return self.prompt.id

    @property
    def id_prefix(self) -> str:
        return f"{self.prompt.id}/"

    def demand(self) -> ContextWork:
        return ContextWork(
            self.prompt.id, self.prompt.token_ids, len(self.missing), self.sampling.max_new_tokens
        )

    def note_sent(self, version: Version) -> None:
        """Missing samples are drawn at `version` at the earliest."""
        for index in self.missing:
            self.oldest[index] = version.number

    def still_missing(self, ids: Iterable[TurnId]) -> list[TurnId]:
        """Those of `ids` that neither this attempt nor another one has delivered."""
        return [
            id
            for id in ids
            if self.samples[id.sample.index] is None and id.attempt == self.attempts[id.sample.index]
        ]

    def _request(self, indices: tuple[int, ...], sampling: Sampling) -> TurnRequest:
        ids = tuple(TurnId(SampleId(self.prompt.id, index), self.attempts[index]) for index in indices)
        return TurnRequest(ids, self.prompt.token_ids, sampling)

    @property
    def complete(self) -> bool:
        return all(self.graded)

    def accept(self, sample: Trajectory) -> bool:
        """The first finished attempt wins; False for a later one."""
        if self.samples[sample.id.index] is not None:
            return False
        self.samples[sample.id.index] = sample
        self._date(sample)
        return True

    def forget(self, sample: Trajectory) -> None:
        """Undoes `accept`: this attempt may not win."""
        if self.samples[sample.id.index] is sample:
            self.samples[sample.id.index] = None

    def _date(self, sample: Trajectory | None) -> None:
        if sample is None:
            return
        if numbers := sample.turn_numbers():
            self.oldest[sample.id.index] = max(numbers) if self.weighs_turns else min(numbers)
        elif sample.num_produced:
            self.oldest[sample.id.index] = sys.maxsize  # nothing of it is trained on: it is never too old

    def grade(self, verdict: Graded) -> None:
        """Adds the verdict to what turns were rewarded with."""
        index = verdict.id.index
        sample = self.samples[index]
        if sample is None or self.graded[index]:
            return  # replaced during grading, or graded twice
        reward = TurnReward(WHOLE, verdict.value, verdict.components, verdict.reasons)
        self.samples[index] = sample.add_reward(reward)
        self.graded[index] = True

    def note_session(self, index: int, attempt: int, version: Version) -> bool:
        """A session has a turn at `version`; False: it is not the sample's current attempt."""
        if self.samples[index] is not None or self.attempts[index] != attempt:
            return False
        if index not in self._begun:
            self._begun.add(index)
            self.oldest[index] = version.number
        return True

    def keep_rewards(self, index: int) -> None:
        """What its turns and its session were rewarded with is all that the sample gets."""
        self.graded[index] = True

    def begin_next_attempt(self, indices: Sequence[int]) -> None:
        """Discards these samples and begins their next attempts."""
        for index in indices:
            self.samples[index] = None
            self.graded[index] = False
            self._begun.discard(index)
            self.attempts[index] += 1

    def stale_indices(self, current: Version, max_staleness: int) -> list[int]:
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
