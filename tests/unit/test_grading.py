"""Finished samples to groups with all their verdicts: which of them wait for what, on a virtual clock."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rewards.verdict_sources import ServerGrader
from atoll.coordinator.rollouts.grading import Grading
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import GroupsInFlight, GroupSink
from atoll.runtime.errors import StoreError
from atoll.wire.types import GradingError, SampleId, Trajectory
from tests.builders import SAMPLING, group_id, node, prompt, sample, sample_id
from tests.fake_rewards import FakeService, rewards_of
from tests.fake_servers import Fake, World, now, reward_server, watched
from tests.virtual_clock import timed


class Recorder:
    """Groups in flight, and when each was completed or dropped, by its prompt's number."""

    def __init__(self, rewards: Rewards) -> None:
        self.completed_at: dict[int, float] = {}
        self.dropped_for: dict[int, str] = {}
        self.groups = GroupsInFlight()
        self.grading = Grading(rewards, self.groups, self._drop)

    def submit(self, number: int, num_samples: int = 2) -> PendingGroup:
        samples = [sample(sample_id(number, index), node([3, 4])) for index in range(num_samples)]
        group = PendingGroup(prompt(number), number, SAMPLING, list[Trajectory | None](samples), 0)
        self.groups.add(group, self)
        self.grading.submit(samples)
        return group

    async def _drop(self, group: PendingGroup, sink: GroupSink, reason: str) -> None:
        self.groups.remove(group.prompt.id)
        self.dropped_for[group.prompt.id.prompt] = reason

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None: ...

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None: ...

    async def on_completed(self, group: PendingGroup) -> None:
        self.completed_at[group.prompt.id.prompt] = now()

    async def on_dropped(self, group: PendingGroup, reason: str) -> None: ...


@asynccontextmanager
async def running(recorder: Recorder) -> AsyncIterator[None]:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            recorder.grading.start(tasks)

    grading = asyncio.create_task(run())
    yield
    grading.cancel()


@timed
async def test_groups_are_complete_at_once_though_others_of_their_batches_are_slow() -> None:
    """Each of the batches holds a slow response, and there are more of them than there are services."""
    own = FakeService(seconds=dict.fromkeys(range(0, 200, 10), 30.0))
    recorder = Recorder(rewards_of(own))
    async with running(recorder):
        for number in range(200):
            recorder.submit(number)
            if number % 10 == 9:
                await asyncio.sleep(0.1)
        await asyncio.sleep(0.0)
        assert sorted(recorder.completed_at) == [number for number in range(200) if number % 10]
        await asyncio.sleep(31)
        assert len(recorder.completed_at) == 200
    assert len(own.calls) == 20


@timed
async def test_what_comes_while_services_are_full_shares_calls() -> None:
    own = FakeService(seconds=dict.fromkeys(range(100), 1.0), max_queued=20)
    recorder = Recorder(rewards_of(own))
    async with running(recorder):
        for number in range(100):
            recorder.submit(number)
            await asyncio.sleep(0.01)
        await asyncio.sleep(20)
    assert len(recorder.completed_at) == 100
    assert own.peak == 20
    assert len(own.calls) < 30


@timed
async def test_what_comes_while_external_servers_are_busy_shares_calls() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a", 2)):
        recorder = Recorder(Rewards(0, [ServerGrader(world.servers, "judge", 1.0)], asks_own=False))
        async with running(recorder):
            for number in range(100):
                recorder.submit(number)
                await asyncio.sleep(0.02)
            await asyncio.sleep(20)
    assert len(recorder.completed_at) == 100
    assert len(world.fakes["a"].calls) < 20


@timed
async def test_a_reward_that_failed_drops_its_group_with_the_cause() -> None:
    recorder = Recorder(rewards_of(FakeService(GradingError(sample_id(1), "maths", "a bug", False))))
    async with running(recorder):
        for number in range(3):
            recorder.submit(number)
        await asyncio.sleep(1)
    assert recorder.dropped_for == {1: "reward maths: a bug"}
    assert sorted(recorder.completed_at) == [0, 2]


@timed
async def test_a_verdict_on_an_earlier_attempt_is_no_reward_of_its_successor() -> None:
    """A group that is generated again, or submitted again, keeps the names of its samples."""
    own = FakeService(seconds={0: 10.0, 1: 10.0})
    recorder = Recorder(rewards_of(own))
    async with running(recorder):
        again = recorder.submit(0)
        recorder.submit(1)
        await asyncio.sleep(5)
        again.begin_next_attempt([1])
        second = sample(sample_id(0, 1), node([5]), attempt=1)
        again.accept(second)
        successor = recorder.submit(1)
        await asyncio.sleep(6)
        assert again.graded == [True, False]
        assert successor.graded == [False, False]
        recorder.grading.submit([second])
        await asyncio.sleep(11)
    assert sorted(recorder.completed_at) == [0, 1]
    assert successor.graded == [True, True]


@timed
async def test_samples_of_a_group_that_is_gone_are_not_graded() -> None:
    own = FakeService()
    recorder = Recorder(rewards_of(own))
    recorder.submit(0)
    recorder.groups.remove(group_id(0))
    async with running(recorder):
        await asyncio.sleep(1)
    assert own.calls == []


@timed
async def test_an_error_of_whoever_takes_groups_ends_grading() -> None:
    recorder = Recorder(rewards_of(FakeService()))

    async def refuse(group: PendingGroup) -> None:
        raise StoreError("the store is away")

    recorder.on_completed = refuse  # type: ignore[method-assign]
    recorder.submit(0)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as tasks:
            recorder.grading.start(tasks)
    assert isinstance(caught.value.exceptions[0], StoreError)
