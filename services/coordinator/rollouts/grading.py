"""Grades finished samples and completes their groups."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import GroupsInFlight, GroupSink
from atoll.wire.types import GradingError, ScoreItem, Trajectory, Verdict

T = TypeVar("T")

Judged = tuple[Trajectory, PendingGroup, GroupSink, Verdict | None]  # None: its rewards are set already

LINGER_S = 0.01  # for samples to gather: calls of one sample cost several times as much
MAX_BATCH = 4096  # samples between yields to the event loop: about ten milliseconds


class Grading:
    def __init__(
        self,
        rewards: Rewards,
        groups: GroupsInFlight,
        drop: Callable[[PendingGroup, GroupSink, str], Awaitable[None]],
    ) -> None:
        """A group that is complete leaves `groups`. `drop` takes out a group whose
        sample could not be graded, with the reason."""
        self._rewards = rewards
        self._groups = groups
        self._drop = drop
        self._samples = _Inbox[Trajectory]()
        self._judged = _Inbox[Judged]()

    def submit(self, samples: Iterable[Trajectory]) -> None:
        self._samples.put(samples)

    def keep_rewards(self, samples: Iterable[Trajectory]) -> None:
        """Of samples that graders have no say in."""
        self._judged.put(
            (sample, *known, None) for sample in samples if (known := self._groups.find(sample.id.group))
        )

    def start(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._ask(tasks))
        tasks.create_task(self._settle())

    async def _ask(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes finished samples and has them graded in batches; waits for samples, and until earlier ones
        are being graded; unblocked by `submit` and by verdicts.
        """
        while True:
            samples = await self._samples.take_all()
            for first in range(0, len(samples), MAX_BATCH):  # a resume hands over all that it has at once
                tasks.create_task(self._grade(samples[first : first + MAX_BATCH]))
            await asyncio.sleep(LINGER_S)
            await self._rewards.wait_until_dispatched()

    async def _grade(self, samples: Sequence[Trajectory]) -> None:
        asked = {
            sample.id: (sample, *known)
            for sample in samples
            if (known := self._groups.find(sample.id.group))  # if not, it was cancelled or dropped
        }
        items = [_score_item(sample, group) for sample, group, _ in asked.values()]

        def deliver(verdicts: Sequence[Verdict]) -> None:
            self._judged.put([(*asked[verdict.id], verdict) for verdict in verdicts])

        await self._rewards.score(items, deliver)

    async def _settle(self) -> None:
        """Consumes verdicts; waits for them; unblocked by `deliver`."""
        while True:
            for sample, group, sink, verdict in await self._judged.take_all():
                known = self._groups.find(group.prompt.id)
                if known is None or known[0] is not group or group.samples[sample.id.index] is not sample:
                    continue  # dropped, or replaced by another attempt
                if isinstance(verdict, GradingError):
                    await self._drop(group, sink, f"reward {verdict.grader or 'service'}: {verdict.cause}")
                    continue
                if verdict is None:
                    group.keep_rewards(sample.id.index)
                else:
                    group.grade(verdict)
                if group.complete:
                    self._groups.remove(group.prompt.id)
                    await sink.on_completed(group)


class _Inbox(Generic[T]):
    """Items that have arrived since the last look."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._filled = asyncio.Event()

    def put(self, items: Iterable[T]) -> None:
        self._items.extend(items)
        if self._items:
            self._filled.set()

    async def take_all(self) -> list[T]:
        """Waits for at least one item."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        items, self._items = self._items, []
        return items


def _score_item(sample: Trajectory, group: PendingGroup) -> ScoreItem:
    return ScoreItem(
        id=sample.id,
        prompt=group.prompt.text,
        response=sample.response,
        ground_truth=group.prompt.ground_truth,
        data_source=group.prompt.data_source,
        finish_reason=sample.finish_reason,
        response_length=sample.num_produced,
        extra=group.prompt.extra,
        messages=sample.messages,
        environment=sample.environment,
    )
