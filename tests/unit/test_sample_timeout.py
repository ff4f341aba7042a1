"""Samples that never end on a healthy replica: begun again after a while, and nothing waits for them."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from atoll.coordinator.fleet.replicas import ReplicaState, now
from atoll.coordinator.rollouts.group_sources import GenerateSource
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import ServiceUnavailableError
from atoll.wire.types import Group, Prompt, SampleId, Trajectory, TurnId, TurnRequest, Version
from tests.builders import SAMPLING, arrival, node, pending, prompt, sample
from tests.fake_replicas import SAMPLE_TIMEOUT_S, V3, Fleet
from tests.virtual_clock import timed

V4 = Version("run", 4)
TIMEOUT = f"timed out: rollout-0 did not finish it within coordinator.sample_timeout_s = {SAMPLE_TIMEOUT_S:g}"


class Peer:
    """Finishes samples after a second, but for some that it never finishes."""

    def __init__(self, *hanging: tuple[int, int], attempts: int = 1, loses_after_s: float = 0.0) -> None:
        """`hanging`: prompt and index of samples, in their first `attempts`. After `loses_after_s` it loses
        the first stream."""
        self.version = V3
        self.ended: list[tuple[float, str]] = []  # when a stream was closed, and what was still running
        self.asked: list[str] = []
        self._hanging = hanging
        self._attempts = attempts
        self._loses_after_s = loses_after_s

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        ids = [id for request in requests for id in request.ids]
        self.asked += map(str, ids)
        await asyncio.sleep(1.0)
        hanging = [id for id in ids if self._hangs(id)]
        try:
            if done := [self._sample(id) for id in ids if id not in hanging]:
                yield arrival(*done)
            if hanging and self._loses_after_s:
                await asyncio.sleep(self._loses_after_s)
                self._loses_after_s = 0.0
                raise ServiceUnavailableError("the stream was lost")
            if hanging:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended += [(now(), str(id)) for id in hanging]
            raise

    async def abort(self, id_prefix: str) -> int:
        raise AssertionError(f"nothing of {id_prefix} is under way any more")

    def _hangs(self, id: TurnId) -> bool:
        return id.attempt < self._attempts and (id.sample.group.prompt, id.sample.index) in self._hanging

    def _sample(self, id: TurnId) -> Trajectory:
        return sample(id.sample, node([4, 5], versions=self.version), attempt=id.attempt)


class Log:
    """A sink that notes when what became of each group, and a journal."""

    full = False

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[float, str]] = asyncio.Queue()
        self.retried: list[tuple[str, str]] = []

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None: ...

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None:
        await self.retry(samples, reason)

    async def on_completed(self, group: PendingGroup) -> None:
        self.events.put_nowait((now(), f"{group.prompt.id} is complete: {group.attempts}"))

    async def on_dropped(self, group: PendingGroup, reason: str) -> None:
        self.events.put_nowait((now(), reason))

    async def issue(self, samples: Sequence[SampleId], cursor: str) -> None: ...

    async def load(self, groups: Sequence[Any]) -> list[Any]:
        return []

    async def finish(self, samples: Sequence[Trajectory], payload: bytes) -> Sequence[Trajectory]:
        return samples

    async def retry(self, samples: Sequence[SampleId], reason: str) -> None:
        self.retried += [(str(id), reason) for id in samples]

    async def consume(self, step: int, samples: Sequence[SampleId]) -> None: ...

    async def drop(self, samples: Sequence[SampleId], reason: str) -> None:
        self.events.put_nowait((now(), reason))


class Prompts:
    def __init__(self) -> None:
        self.drawn = 0
        self.cursor = self

    def dump(self) -> str:
        return str(self.drawn)

    def draw(self, count: int) -> list[Prompt]:
        self.drawn += count
        return [prompt(number) for number in range(self.drawn - count, self.drawn)]


class Run(Fleet):
    """One replica. `source` draws a group of two samples for each of three steps."""

    def __init__(self, peer: Peer, max_staleness: int = 0) -> None:
        super().__init__(peer)
        self.peer = peer
        self.log = Log()
        self.source = GenerateSource(
            Prompts(),  # type: ignore[arg-type]
            self.generation,
            self.log,  # type: ignore[arg-type]
            sampling=SAMPLING,
            prompts_per_step=1,
            samples_per_prompt=2,
            greedy_baseline=False,
            max_staleness=max_staleness,
            weighs_turns=False,
            cuts_sessions=False,
            steps=3,
            max_dropped_share=1.0,
            dynamic_sampling=None,
        )

    async def __aenter__(self) -> "Run":
        await self.route_all()
        self._running = asyncio.create_task(self.generation.run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._running.cancel()

    async def publish(self, version: Version) -> None:
        self.peer.version = self.members[0].version = self.members[0].latest = version
        await self.source.on_published(version)

    def check_is_routed_and_idle(self) -> None:
        (member,) = self.members
        assert (member.state, member.violations) == (ReplicaState.ROUTED, 0)
        assert (member.load.in_hand, member.load.prompt_tokens) == (0, 0)


def drawn(groups: Sequence[Group]) -> list[tuple[str, int]]:
    return [(str(sample.id), sample.attempt) for group in groups for sample in group.samples]


@timed
async def test_a_sample_that_hangs_is_begun_again_and_the_batch_is_complete() -> None:
    async with Run(Peer((0, 1))) as run:
        await run.publish(V3)
        groups = await run.source.take(1, 1, V3)
        assert drawn(groups) == [("toy/0/0/0", 0), ("toy/0/0/1", 1)]  # the finished one is kept
        assert SAMPLE_TIMEOUT_S + 1 <= now() < SAMPLE_TIMEOUT_S + 2
        assert run.log.retried == [("toy/0/0/1", TIMEOUT)]
        assert run.source.drops == {"timed out": 1}
        assert run.peer.ended == [(SAMPLE_TIMEOUT_S, "toy/0/0/1/0/0/0")]
        assert run.peer.asked == ["toy/0/0/0/0/0/0", "toy/0/0/1/0/0/0", "toy/0/0/1/1/0/0"]
        run.check_is_routed_and_idle()


@timed
async def test_a_stream_that_is_joined_again_has_no_more_time() -> None:
    async with Run(Peer((0, 1), loses_after_s=SAMPLE_TIMEOUT_S / 2)) as run:
        await run.publish(V3)
        groups = await run.source.take(1, 1, V3)
        assert drawn(groups) == [("toy/0/0/0", 0), ("toy/0/0/1", 1)]
        assert run.peer.asked.count("toy/0/0/1/0/0/0") == 2
        assert run.peer.ended == [(SAMPLE_TIMEOUT_S, "toy/0/0/1/0/0/0")]
        run.check_is_routed_and_idle()


@timed
async def test_a_group_about_to_be_too_old_is_waited_for_no_longer_than_its_attempts_may_take() -> None:
    async with Run(Peer((0, 1)), max_staleness=1) as run:
        await run.publish(V3)  # issues groups 0 and 1
        assert drawn(await run.source.take(1, 1, V3)) == [("toy/0/1/0", 0), ("toy/0/1/1", 0)]
        await run.publish(V4)  # issues group 2
        groups = await run.source.take(2, 1, V4)  # group 2 is ready, and can wait for another step
        assert "toy/0/2/0/0/0/0" in run.peer.asked
        assert drawn(groups) == [("toy/0/0/0", 0), ("toy/0/0/1", 1)]
        assert [sample.staleness(V4) for group in groups for sample in group.samples] == [1, 0]
        assert SAMPLE_TIMEOUT_S + 1 <= now() < SAMPLE_TIMEOUT_S + 2
        run.check_is_routed_and_idle()


@timed
async def test_a_sample_that_hangs_in_each_attempt_drops_its_group_with_the_reason() -> None:
    async with Run(Peer((0, 1), attempts=3)) as run:
        run.generation.submit([pending(number, 2) for number in range(2)], run.log)
        at, event = await run.log.events.get()
        assert (at < 2, event) == (True, "toy/0/1 is complete: [0, 0]")  # of the same call
        assert await run.log.events.get() == (
            3 * SAMPLE_TIMEOUT_S,
            f"3 attempts failed, the last: {TIMEOUT}",
        )
        assert [at for at, _ in run.peer.ended] == [SAMPLE_TIMEOUT_S * n for n in (1, 2, 3)]
        run.check_is_routed_and_idle()
