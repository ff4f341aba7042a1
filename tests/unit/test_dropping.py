"""A group that is dropped: who is told to abort it, and that nobody waits for that."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.clients.rollout import Arrival
from atoll.wire.types import (
    FinishReason,
    Graded,
    GradingError,
    SampleId,
    ScoreItem,
    Trajectory,
    TurnRequest,
    Verdict,
)
from tests import virtual_clock
from tests.builders import arrival, group_id, node, pending, sample
from tests.fake_replicas import V3, Fleet


class Peer:
    """Sends the first sample of each group at once, and the others once it may."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.has_begun = asyncio.Event()
        self.may_finish = asyncio.Event()
        self.aborted: list[str] = []
        self.was_told = asyncio.Event()
        self._hangs = hangs

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        samples = [
            sample(id.sample, node([4, 5], versions=V3), attempt=id.attempt)
            for request in requests
            for id in request.ids
        ]
        self.has_begun.set()
        yield arrival(*(s for s in samples if s.id.index == 0))
        await self.may_finish.wait()
        if rest := [s for s in samples if s.id.index > 0]:
            yield arrival(*rest)

    async def abort(self, id_prefix: str) -> int:
        self.aborted.append(id_prefix)
        self.was_told.set()
        if self._hangs:
            await asyncio.Event().wait()
        return 1


class Graders:
    """They cannot grade group 0."""

    async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
        yield [
            GradingError(item.id, "toy", "ZeroDivisionError", retryable=False)
            if item.id.group == group_id(0)
            else Graded(item.id, 1.0, {})
            for item in items
        ]


class Log:
    """A sink that notes what became of each group."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None: ...

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None:
        self.events.put_nowait((reason, samples[0].group.prompt))

    async def on_completed(self, group: PendingGroup) -> None:
        self.events.put_nowait(("completed", group.prompt.id.prompt))

    async def on_dropped(self, group: PendingGroup, reason: str) -> None:
        self.events.put_nowait(("dropped", group.prompt.id.prompt))


class Run(Fleet):
    def __init__(self, *peers: Peer) -> None:
        super().__init__(*peers, graders=Graders())
        self.log = Log()

    async def begin(self, num_groups: int, num_samples: int) -> asyncio.Task[None]:
        await self.route_all()
        self.generation.submit([pending(number, num_samples) for number in range(num_groups)], self.log)
        return asyncio.create_task(self.generation.run())


def test_a_replica_that_hangs_in_an_abort_does_not_stop_grading() -> None:
    async def scene() -> None:
        peer = Peer(hangs=True)
        run = Run(peer)
        running = await run.begin(num_groups=9, num_samples=2)
        assert await run.log.events.get() == ("dropped", 0)
        await peer.was_told.wait()
        peer.may_finish.set()
        assert [await run.log.events.get() for _ in range(8)] == [("completed", n) for n in range(1, 9)]
        running.cancel()

    virtual_clock.run(scene())


def test_a_dropped_group_is_aborted_where_it_is_generated_and_nowhere_else() -> None:
    """Also on a replica that is held, as in a push."""

    async def scene() -> None:
        has_it, idle = Peer(), Peer()
        run = Run(has_it, idle)
        running = await run.begin(num_groups=1, num_samples=2)
        await has_it.has_begun.wait()
        run.replicas.hold(run.members[0])
        assert await run.log.events.get() == ("dropped", 0)
        await has_it.was_told.wait()
        assert (has_it.aborted, idle.aborted) == (["toy/0/0/"], [])
        running.cancel()

    virtual_clock.run(scene())


def test_a_dropped_group_that_is_generated_already_costs_no_call() -> None:
    async def scene() -> None:
        peer = Peer()
        run = Run(peer)
        running = await run.begin(num_groups=2, num_samples=1)
        peer.may_finish.set()
        assert sorted([await run.log.events.get() for _ in range(2)]) == [("completed", 1), ("dropped", 0)]
        run.generation.submit([pending(2, 1)], run.log)
        assert await run.log.events.get() == ("completed", 2)
        assert not peer.aborted
        running.cancel()

    virtual_clock.run(scene())


def test_samples_that_are_aborted_are_retried_for_the_reason_of_the_abort() -> None:
    class Aborts(Peer):
        async def generate(
            self, model: str, requests: Sequence[TurnRequest]
        ) -> AsyncGenerator[Arrival, None]:
            async for arrived in super().generate(model, requests):
                yield arrived
                await self.was_told.wait()
                id, attempt = SampleId(requests[0].group, 1), requests[0].ids[-1].attempt
                part = sample(id, node([4], versions=V3), attempt=attempt, reason=FinishReason.ABORT)
                yield arrival(part)
                return

    async def scene() -> None:
        peer = Aborts()
        run = Run(peer)
        running = await run.begin(num_groups=0, num_samples=2)
        run.generation.submit([pending(1, 2)], run.log)
        await peer.has_begun.wait()
        await run.members[0].abort_all("its log-probabilities differ from the trainer's")
        reason, _ = await run.log.events.get()
        assert reason == "aborted: its log-probabilities differ from the trainer's"
        running.cancel()

    virtual_clock.run(scene())
