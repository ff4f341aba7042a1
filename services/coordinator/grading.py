"""Grading: finished samples in, groups with all their verdicts out."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from services.coordinator.groups import InFlight, PendingGroup, Sink
from services.coordinator.rewards import Rewards
from services.wire.types import Graded, Sample, ScoreItem

NUM_GRADERS = 4  # batches in grading at once: what arrives while all are out goes into the next one
NUM_WITH_SERVERS = 64  # with external servers: a batch may wait for a slow one while others have room


class Grading:
    def __init__(
        self,
        rewards: Rewards,
        groups: InFlight,
        drop: Callable[[PendingGroup, Sink, str], Awaitable[None]],
    ) -> None:
        """`groups` are those in flight: one that is completed leaves it. `drop` takes out a group whose
        sample could not be graded, with the reason."""
        self._rewards = rewards
        self._groups = groups
        self._drop = drop
        self._samples: list[Sample] = []
        self._filled = asyncio.Event()

    def submit(self, samples: Iterable[Sample]) -> None:
        self._samples.extend(samples)
        if self._samples:
            self._filled.set()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        for _ in range(NUM_WITH_SERVERS if self._rewards.has_servers else NUM_GRADERS):
            tasks.create_task(self._grade())

    async def _grade(self) -> None:
        """Consumes finished samples; waits for them, then for their verdicts; unblocked by `submit`."""
        while True:
            samples = await self._take_all()
            pending = [(sample, *known) for sample in samples if (known := self._groups.get(sample.id.group))]
            verdicts = await self._rewards.score([_score_item(sample, group) for sample, group, _ in pending])
            for (_, group, sink), verdict in zip(pending, verdicts, strict=True):
                if group.prompt.id not in self._groups:
                    continue  # dropped with an earlier sample
                if not isinstance(verdict, Graded):
                    await self._drop(group, sink, f"reward {verdict.grader or 'service'}: {verdict.cause}")
                    continue
                group.grade(verdict)
                if group.complete:
                    del self._groups[group.prompt.id]
                    await sink.completed(group)

    async def _take_all(self) -> list[Sample]:
        """Waits until there is something."""
        while not self._samples:
            self._filled.clear()
            await self._filled.wait()
        samples, self._samples = self._samples, []
        return samples


def _score_item(sample: Sample, group: PendingGroup) -> ScoreItem:
    return ScoreItem(
        id=sample.id,
        prompt=group.prompt.text,
        response=sample.text,
        ground_truth=group.prompt.ground_truth,
        data_source=group.prompt.data_source,
        finish_reason=sample.finish_reason,
        response_length=sample.num_tokens,
        extra=group.prompt.extra,
    )
