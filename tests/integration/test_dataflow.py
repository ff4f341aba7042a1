"""Ten thousand samples through source, generation, grading and journal, with delays, deaths and a real store.

Replicas and graders are simulated at the client boundary: each sample takes a random, long-tailed time
and records the policy versions that were live while it ran.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.cli.audit import SampleFate, audit
from atoll.config.schema import FilterConfig
from atoll.coordinator.algorithm.filters import DynamicSampling
from atoll.coordinator.control import RunControl
from atoll.coordinator.data.datasets import Cursor
from atoll.coordinator.fleet.replicas import Replica, Replicas, ReplicaState
from atoll.coordinator.journal import scripts
from atoll.coordinator.journal.journal import Checkpoint, InFlight, Journal
from atoll.coordinator.journal.ledger import LEDGER, Ledger
from atoll.coordinator.rollouts.group_sources import GenerateSource
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import AtollError, EngineDiedError, StoreError, UserError
from atoll.runtime.store import Script, Store, run_embedded_server
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.types import (
    Graded,
    GradingError,
    Group,
    GroupId,
    Prompt,
    SampleId,
    Sampling,
    ScoreItem,
    ServiceEntry,
    Trajectory,
    TurnId,
    TurnRequest,
    Verdict,
    Version,
)
from tests import builders
from tests.builders import generation_without_agents, group_id, node, pending, sample_id
from tests.fake_rewards import rewards_of

GREEDY_SCORE = 0.25


class Prompts:
    """An endless dataset: row n is prompt n."""

    def __init__(self) -> None:
        self._next = 0

    @property
    def cursor(self) -> Cursor:
        return Cursor(0, False, (1 << 30,), (self._next,))

    def load(self, cursor: Cursor) -> None:
        (self._next,) = cursor.drawn

    def prompt(self, id: GroupId) -> Prompt:
        return builders.prompt(id.prompt)

    def draw(self, n: int) -> list[Prompt]:
        first, self._next = self._next, self._next + n
        return [builders.prompt(number) for number in range(first, first + n)]


@dataclass
class SimulatedReplica:
    """Samples with a heavy tail of durations; dies in mid-stream every so often."""

    name: str
    dice: random.Random
    death_rate: float
    version: Version
    asked: list[tuple[SampleId, int, float]]  # sample, attempt, temperature; of all replicas
    died: Callable[[], None]
    hangs: Callable[[SampleId], bool] = lambda id: False  # such samples never finish

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        finished: asyncio.Queue[Trajectory] = asyncio.Queue()
        tasks = []
        for request in requests:
            for id in request.ids:
                self.asked.append((id.sample, id.attempt, request.sampling.temperature))
                tasks.append(asyncio.create_task(self._sample(request, id, finished)))
        try:
            for _ in tasks:
                sample = await finished.get()
                if self.dice.random() < self.death_rate:
                    self.died()
                    raise EngineDiedError(f"{self.name} was killed")
                yield builders.arrival(sample)
        finally:
            for task in tasks:
                task.cancel()

    async def _sample(self, request: TurnRequest, turn: TurnId, finished: asyncio.Queue[Trajectory]) -> None:
        id, first = turn.sample, self.version
        await asyncio.sleep(0.001 + (0.06 if self.dice.random() < 0.03 else 0.004 * self.dice.random()))
        if self.hangs(id):
            await asyncio.Event().wait()
        # a push may have come between
        text = "greedy" if request.sampling.temperature == 0 else "2"
        finished.put_nowait(made(id, turn.attempt, text, self.name, (first, self.version)))

    async def abort(self, id_prefix: str) -> int:
        return 0


def made(
    id: SampleId, attempt: int, text: str, replica: str, versions: Version | Sequence[Version]
) -> Trajectory:
    tokens = node([3, 4], logprobs=0.0, versions=versions)
    return builders.sample(id, tokens, attempt=attempt, text=text, replica=replica)


class Graders:
    """Scores by the sample's index; fails for good on the prompts in `broken`; those in `flat` score 1."""

    def __init__(self, broken: Collection[int] = (), flat: Collection[int] = ()) -> None:
        self._broken = broken
        self._flat = flat

    async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
        yield [
            GradingError(item.id, "toy", "ZeroDivisionError", retryable=False)
            if item.id.group.prompt in self._broken
            else Graded(item.id, self._value(item), {})
            for item in items
        ]

    def _value(self, item: ScoreItem) -> float:
        if item.response == "greedy":
            return GREEDY_SCORE
        return 1.0 if item.id.group.prompt in self._flat else float(item.id.index % 2)


class Dataflow:
    """Everything between prompts and batches, with `num_replicas` simulated replicas."""

    def __init__(
        self,
        store: Store,
        folder: Path,
        *,
        death_rate: float = 0.0,
        graders: Graders | None = None,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.folder = folder
        self.dice = random.Random(0)
        self.version = Version("", 0)
        self.restarts: list[asyncio.Task[None]] = []
        self.replicas = Replicas(Caller(), 5.0)
        self.asked: list[tuple[SampleId, int, float]] = []
        self.simulated = [
            SimulatedReplica(f"rollout-{i}", self.dice, death_rate, self.version, self.asked, self._restart)
            for i in range(2)
        ]
        self.routed = [
            Replica(
                ServiceEntry("rollout", simulated.name, "1", ""),
                simulated,  # type: ignore[arg-type]
                SimpleNamespace(slots=1024, vocab_size=8),  # type: ignore[arg-type]
                self.version,
            )
            for simulated in self.simulated
        ]
        self.journal = Journal(store, "toy", Ledger(folder / LEDGER), max_bytes)
        self.prompts = Prompts()
        rewards = rewards_of(graders or Graders(), retries=1)
        self.generation = generation_without_agents(
            self.replicas,
            rewards,
            model="",
            max_attempts=50,
            sample_timeout_s=60.0,
            timeout_s=5.0,
        )

    async def start(self, checkpoint: Checkpoint | None = None) -> tuple[InFlight, ...]:
        restored = await self.journal.restore(checkpoint)
        if restored.cursor:
            self.prompts.load(Cursor.parse(restored.cursor))
        self.version = Version(restored.lineage, checkpoint.version.number if checkpoint else 0)
        await self.publish(self.version)
        return restored.groups

    def source(
        self,
        max_staleness: int,
        steps: int,
        *,
        greedy_baseline: bool = False,
        filter: str = "scores_differ",
        max_refill: int = 10,
    ) -> GenerateSource:
        return GenerateSource(
            self.prompts,  # type: ignore[arg-type]
            self.generation,
            self.journal,
            sampling=Sampling(8),
            prompts_per_step=10,
            samples_per_prompt=8,
            greedy_baseline=greedy_baseline,
            max_staleness=max_staleness,
            weighs_turns=False,
            cuts_sessions=False,
            steps=steps,
            max_dropped_share=0.5,
            dynamic_sampling=DynamicSampling(FilterConfig(name=filter, max_refill=max_refill), 10),
        )

    async def checkpoint(self, step: int) -> Checkpoint:
        path = self.folder / f"journal-{step}.bin"
        await (await self.journal.snapshot(step)).write(path)
        return Checkpoint(step, self.version, path)

    def _restart(self) -> None:
        """Dead replicas come back with the current version after a while."""
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, lambda: self.restarts.append(loop.create_task(self.publish(self.version))))

    async def publish(self, version: Version) -> None:
        """Every replica holds the version from now on; dead ones are back."""
        for simulated, replica in zip(self.simulated, self.routed, strict=True):
            simulated.version = replica.version = replica.latest = version
            await self.replicas.route(replica)


def of_baseline(group: Group) -> list[Trajectory]:
    return [] if group.baseline is None else [group.baseline]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    with run_embedded_server(tmp_path) as server:
        store = Store(server.url, "toy")
        await store.take_epoch()
        yield store
        await store.close()


@pytest.mark.parametrize(
    ("max_staleness", "death_rate", "greedy_baseline"), [(0, 0.0, False), (2, 0.002, False), (2, 0.002, True)]
)
async def test_no_consumed_token_is_older_than_the_bound(
    store: Store, tmp_path: Path, max_staleness: int, death_rate: float, greedy_baseline: bool
) -> None:
    flow = Dataflow(store, tmp_path, death_rate=death_rate)
    await flow.start()
    steps = 125  # x 10 prompts x 8 samples = 10,000
    source = flow.source(max_staleness, steps, greedy_baseline=greedy_baseline)
    running = asyncio.create_task(flow.generation.run())
    ages: list[int] = []
    consumed: Counter[SampleId] = Counter()
    await source.on_published(flow.version)
    for step in range(1, steps + 1):
        groups = await asyncio.wait_for(source.take(step, 10, flow.version), 20)
        for group in groups:
            assert [s.id.index for s in group.samples] == list(range(8))
            assert [s.id.index for s in of_baseline(group)] == ([8] if greedy_baseline else [])
            samples = [*group.samples, *of_baseline(group)]
            ages += [sample.staleness(flow.version) for sample in samples]
            consumed.update(sample.id for sample in samples)
        await asyncio.sleep(0.004)  # the update
        flow.version = Version(flow.version.lineage, step)
        await flow.publish(flow.version)
        await source.on_published(flow.version)
    running.cancel()
    assert len(consumed) == (11_250 if greedy_baseline else 10_000)
    assert set(consumed.values()) == {1}
    assert len({(id, attempt) for id, attempt, _ in flow.asked}) == len(flow.asked)  # each attempt once
    assert all((id.index == 8) == (temperature == 0) for id, _, temperature in flow.asked)
    assert max(ages) == max_staleness  # never more, and the bound was reached
    assert min(ages) == 0


def lost_in(source: GenerateSource) -> tuple[float, float]:
    """The step's dropped and retried samples."""
    metrics = source.take_metrics()
    return metrics["rollout/num_dropped"], metrics["rollout/num_retried"]


async def test_a_group_that_cannot_be_graded_is_dropped_whole_and_replaced(
    store: Store, tmp_path: Path
) -> None:
    flow = Dataflow(store, tmp_path, graders=Graders(broken={3, 4}))
    await flow.start()
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    groups = await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()
    assert [group.prompt.id.prompt for group in groups] == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]
    assert source.drops == {"reward toy": 2}
    assert lost_in(source) == (2 * 8, 0)
    assert lost_in(source) == (0, 0)  # of the next step


async def test_too_many_dropped_groups_stop_the_run_with_the_cause(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path, graders=Graders(broken=range(1000)))
    await flow.start()
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    with pytest.raises(
        AtollError, match=r"coordinator.max_dropped_share = 0.5.*reward toy: ZeroDivisionError"
    ):
        await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()


async def test_a_group_without_contrast_is_filtered_and_replaced(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path, graders=Graders(flat={0}))
    await flow.start()
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    groups = await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()
    assert [group.prompt.id.prompt for group in groups] == list(range(1, 11))
    assert source.drops == {"filtered": 1}


async def test_without_a_replica_the_run_ends_with_the_reason(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path)
    flow.generation = generation_without_agents(
        flow.replicas,
        rewards_of(Graders(), retries=1),
        model="",
        max_attempts=2,
        sample_timeout_s=60.0,
        timeout_s=0.1,
    )
    flow.version = Version((await flow.journal.restore(None)).lineage, 0)
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(running, 5)
    assert "0 of 1 rollout replicas are ready after 0.1 s" in str(failure.value.exceptions[0])


async def test_a_journal_that_does_not_take_a_sample_ends_the_run(store: Store, tmp_path: Path) -> None:
    """The sample would never be graded, and its replica is not to blame."""
    flow = Dataflow(store, tmp_path)
    await flow.start()
    source = flow.source(max_staleness=0, steps=1)

    async def refuse(samples: Sequence[Trajectory], payload: bytes) -> list[Trajectory]:
        raise StoreError("the store is away")

    flow.journal.finish = refuse  # type: ignore[method-assign]
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(running, 20)
    assert isinstance(failure.value.exceptions[0], StoreError)
    assert {replica.state for replica in flow.routed} == {ReplicaState.ROUTED}


async def test_a_group_that_is_dropped_while_its_retry_is_noted_is_not_sent_again(
    store: Store, tmp_path: Path
) -> None:
    flow = Dataflow(store, tmp_path, death_rate=1.0)
    generation, completed = flow.generation, asyncio.Event()

    class Sink:
        async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None: ...

        async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None:
            generation.cancel(group_id(0), "test")  # as where another sample of it cannot be graded
            for simulated in flow.simulated:
                simulated.death_rate = 0.0
            await flow.publish(flow.version)
            generation.submit([pending(1, 2)], self)

        async def on_completed(self, group: PendingGroup) -> None:
            completed.set()

        async def on_dropped(self, group: PendingGroup, reason: str) -> None: ...

    await flow.publish(flow.version)
    running = asyncio.create_task(generation.run())
    generation.submit([pending(0, 2)], Sink())
    await asyncio.wait_for(completed.wait(), 20)
    running.cancel()
    assert [(id.group.prompt, id.index, attempt) for id, attempt, _ in flow.asked] == [
        *((0, 0, 0), (0, 1, 0)),
        *((1, 0, 0), (1, 1, 0)),
    ]


async def test_refill_goes_up_to_the_bound_for_each_batch(store: Store, tmp_path: Path) -> None:
    """2 batches of 10 are left out before the first batch, and again before the second."""
    flow = Dataflow(store, tmp_path, graders=Graders(flat={*range(20), *range(30, 50)}))
    await flow.start()
    source = flow.source(max_staleness=0, steps=2, max_refill=2)
    running = asyncio.create_task(flow.generation.run())
    for step, first in ((1, 20), (2, 50)):
        await source.on_published(flow.version)
        groups = await asyncio.wait_for(source.take(step, 10, flow.version), 20)
        assert [group.prompt.id.prompt for group in groups] == list(range(first, first + 10))
        assert source.take_metrics() == {
            "dynamic_sampling/num_filtered": 20,
            "dynamic_sampling/kept_fraction": pytest.approx(10 / 30),
            "rollout/num_dropped": 0,
            "rollout/num_retried": 0,
        }
    running.cancel()


async def test_one_group_beyond_the_refill_bound_ends_the_run(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path, graders=Graders(flat=range(21)))
    await flow.start()
    source = flow.source(max_staleness=0, steps=1, max_refill=2)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    with pytest.raises(
        AtollError, match=r"'scores_differ' left out 21 of the \d+ groups .*max_refill = 2 batches of 10"
    ):
        await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()


async def test_a_users_filter_that_fails_ends_the_run_with_its_cause(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def keep(group):\n    return group.samples[9].score > 0\n")
    flow = Dataflow(store, tmp_path)
    await flow.start()
    source = flow.source(max_staleness=0, steps=1, filter=f"{tmp_path}/mine.py:keep")
    await source.on_published(flow.version)
    with pytest.raises(ExceptionGroup) as failure:
        await asyncio.wait_for(flow.generation.run(), 20)
    assert "mine.py:keep' failed on group toy/0/" in str(failure.value.exceptions[0])
    assert "IndexError: tuple index out of range; fix" in str(failure.value.exceptions[0])


async def test_the_greedy_sample_becomes_the_baseline(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path)
    await flow.start()
    source = flow.source(max_staleness=0, steps=1, greedy_baseline=True)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    groups = await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()
    ids = [sample_id(prompt, index) for prompt in range(10) for index in range(9)]
    assert sorted(flow.asked) == [(id, 0, 0.0 if id.index == 8 else 1.0) for id in ids]
    for group in groups:
        assert [sample.score for sample in group.samples] == [0.0, 1.0] * 4
        assert [(sample.id.index, sample.score) for sample in of_baseline(group)] == [(8, GREEDY_SCORE)]
        # the whole group was on one replica
        assert len({s.turns[0].origin.replica for s in (*group.samples, *of_baseline(group))}) == 1
    names = await store.read("ZRANGE", "journal/consumed", 0, -1)
    assert sorted(names) == sorted(f"0/{id.group.prompt}/{id.index}".encode() for id in ids)


async def test_a_restart_in_mid_group_keeps_what_is_there_of_samples_and_baseline(
    store: Store, tmp_path: Path
) -> None:
    """Killed while even prompts lack their baseline and odd ones everything but that."""

    def hangs(id: SampleId) -> bool:
        return (id.index == 8) == (id.group.prompt % 2 == 0)

    killed = Dataflow(store, tmp_path)
    await killed.start()
    for replica in killed.simulated:
        replica.hangs = hangs
    running = asyncio.create_task(killed.generation.run())
    await killed.source(max_staleness=0, steps=1, greedy_baseline=True).on_published(killed.version)
    async with asyncio.timeout(20):
        while await store.read("HLEN", "journal/finished") < 5 * 8 + 5 * 1:
            pass
    running.cancel()

    flow = Dataflow(store, tmp_path)
    restored = await flow.start(await killed.checkpoint(0))
    source = flow.source(max_staleness=0, steps=1, greedy_baseline=True)
    source.restore(restored, flow.version)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    groups = await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()
    ids = [sample_id(prompt, index) for prompt in range(10) for index in range(9)]
    assert sorted(flow.asked) == [(id, 1, 0.0 if id.index == 8 else 1.0) for id in ids if hangs(id)]
    assert len(groups) == 10
    for group in groups:
        assert [sample.score for sample in group.samples] == [0.0, 1.0] * 4
        assert [sample.score for sample in of_baseline(group)] == [GREEDY_SCORE]
        for sample in (*group.samples, *of_baseline(group)):
            assert sample.attempt == hangs(sample.id)


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_two_restarts_train_on_every_prompt_once(
    store: Store, tmp_path: Path, max_staleness: int
) -> None:
    """Each life ends beyond its last checkpoint; the second lies within the first life."""
    num_steps = 9
    path: dict[int, list[int]] = {}  # step -> prompts, on the path that led to the current version
    checkpoint: Checkpoint | None = None
    for first, saved, last in ((1, 2, 6), (3, 4, 5), (5, 0, num_steps)):
        await store.take_epoch()
        flow = Dataflow(store, tmp_path)
        restored = await flow.start(checkpoint)
        source = flow.source(max_staleness, num_steps - first + 1)
        source.restore(restored, flow.version)
        running = asyncio.create_task(flow.generation.run())
        await source.on_published(flow.version)
        for step in range(first, last + 1):
            taken = await asyncio.wait_for(source.take(step, 10, flow.version), 20)
            path[step] = [group.prompt.id.prompt for group in taken]
            flow.version = Version(flow.version.lineage, step)
            await flow.publish(flow.version)
            await source.on_published(flow.version)
            if step == saved:
                checkpoint = await flow.checkpoint(step)
                await flow.journal.commit(step)
        running.cancel()
    assert sorted(prompt for prompts in path.values() for prompt in prompts) == list(range(90))
    report = audit(tmp_path)
    assert (report.wrong, report.unknown) == ((), ())
    assert report.fates == {
        f"0/{prompt}/{index}": SampleFate("trained", step)
        for step, prompts in path.items()
        for prompt in prompts
        for index in range(8)
    }


async def test_a_full_store_admits_only_what_the_next_step_needs(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path, max_bytes=1)
    await flow.start()
    source = flow.source(max_staleness=2, steps=9)
    running = asyncio.create_task(flow.generation.run())
    drawn = []
    await source.on_published(flow.version)
    for step in range(1, 7):
        await asyncio.wait_for(source.take(step, 10, flow.version), 20)
        if step == 5:
            await flow.journal.commit(step)  # a checkpoint frees the store
        flow.version = Version(flow.version.lineage, step)
        await flow.publish(flow.version)
        await source.on_published(flow.version)
        drawn.append(flow.prompts.cursor.drawn[0])
    running.cancel()
    # three batches at first; two, one and none are left when one more is admitted
    assert drawn == [30, 30, 40, 50, 80, 80]


async def test_a_sample_that_the_journal_refuses_is_generated_again(store: Store, tmp_path: Path) -> None:
    """Its group may not keep it: the batch would have what the journal lacks."""
    flow = Dataflow(store, tmp_path)
    await flow.start()
    finish, refused = flow.journal.finish, list[SampleId]()

    async def refuse_the_first(samples: Sequence[Trajectory], payload: bytes) -> list[Trajectory]:
        if refused:
            return await finish(samples, payload)
        refused.append(samples[0].id)
        return await finish(samples[1:], payload) if samples[1:] else []

    flow.journal.finish = refuse_the_first  # type: ignore[method-assign]
    source = flow.source(max_staleness=0, steps=1)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(flow.version)
    taken = await asyncio.wait_for(source.take(1, 10, flow.version), 20)
    running.cancel()
    attempts = {sample.id: sample.attempt for group in taken for sample in group.samples}
    assert [id for id, attempt in attempts.items() if attempt] == refused


async def test_a_stop_in_the_midst_of_consuming_a_batch_loses_none_of_it(
    store: Store, tmp_path: Path
) -> None:
    """The last checkpoint is made while the answer to `consume` is on its way; the store is lost then."""
    stopped, control = Dataflow(store, tmp_path), RunControl(trains=True)
    await stopped.start()
    source, consume = stopped.source(max_staleness=0, steps=1), stopped.journal.consume

    async def consume_and_stop(step: int, samples: Sequence[SampleId]) -> None:
        await consume(step, samples)
        await control.stop()
        await asyncio.Event().wait()

    stopped.journal.consume = consume_and_stop  # type: ignore[method-assign]
    running = asyncio.create_task(stopped.generation.run())
    await source.on_published(stopped.version)
    assert await asyncio.wait_for(control.run_unless_stopped(source.take(1, 10, stopped.version)), 20) is None
    running.cancel()
    checkpoint = await stopped.checkpoint(0)

    await store.write(Script("redis.call('DEL', unpack(KEYS))"), scripts.TABLES)
    flow = Dataflow(store, tmp_path)
    restored = await flow.journal.load(await flow.start(checkpoint))
    assert [group.id.prompt for group in restored] == list(range(10))
    assert all(sample is not None for group in restored for sample in group.samples)


async def test_a_stale_baseline_is_generated_again_alone(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path)
    await flow.start()
    current = Version(flow.version.lineage, 1)
    ids = [sample_id(prompt, index) for prompt in range(10) for index in range(9)]
    samples = [made(id, 0, "2", "rollout-0", flow.version if id.index == 8 else current) for id in ids]
    await flow.journal.issue(ids, "{}")
    await flow.journal.finish(samples, encode_payload(samples))
    await flow.publish(current)
    source = flow.source(max_staleness=0, steps=1, greedy_baseline=True)
    source.restore([InFlight(group_id(prompt), 9) for prompt in range(10)], current)
    running = asyncio.create_task(flow.generation.run())
    await source.on_published(current)
    taken = await asyncio.wait_for(source.take(1, 10, current), 20)
    running.cancel()
    assert sorted(flow.asked) == [(id, 1, 0.0) for id in ids if id.index == 8]
    assert source.drops == {"stale": 10}
    assert lost_in(source) == (0, 10)
    for group in taken:
        assert {sample.attempt for sample in group.samples} == {0}
        assert [(s.attempt, s.score, s.versions()) for s in of_baseline(group)] == [
            (1, GREEDY_SCORE, {current})
        ]


async def test_restored_groups_of_several_steps_keep_their_order(store: Store, tmp_path: Path) -> None:
    """As after a checkpoint some steps older than the journal: each step trains on what it trained on."""
    flow = Dataflow(store, tmp_path)
    await flow.start()
    groups = [InFlight(group_id(prompt), 8) for prompt in range(20)]
    await flow.journal.issue([SampleId(group.id, index) for group in groups for index in range(8)], "{}")
    source = flow.source(max_staleness=0, steps=2)
    source.restore(groups, flow.version)
    running = asyncio.create_task(flow.generation.run())
    for step, prompts in ((1, range(10)), (2, range(10, 20))):
        await source.on_published(flow.version)
        taken = await asyncio.wait_for(source.take(step, 10, flow.version), 20)
        assert [group.prompt.id.prompt for group in taken] == list(prompts)
        assert {id.group.prompt for id, _, _ in flow.asked} == set(range(prompts.stop))
    running.cancel()


async def test_a_restart_with_another_group_size_is_refused(store: Store, tmp_path: Path) -> None:
    flow = Dataflow(store, tmp_path)
    await flow.start()
    group = InFlight(group_id(3), 8)
    source = flow.source(max_staleness=0, steps=1, greedy_baseline=True)
    with pytest.raises(UserError, match="toy/0/3 was in flight with 8 samples, the config asks for 9"):
        source.restore([group], flow.version)
