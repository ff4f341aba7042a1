"""Replicas that join, die, stall and are slow, on a virtual clock: who gets what, and nothing is lost."""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from atoll.coordinator.fleet.health import HealthWatch
from atoll.coordinator.fleet.replicas import Replica, Replicas, ReplicaState
from atoll.coordinator.fleet.routing import AHEAD_S
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.weight_sync.delivery import Delivery
from atoll.coordinator.weight_sync.epochs import Epochs
from atoll.coordinator.weight_sync.turns import DeviceTurns
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import ServiceUnavailableError, UserError, WeightPushError
from atoll.wire.types import (
    Graded,
    GroupId,
    SampleId,
    Sampling,
    ScoreItem,
    ServiceEntry,
    Trajectory,
    TurnRequest,
    Version,
)
from tests import virtual_clock
from tests.builders import arrival, generation_without_agents, node, pending, sample
from tests.fake_rewards import rewards_of
from tests.virtual_clock import VirtualClock

SPEED = 50.0  # tokens per second of a sample in a slot
LENGTHS = (20, 200)  # tokens of a response
GROUP = 4
V1, V2 = Version("run", 1), Version("run", 2)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(eq=False)
class SimulatedReplica:
    """Decodes `slots` samples at once and the others after them."""

    name: str
    slots: int = 8
    speed: float = SPEED
    version: Version = V1
    logprob: float = -1.0
    seen_as: Replica | None = None
    in_hand: int = 0
    peak: int = 0
    probes: int = 0
    asked: list[tuple[float, SampleId]] = field(default_factory=list)
    streams: set[asyncio.Queue[Trajectory | None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.slots)
        self.goes_on = asyncio.Event()  # else it stalls
        self.goes_on.set()
        self.is_dead = False

    def die(self) -> None:
        self.is_dead = True
        for stream in self.streams:
            stream.put_nowait(None)

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        stream: asyncio.Queue[Trajectory | None] = asyncio.Queue()
        ids = [id.sample for request in requests for id in request.ids]
        samples = [id for id in ids if not id.group.run.startswith("probe")]
        assert not samples or (self.seen_as and self.seen_as.state is ReplicaState.ROUTED)
        self.probes += len(ids) - len(samples)
        self.asked += [(now(), id) for id in samples]
        self.in_hand += len(samples)
        self.peak = max(self.peak, self.in_hand)
        longest = requests[0].sampling.max_new_tokens
        attempts = [id.attempt for request in requests for id in request.ids]
        tasks = [
            asyncio.create_task(self._decode(id, attempt, longest, stream))
            for id, attempt in zip(ids, attempts, strict=True)
        ]
        self.streams.add(stream)
        try:
            for done in range(1, len(ids) + 1):
                arrived = None if self.is_dead else await stream.get()
                if arrived is None:
                    raise ServiceUnavailableError(f"{self.name} was killed")
                self.in_hand -= len(samples) > 0
                yield arrival(arrived)
                del samples[len(ids) - done :]
        finally:
            self.streams.discard(stream)
            self.in_hand -= len(samples)
            for task in tasks:
                task.cancel()

    async def _decode(
        self, id: SampleId, attempt: int, longest: int, stream: asyncio.Queue[Trajectory | None]
    ) -> None:
        length = min(random.Random(str(id)).randint(*LENGTHS), longest)
        async with self._slots:
            await asyncio.sleep(length / self.speed)
            await self.goes_on.wait()
        tokens = node([0] * length, logprobs=self.logprob, versions=self.version)
        stream.put_nowait(sample(id, tokens, replica=self.name, attempt=attempt))

    async def abort(self, id_prefix: str) -> int:
        return 0


class Graders:
    async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Graded], None]:
        yield [Graded(item.id, 1.0, {}) for item in items]


class Collector:
    def __init__(self, num_groups: int) -> None:
        self.finished_samples: Counter[SampleId] = Counter()
        self.groups: Counter[GroupId] = Counter()
        self.done = asyncio.Event()
        self._num_groups = num_groups

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        await asyncio.sleep(0.001)  # the journal
        self.finished_samples.update(sample.id for sample in samples)

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None:
        await asyncio.sleep(0.001)

    async def on_completed(self, group: PendingGroup) -> None:
        self.groups[group.prompt.id] += 1
        if len(self.groups) == self._num_groups:
            self.done.set()

    async def on_dropped(self, group: PendingGroup, reason: str) -> None:
        raise AssertionError(f"{group.prompt.id} is dropped: {reason}")


class Run:
    """Generation over simulated replicas; `admit` routes unless a test says otherwise."""

    def __init__(self, admit: Callable[[Replica], Awaitable[None]] | None = None) -> None:
        self.replicas = Replicas(Caller(), 1000.0)
        weights = SimpleNamespace(
            catch_up=admit or self.replicas.route, may_generate=AsyncMock(return_value=True)
        )
        self.health = HealthWatch(self.replicas, "actor", weights, listener=self)
        self.generation = generation_without_agents(
            self.replicas,
            rewards_of(Graders()),
            model="actor",
            max_attempts=1000,
            sample_timeout_s=10_000.0,
            timeout_s=1000.0,
        )
        self.tasks = [asyncio.create_task(self.generation.run())]
        self._incarnations = 0
        self.refusals: list[tuple[str, str]] = []

    async def on_admitted(self, replica: Replica) -> None: ...

    async def on_refused(self, replica: Replica, error: UserError) -> None:
        self.refusals.append((replica.entry.name, str(error)))

    def join(self, simulated: SimulatedReplica) -> Replica:
        self._incarnations += 1
        entry = ServiceEntry("rollout", simulated.name, str(self._incarnations), "")
        info = SimpleNamespace(slots=simulated.slots, vocab_size=8)
        replica = Replica(entry, simulated, info, simulated.version)  # type: ignore[arg-type]
        simulated.seen_as = replica
        self.replicas.suspend(replica, "it just joined")
        self.tasks.append(asyncio.create_task(self.health.watch(replica)))
        return replica

    def submit(self, num_groups: int, *, first: int = 0) -> Collector:
        collector = Collector(num_groups)
        self.generation.submit(
            [pending(number, GROUP, Sampling(LENGTHS[1])) for number in range(first, first + num_groups)],
            collector,
        )
        return collector

    async def finish(self, collector: Collector, within_s: float = 3000.0) -> None:
        async with asyncio.timeout(within_s):
            await collector.done.wait()
        assert set(collector.groups.values()) == {1}
        assert len(collector.finished_samples) == GROUP * len(collector.groups)
        assert set(collector.finished_samples.values()) == {1}
        await self.stop()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError | None) for result in results), results

    def check_nobody_idles(self) -> None:
        """No routed replica has a free slot while work waits."""
        if self.generation._dispatch._waiting:
            free = [replica.entry.name for replica in self.replicas if replica.load.has_room]
            assert not free, (
                f"at {now():.3f} s {len(self.generation._dispatch._waiting)} groups wait for {free}"
            )


async def chaos(seed: int) -> None:
    """Every replica is slow or fast, stalls, dies, and comes back as another incarnation, at random."""
    dice, run = random.Random(seed), Run()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClock)
    loop.before_time_passes(run.check_nobody_idles)
    everyone: list[tuple[SimulatedReplica, Replica]] = []

    async def live(name: str) -> None:
        while True:
            await asyncio.sleep(dice.uniform(0, 30))
            simulated = SimulatedReplica(name, dice.choice([4, 8, 16]), SPEED * dice.choice([0.1, 1, 1]))
            replica = run.join(simulated)
            everyone.append((simulated, replica))
            for _ in range(dice.randint(0, 2)):
                await asyncio.sleep(dice.uniform(5, 60))
                simulated.goes_on.clear()
                await asyncio.sleep(dice.choice([1, 20, 200]))
                simulated.goes_on.set()
            await asyncio.sleep(dice.uniform(5, 60))
            simulated.die()
            await asyncio.sleep(dice.uniform(0, 20))  # until its lease ends
            run.replicas.lose(replica, "its lease ended")

    collector = run.submit(500)
    run.tasks += [asyncio.create_task(live(f"rollout-{number}")) for number in range(5)]
    await run.finish(collector)
    assert len(everyone) > 5
    for simulated, _ in everyone:
        # by its true speed and the shortest responses, and the group that may pass the bound
        ahead = simulated.slots * simulated.speed * AHEAD_S / LENGTHS[0]
        assert simulated.peak <= simulated.slots + ahead + GROUP - 1


@pytest.mark.parametrize("seed", range(4))
def test_every_sample_finishes_once_whatever_befalls_the_replicas(seed: int) -> None:
    """The assertions are in chaos."""
    virtual_clock.run(chaos(seed))


def test_a_late_replica_takes_what_waits_and_a_slow_one_gets_its_share() -> None:
    async def scene() -> None:
        run = Run()
        fast, slow, late = (
            SimulatedReplica("fast"),
            SimulatedReplica("slow", speed=SPEED / 10),
            SimulatedReplica("late"),
        )
        run.join(fast)
        run.join(slow)
        collector = run.submit(400)
        await asyncio.sleep(100)
        before = Counter(len(replica.asked) for replica in (fast, slow))
        assert len(fast.asked) / len(slow.asked) == pytest.approx(10, rel=0.3), before
        run.join(late)
        begun = len(fast.asked)
        await run.finish(collector)
        assert len(late.asked) / (len(fast.asked) - begun) == pytest.approx(1, rel=0.1)
        assert max(fast.peak, slow.peak, late.peak) <= 8 + 8 * SPEED * AHEAD_S / LENGTHS[0] + GROUP - 1

    virtual_clock.run(scene())


def test_a_stalled_replica_gets_nothing_until_a_probe_is_well(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        run = Run()
        well, stalls = SimulatedReplica("well"), SimulatedReplica("stalls")
        run.join(well)
        replica = run.join(stalls)
        collector = run.submit(400)
        await asyncio.sleep(50)
        stalls.goes_on.clear()
        await asyncio.sleep(60)  # 10 to 20 s of silence, then 30 for a probe
        assert (replica.state, replica.why) == (
            ReplicaState.UNHEALTHY,
            "it has not answered a probe within 30 s",
        )
        metrics = run.replicas.take_metrics()
        assert (metrics["rollout/num_routed"], metrics["rollout/num_unhealthy"]) == (1, 1)
        last = max(when for when, _ in stalls.asked)
        assert last < 52  # what it took before it was full
        await asyncio.sleep(100)
        assert max(when for when, _ in stalls.asked) == last
        assert stalls.in_hand == 0
        stalls.goes_on.set()
        begun = now()
        await asyncio.sleep(45)  # the probe that is under way, 5 s to the next, and that
        assert replica.state is ReplicaState.ROUTED
        assert any(when > begun for when, _ in stalls.asked)
        await run.finish(collector)

    caplog.set_level(logging.INFO)
    virtual_clock.run(scene())
    changes = [record.getMessage() for record in caplog.records if "stalls is" in record.getMessage()]
    assert [change.split(":")[0] for change in changes] == [
        "stalls is unhealthy",
        "stalls is routed",
        "stalls is unhealthy",
        "stalls is routed",
    ]


def test_a_long_sample_is_no_stall_and_idle_replicas_are_seldom_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> None:
        run = Run()
        slow = SimulatedReplica("slow", slots=1, speed=1.0)  # 200 s for a sample
        run.join(slow)
        collector = run.submit(1)
        await collector.done.wait()
        slow.speed, probes = SPEED, slow.probes
        assert probes < 10  # of 500 s
        await asyncio.sleep(3600)
        assert slow.probes - probes == pytest.approx(3600 / 60, abs=12)  # it is looked after every 10 s
        assert {id.group.run for _, id in slow.asked} == {"toy"}
        await run.finish(collector)
        assert sum(collector.finished_samples.values()) == GROUP  # a probe is nobody's sample

    caplog.set_level(logging.INFO)
    virtual_clock.run(scene())
    states = [record.getMessage().split(":")[0] for record in caplog.records]
    assert [state for state in states if "slow is" in state] == ["slow is unhealthy", "slow is routed"]


def test_a_probe_without_sense_is_no_sign_of_health() -> None:
    async def scene() -> None:
        run = Run()
        simulated = SimulatedReplica("rollout-0", logprob=float("nan"))
        replica = run.join(simulated)
        await asyncio.sleep(20)
        assert replica.state is ReplicaState.UNHEALTHY
        assert replica.why == "samples: 4 log-probabilities that are not finite"
        simulated.logprob = -1.0
        await asyncio.sleep(20)
        assert replica.state is ReplicaState.ROUTED
        simulated.version = V2  # its engine is another one
        await asyncio.sleep(70)
        assert replica.state is ReplicaState.ROUTED  # it was brought in again
        assert simulated.probes >= 5
        await run.stop()

    virtual_clock.run(scene())


def test_a_replica_that_cannot_take_weights_is_tried_less_and_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one that cannot map the trainer's memory: it generates, and each attempt to catch up fails."""
    reasons = ["no such process"] * 15 + ["no such file"] * 2
    attempts: list[float] = []

    async def scene() -> None:
        async def catch_up(replica: Replica) -> None:
            attempts.append(round(now(), 2))
            run.replicas.hold(replica)
            await asyncio.sleep(0)
            if not reasons:
                return await run.replicas.route(replica)
            error = WeightPushError(reasons.pop(0))
            delivery.drop(replica, error)
            raise error

        run = Run(catch_up)
        delivery = Delivery(
            run.replicas, DeviceTurns(run.replicas, shared=False), Epochs(0), 1.0, finish_running=False
        )
        run.join(SimulatedReplica("rollout-0"))
        await asyncio.sleep(1000)
        await run.stop()

    caplog.set_level(logging.INFO)
    virtual_clock.run(scene())
    pauses = [round(after - before) for before, after in pairwise(attempts)]
    assert pauses == [5, 5, 5, 8, 16, 32, *[60] * 11]
    assert [record.getMessage() for record in caplog.records if "rollout-0" in record.getMessage()] == [
        "rollout-0 is unhealthy: it just joined",
        "rollout-0 is held: it waits for weights",
        "rollout-0 could not take its weights: no such process",
        "rollout-0 could not take its weights: no such file",
        "rollout-0 is routed: it generates with the current weights",
    ]


@pytest.mark.parametrize(
    ("ids", "of", "why"),
    [
        ([], 0, "-1 means no tokens"),
        ([9], 0, "vocab_size = 8"),
        ([1], 7, "answered a probe with probe-"),
    ],
    ids=["no tokens", "tokens beyond the vocabulary", "another sample"],
)
def test_an_answer_that_is_none_to_the_probe_keeps_a_replica_out(ids: list[int], of: int, why: str) -> None:
    class Liar(SimulatedReplica):
        async def generate(
            self, model: str, requests: Sequence[TurnRequest]
        ) -> AsyncGenerator[Arrival, None]:
            yield arrival(sample(SampleId(requests[0].group, of), node(ids, versions=V1)))

    async def scene() -> None:
        run = Run()
        replica = run.join(Liar("liar"))
        await asyncio.sleep(1)
        assert replica.state is ReplicaState.UNHEALTHY
        assert why in replica.why
        assert replica.violations == 1
        await run.stop()

    virtual_clock.run(scene())


def test_a_replica_that_refuses_a_probe_stays_out_and_the_run_continues() -> None:
    """As one that serves another model; it is asked less and less often."""

    class OtherModel(SimulatedReplica):
        async def generate(
            self, model: str, requests: Sequence[TurnRequest]
        ) -> AsyncGenerator[Arrival, None]:
            self.probes += 1
            raise UserError("this replica serves 'critic'")
            yield

    async def scene() -> None:
        run = Run()
        stray = OtherModel("stray")
        replica = run.join(stray)
        run.join(SimulatedReplica("rollout-0"))
        collector = run.submit(40)
        await run.finish(collector)
        assert (replica.state, replica.why) == (ReplicaState.UNHEALTHY, "this replica serves 'critic'")
        assert run.refusals == [("stray", "this replica serves 'critic'")] * stray.probes
        assert stray.probes < 8

    virtual_clock.run(scene())


def test_a_replica_that_is_held_gets_nothing_and_is_not_asked() -> None:
    async def scene() -> None:
        run = Run()
        one, other = SimulatedReplica("one"), SimulatedReplica("other")
        replica = run.join(one)
        run.join(other)
        await asyncio.sleep(10)
        run.replicas.hold(replica)
        probes = one.probes
        collector = run.submit(50)
        await asyncio.sleep(300)
        assert (one.asked, one.probes) == ([], probes)
        await run.finish(collector)

    virtual_clock.run(scene())


def test_where_none_is_well_the_run_ends_with_each_ones_reason() -> None:
    async def scene() -> None:
        run = Run()
        run.join(SimulatedReplica("rollout-0")).client.die()  # type: ignore[attr-defined]
        run.submit(1)
        with pytest.raises(ExceptionGroup) as failure:
            await run.tasks[0]
        text = str(failure.value.exceptions[0])
        assert "0 of 1 rollout replicas are ready after 1000 s" in text
        assert "rollout-0 is unhealthy: rollout-0 was killed" in text
        run.tasks = run.tasks[1:]
        await run.stop()

    virtual_clock.run(scene())
