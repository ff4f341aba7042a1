"""Ten thousand samples through source, generation, grading and journal, with delays, deaths and a real store.

Replicas and graders are simulated at the client boundary: each sample takes a random, long-tailed time
and records the policy versions that were live while it ran.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from services.coordinator.generation import Generation
from services.coordinator.groups import scores_differ, staleness
from services.coordinator.journal import Journal
from services.coordinator.replicas import Replica, Replicas
from services.coordinator.rewards import Rewards
from services.coordinator.source import GenerateSource
from services.runtime.clients import Arrival, Caller
from services.runtime.errors import AtollError, ServiceUnavailableError
from services.runtime.store import Store, embedded
from services.wire import codec
from services.wire.types import (
    FinishReason,
    Graded,
    GradingError,
    GroupId,
    GroupRequest,
    Node,
    Prompt,
    Provenance,
    Sample,
    SampleId,
    Sampling,
    ScoreItem,
    ServiceEntry,
    Verdict,
    Version,
    VersionSpan,
)


class Prompts:
    """An endless dataset: row n is prompt n."""

    def __init__(self) -> None:
        self._next = 0

    def prompt(self, id: GroupId) -> Prompt:
        return Prompt(id, np.array([1, 2], np.int32), "1+1=", "2", "toy")

    def draw(self, n: int) -> list[Prompt]:
        first, self._next = self._next, self._next + n
        return [self.prompt(GroupId("toy", 0, number)) for number in range(first, first + n)]


@dataclass
class SimulatedReplica:
    """Samples with a heavy tail of durations; dies in mid-stream every so often."""

    name: str
    dice: random.Random
    death_rate: float
    version: Version
    generated: Counter[str] = field(default_factory=Counter)

    async def generate(
        self, model: str, sampling: Sampling, requests: Sequence[GroupRequest]
    ) -> AsyncIterator[Arrival]:
        finished: asyncio.Queue[Sample] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._sample(request, index, attempt, finished))
            for request in requests
            for index, attempt in zip(request.indices, request.attempts, strict=True)
        ]
        try:
            for _ in tasks:
                sample = await finished.get()
                if self.dice.random() < self.death_rate:
                    raise ServiceUnavailableError(f"{self.name} was killed")
                yield Arrival([sample], codec.encode_samples([sample]).SerializeToString())
        finally:
            for task in tasks:
                task.cancel()

    async def _sample(
        self, request: GroupRequest, index: int, attempt: int, finished: asyncio.Queue[Sample]
    ) -> None:
        first = self.version
        await asyncio.sleep(0.001 + (0.06 if self.dice.random() < 0.03 else 0.004 * self.dice.random()))
        spans = (VersionSpan(first, 0, 1), VersionSpan(self.version, 1, 2))  # a push may have come between
        node = Node(-1, np.array([3, 4], np.int32), np.ones(2, np.bool_), np.zeros(2, np.float32), spans)
        id = SampleId(request.group, index)
        self.generated[f"{id}/{attempt}"] += 1
        origin = Provenance(self.name, "1", 0.0, 0.0)
        finished.put_nowait(Sample(id, attempt, (node,), FinishReason.STOP, "2", origin))

    async def abort(self, id_prefix: str) -> int:
        return 0


class Graders:
    """Scores by the sample's index; fails for good on the prompts in `broken`."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self._broken = broken

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        return [
            GradingError(item.id, "toy", "ZeroDivisionError", retryable=False)
            if item.id.group.prompt in self._broken
            else Graded(item.id, float(item.id.index % 2), {"toy": float(item.id.index % 2)})
            for item in items
        ]


class Dataflow:
    """Everything between prompts and batches, with `num_replicas` simulated replicas."""

    def __init__(self, store: Store, *, death_rate: float = 0.0, graders: Graders | None = None) -> None:
        self.dice = random.Random(0)
        self.version = Version("", 0)
        self.replicas = Replicas(Caller(), 5.0)
        self.simulated = [
            SimulatedReplica(f"rollout-{i}", self.dice, death_rate, self.version) for i in range(2)
        ]
        self.journal = Journal(store, "toy")
        rewards = Rewards(1, [graders or Graders()])  # type: ignore[list-item]
        self.generation = Generation(self.replicas, rewards, model="", max_attempts=50, timeout_s=5.0)

    async def start(self) -> None:
        self.version = Version((await self.journal.restore(None)).lineage, 0)
        await self.publish(self.version)

    def source(self, max_staleness: int, steps: int, prompts_per_step: int = 10) -> GenerateSource:
        return GenerateSource(
            Prompts(),  # type: ignore[arg-type]
            self.generation,
            self.journal,
            sampling=Sampling(8),
            prompts_per_step=prompts_per_step,
            samples_per_prompt=8,
            max_staleness=max_staleness,
            steps=steps,
            max_dropped_share=0.5,
            keep=scores_differ,
        )

    async def publish(self, version: Version) -> None:
        """Every replica holds the version from now on; dead ones are back."""
        for simulated in self.simulated:
            simulated.version = version
            await self.replicas.route(
                Replica(
                    ServiceEntry("rollout", simulated.name, "1", ""),
                    simulated,  # type: ignore[arg-type]
                    SimpleNamespace(),  # type: ignore[arg-type]
                    version,
                )
            )


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    with embedded(tmp_path) as server:
        store = Store(server.url, "toy")
        await store.take_epoch()
        yield store
        await store.close()


@pytest.mark.parametrize(("max_staleness", "death_rate"), [(0, 0.0), (2, 0.002)])
async def test_no_consumed_token_is_older_than_the_bound(
    store: Store, max_staleness: int, death_rate: float
) -> None:
    flow = Dataflow(store, death_rate=death_rate)
    await flow.start()
    steps = 125  # x 10 prompts x 8 samples = 10,000
    source = flow.source(max_staleness, steps)
    running = asyncio.create_task(flow.generation.run())
    ages: list[int] = []
    consumed: Counter[SampleId] = Counter()
    await source.published(flow.version)
    for step in range(1, steps + 1):
        groups = await asyncio.wait_for(source.take(step, 10, flow.version), 20)
        ages += [staleness(sample, flow.version) for group in groups for sample in group.samples]
        consumed.update(sample.id for group in groups for sample in group.samples)
        assert all([s.id.index for s in group.samples] == list(range(8)) for group in groups)
        await asyncio.sleep(0.004)  # the update
        flow.version = Version(flow.version.lineage, step)
        await flow.publish(flow.version)
        await source.published(flow.version)
    running.cancel()
    assert len(consumed) == 10_000
    assert set(consumed.values()) == {1}
    assert max(ages) == max_staleness  # never more, and the bound was reached
    assert min(ages) == 0


async def test_a_group_that_cannot_be_graded_is_dropped_whole_and_replaced(store: Store) -> None:
    flow = Dataflow(store, graders=Graders(broken=frozenset({3, 4})))
    await flow.start()
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.published(flow.version)
    groups = await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()
    assert [group.prompt.id.prompt for group in groups] == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert source.drops == {"reward toy": 2}


async def test_too_many_dropped_groups_stop_the_run_with_the_cause(store: Store) -> None:
    flow = Dataflow(store, graders=Graders(broken=frozenset(range(1000))))
    await flow.start()
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.published(flow.version)
    with pytest.raises(
        AtollError, match=r"coordinator.max_dropped_share = 0.5.*reward toy: ZeroDivisionError"
    ):
        await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()


async def test_a_group_without_contrast_is_filtered_and_replaced(store: Store) -> None:
    class Flat(Graders):
        async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
            verdicts = await super().score(items)
            return [Graded(v.id, 1.0, {}) if v.id.group.prompt == 0 else v for v in verdicts]

    flow = Dataflow(store, graders=Flat())
    await flow.start()
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.published(flow.version)
    groups = await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()
    assert [group.prompt.id.prompt for group in groups] == list(range(1, 11))
    assert source.drops == {"filtered": 1}


async def test_without_a_replica_the_run_ends_with_the_reason(store: Store) -> None:
    flow = Dataflow(store)
    flow.generation = Generation(
        flow.replicas, Rewards(1, [Graders()]), model="", max_attempts=2, timeout_s=0.1
    )  # type: ignore[list-item]
    flow.version = Version((await flow.journal.restore(None)).lineage, 0)
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.published(flow.version)
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(running, 5)
    assert "0 of 1 rollout replicas are ready after 0.1 s" in str(failure.value.exceptions[0])
