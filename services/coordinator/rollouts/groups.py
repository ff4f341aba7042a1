"""Groups on their way: which samples are there, which are missing, and how old they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from atoll.coordinator.fleet.routing import Work
from atoll.wire.types import (
    WHOLE,
    Graded,
    Group,
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
    order: int  # of issue: batches are put together in this order
    sampling: Sampling
    samples: list[Trajectory | None]  # by index; None: being generated
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

    def requests(self) -> list[TurnRequest]:
        """For what is missing: one request for the samples, one for the greedy baseline."""
        missing = self.missing
        if self.has_baseline and missing and missing[-1] == len(self.samples) - 1:
            greedy = [self._request(missing[-1:], replace(self.sampling, temperature=0.0))]
            return [self._request(missing[:-1], self.sampling), *greedy] if missing[:-1] else greedy
        return [self._request(missing, self.sampling)]

    def work(self) -> Work:
        """What a replica would have to do for it."""
        return Work(self.prompt.id, self.prompt.token_ids, len(self.missing), self.sampling.max_new_tokens)

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
        """It was accepted, and is not to be: its attempt is still to come."""
        if self.samples[sample.id.index] is sample:
            self.samples[sample.id.index] = None

    def _date(self, sample: Trajectory | None) -> None:
        if sample is not None and (number := sample.oldest_number) is not None:
            self.oldest[sample.id.index] = number

    def grade(self, verdict: Graded) -> None:
        """Adds the verdict to what turns were rewarded with."""
        index = verdict.id.index
        sample = self.samples[index]
        if sample is None or self.graded[index]:
            return  # replaced while it was being graded, or graded twice
        reward = TurnReward(WHOLE, verdict.value, verdict.components, verdict.reasons)
        self.samples[index] = sample.add_reward(reward)
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
