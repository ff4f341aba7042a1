"""Groups on their way: which samples are there, which are missing, and how old they are."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.wire.types import Graded, Group, Prompt, Sample, SampleId, Sampling, TurnReward, Version


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

    def _date(self, sample: Sample | None) -> None:
        if sample is not None and (number := sample.oldest_number) is not None:
            self.oldest[sample.id.index] = number

    def grade(self, verdict: Graded) -> None:
        index = verdict.id.index
        sample = self.samples[index]
        if sample is None:
            return  # replaced while it was being graded
        reward = TurnReward(len(sample.nodes) - 1, verdict.value, verdict.components)
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
        return Group(self.prompt, tuple(sample for sample in self.samples if sample is not None))

    def ids(self) -> list[SampleId]:
        return [SampleId(self.prompt.id, index) for index in range(len(self.samples))]


def scores_differ(group: Group) -> bool:
    """DAPO's dynamic sampling keeps only such groups: equal scores give no gradient."""
    first = group.samples[0].score
    return any(sample.score != first for sample in group.samples)
