"""Periodic validation: several sets, each with its own sampling."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.coordinator.journal.journal import OpenSession
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import Producer
from atoll.runtime.errors import AtollError
from atoll.wire.types import Group, GroupId, Prompt, SampleId, Sampling, Trajectory

Keep = Callable[[str, Sequence[Group]], Awaitable[None]]  # the answers to a set, by its name


@dataclass(frozen=True, slots=True)
class ValidationSet:
    name: str
    prompts: tuple[Prompt, ...]
    num_samples: int  # k of avg@k and pass@k
    sampling: Sampling
    pass_score: float = 1.0  # score from which a sample passes


def set_metrics(name: str, groups: Sequence[Group], pass_score: float) -> dict[str, float]:
    """avg@k: the mean score. pass@k: the share of prompts with a sample that scores `pass_score` or more."""
    k = len(groups[0].samples)
    scores = np.array([[sample.score for sample in group.samples] for group in groups])
    lengths = np.array([[sample.num_produced for sample in group.samples] for group in groups])
    return {
        f"val/{name}/avg@{k}": float(scores.mean()),
        f"val/{name}/pass@{k}": float((scores >= pass_score).any(axis=1).mean()),
        f"val/{name}/response_length/mean": float(lengths.mean()),
    }


async def evaluate(
    sets: Sequence[ValidationSet], producer: Producer, run: str, version: int, keep: Keep | None = None
) -> dict[str, float]:
    """Generates and grades every set; a group that cannot be graded is left out and counted. `keep` gets the
    groups of each set in the order of its rows.

    Raises AtollError if that leaves nothing of a set.
    """
    collectors = []
    for validation_set in sets:
        collector = _Collector(len(validation_set.prompts))
        groups = [
            PendingGroup(
                replace(
                    prompt,
                    id=GroupId.of_validation(run, validation_set.name, version, prompt.id.prompt),
                ),
                order,
                validation_set.sampling,
                [None] * validation_set.num_samples,
                version,
            )
            for order, prompt in enumerate(validation_set.prompts)
        ]
        producer.submit(groups, collector)
        collectors.append(collector)
    metrics: dict[str, float] = {}
    for validation_set, collector in zip(sets, collectors, strict=True):
        await collector.done.wait()
        if not collector.groups:
            raise AtollError(
                f"validation set {validation_set.name}: all {collector.num_dropped} groups were dropped, "
                f"expected at least one graded; the last: {collector.last_reason}; fix that first"
            )
        answers = sorted(collector.groups, key=lambda group: group.prompt.id.prompt)
        if keep:
            await keep(validation_set.name, answers)
        metrics |= set_metrics(validation_set.name, answers, validation_set.pass_score)
        metrics[f"val/{validation_set.name}/dropped"] = float(collector.num_dropped)
    return metrics


class _Collector:
    """Collects the groups of one set; nothing is journaled."""

    def __init__(self, expected: int) -> None:
        self.groups: list[Group] = []
        self.num_dropped = 0
        self.last_reason = ""
        self.done = asyncio.Event()
        self._expected = expected

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None: ...

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None: ...

    async def on_session(self, session: OpenSession) -> bool:
        return True

    async def on_completed(self, group: PendingGroup) -> None:
        self.groups.append(group.group())
        self._check()

    async def on_dropped(self, group: PendingGroup, reason: str) -> None:
        self.num_dropped += 1
        self.last_reason = reason
        self._check()

    def _check(self) -> None:
        if len(self.groups) + self.num_dropped == self._expected:
            self.done.set()
