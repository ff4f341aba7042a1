"""WeightSync over real publishers and refits, called in this process instead of over gRPC."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from services.coordinator.replicas import Replica, Replicas
from services.coordinator.sync import WeightSync
from services.rollout.refit import Refit
from services.runtime.clients import Caller, RolloutInfo, TrainerInfo
from services.runtime.errors import AtollError, ServiceUnavailableError, UserError, WeightPushError
from services.trainer import publish
from services.wire.types import Plan, Published, ServiceEntry, StreamManifest, Version
from tests.unit.weight_layouts import Shard, catalogs, random_model, shards

V1, V2, V3, V4 = (Version("a3f0", number) for number in range(1, 5))


class Trainer:
    def __init__(self) -> None:
        self.shards = shards(2)
        self.publishers = [publish.Publisher(rank, shard.buffers) for rank, shard in enumerate(self.shards)]
        self.calls: list[tuple[Version, int, int]] = []  # version, part, plans sent
        self.error: AtollError | None = None

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        model = random_model(seed)
        for shard in self.shards:
            shard.fill(model)
        return model

    async def info(self) -> TrainerInfo:
        return TrainerInfo("", 2, 2, 1, 0, 0, "", tuple(catalogs(self.shards)), ("actor",))

    async def publish_weights(
        self, version: Version, dtype: str, plan_ids: Sequence[str], new_plans: Sequence[Plan], part: int
    ) -> Published:
        self.calls.append((version, part, len(new_plans)))
        if self.error:
            raise self.error
        return publish.merged([p.publish(version, dtype, plan_ids, new_plans, part) for p in self.publishers])


class Engine:
    """A replica's client and the replica behind it."""

    def __init__(self, gap: int = 0) -> None:
        self.shard = shards(1, gap=gap)[0]
        self.refit = Refit(self.shard.buffers, Version("", 0))
        self.calls: list[str] = []
        self.plans = 0
        self.finishes: list[bool] = []
        self.fails: dict[str, AtollError] = {}

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    async def receive_weights(
        self, version: Version, streams: Sequence[StreamManifest], plan: Plan | None
    ) -> int:
        self._called("receive")
        self.plans += plan is not None
        return self.refit.receive(version, streams, plan)

    async def commit_weights(self, version: Version, *, finish_running: bool) -> float:
        self._called("commit")
        self.finishes.append(finish_running)
        self.refit.commit(version)
        return 0.25

    async def rollback_weights(self, version: Version) -> None:
        self._called("rollback")
        self.refit.rollback(version)

    def model(self) -> dict[str, torch.Tensor]:
        model = {name: torch.full_like(tensor, torch.nan) for name, tensor in random_model(0).items()}
        Shard(self.shard.catalog, self.refit.commit(self.refit.version)).read_into(model)
        return model


class Run:
    def __init__(self, *, finish_running: bool = False) -> None:
        self.trainer = Trainer()
        self.replicas = Replicas(Caller(), 1.0)
        self.sync = WeightSync(lambda: self.trainer, self.replicas, "float32", finish_running=finish_running)

    async def join(self, name: str, engine: Engine | None = None) -> tuple[Replica, Engine]:
        engine = engine or Engine()
        version = engine.refit.version
        info = RolloutInfo(name, name, version, 0, 0, 0, "float32", engine.shard.catalog, 0, 0, 0)
        replica = Replica(ServiceEntry("rollout", name, f"{name}-1", ""), engine, info, version)
        await self.sync.catch_up(replica)
        return replica, engine

    def routed(self) -> set[str]:
        return {replica.entry.name for replica in self.replicas}


def assert_holds(engine: Engine, model: dict[str, torch.Tensor], version: Version) -> None:
    assert engine.refit.version == version
    got = engine.model()
    for name, tensor in model.items():
        torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=name)


async def test_all_replicas_hold_the_version_and_are_routed():
    run = Run()
    (one, engine_1), (_, engine_2) = await run.join("one"), await run.join("two", Engine(gap=4))
    assert run.routed() == set()  # nobody has the trainer's weights yet
    model = run.trainer.train(1)
    report = await run.sync.push(V1)
    assert run.routed() == {"one", "two"}
    assert_holds(engine_1, model, V1)
    assert_holds(engine_2, model, V1)
    assert one.version == V1
    bytes_of_two_classes = 2 * 4 * sum(tensor.numel() for tensor in model.values())
    assert (report.num_bytes, report.stall_s, report.failed) == (bytes_of_two_classes, 0.25, {})

    model = run.trainer.train(2)
    await run.sync.push(V2)
    assert_holds(engine_1, model, V2)
    assert run.trainer.calls == [(V1, 0, 2), (V2, 0, 0)]  # a plan is sent once
    assert engine_1.plans == 1
    assert (await run.sync.push(V3)).num_bytes == 0  # nothing changed
    assert_holds(engine_2, model, V3)


async def test_the_trainer_writes_ahead_while_replicas_receive(monkeypatch):
    monkeypatch.setattr(publish, "PART_BYTES", 512)
    run = Run()
    _, engine = await run.join("one")
    model = run.trainer.train(1)
    seen: list[int] = []  # parts asked of the trainer when each receive began
    receive = engine.receive_weights

    async def slow(version: Version, streams: Sequence[StreamManifest], plan: Plan | None) -> int:
        for _ in range(3):  # lets the trainer's task run
            await asyncio.sleep(0)
        seen.append(len(run.trainer.calls))
        return await receive(version, streams, plan)

    engine.receive_weights = slow
    await run.sync.push(V1)
    parts = len(seen)
    assert parts > 2
    assert seen == [*range(2, parts + 1), parts]
    assert_holds(engine, model, V1)


async def test_late_joiner_costs_the_trainer_nothing():
    run = Run()
    await run.join("one")
    model = run.trainer.train(1)
    await run.sync.push(V1)
    calls = list(run.trainer.calls)
    run.trainer.train(2)  # goes on training
    _, late = await run.join("late")
    assert_holds(late, model, V1)
    assert run.routed() == {"one", "late"}
    assert run.trainer.calls == calls


async def test_who_joins_during_a_push_has_the_version_when_it_ends():
    run = Run()
    _, engine = await run.join("one")
    model = run.trainer.train(1)
    await run.sync.push(V1)
    receive, late = engine.receive_weights, Engine()

    async def join_meanwhile(version: Version, streams: Sequence[StreamManifest], plan: Plan | None) -> int:
        await asyncio.wait_for(run.join("late", late), 5)  # does not wait for the push
        assert run.routed() == {"one"}
        return await receive(version, streams, plan)

    engine.receive_weights = join_meanwhile
    model = run.trainer.train(2)
    await run.sync.push(V2)
    assert run.routed() == {"one", "late"}
    assert_holds(late, model, V2)


@pytest.mark.parametrize("when", ["receive", "commit"])
async def test_joiner_that_fails_is_not_routed(when):
    run = Run()
    await run.join("one")
    run.trainer.train(1)
    await run.sync.push(V1)
    ill = Engine()
    ill.fails[when] = WeightPushError("a slice is wrong")
    with pytest.raises(WeightPushError, match="a slice is wrong"):
        await run.join("ill", ill)
    assert run.routed() == {"one"}
    assert run.replicas.waiting == frozenset()


@pytest.mark.parametrize("when", ["receive", "commit"])
async def test_failed_replica_is_synchronised_before_it_gets_traffic(when):
    run = Run()
    (_, well), (_, ill) = await run.join("well"), await run.join("ill")
    old = run.trainer.train(1)
    await run.sync.push(V1)
    model = run.trainer.train(2)
    ill.fails[when] = WeightPushError("a slice is wrong")
    report = await run.sync.push(V2)
    assert report.failed == {"ill": "a slice is wrong"}
    assert run.routed() == {"well"}
    assert_holds(well, model, V2)
    assert_holds(ill, old, V1)
    ill.fails.clear()
    model = run.trainer.train(3)
    await run.sync.push(V3)
    assert run.routed() == {"well", "ill"}
    assert_holds(ill, model, V3)


async def test_dead_replica_costs_one_push():
    run = Run()
    await run.join("well")
    _, dead = await run.join("dead")
    run.trainer.train(1)
    await run.sync.push(V1)
    dead.fails["receive"] = ServiceUnavailableError("no answer")
    run.trainer.train(2)
    assert set((await run.sync.push(V2)).failed) == {"dead"}
    assert set((await run.sync.push(V3)).failed) == {"dead"}  # tried once more
    assert (await run.sync.push(V4)).failed == {}
    assert run.routed() == {"well"}


async def test_trainer_fails_and_nothing_is_committed():
    run = Run()
    _, engine = await run.join("one")
    old = run.trainer.train(1)
    await run.sync.push(V1)
    run.trainer.error = ServiceUnavailableError("the trainer is gone")
    with pytest.raises(ServiceUnavailableError, match="the trainer is gone"):
        await run.sync.push(V2)
    assert engine.calls[-1] == "rollback"
    assert_holds(engine, old, V1)
    run.trainer = Trainer()  # a new process: it has to be sent the plan again
    model = run.trainer.train(2)
    await run.sync.push(V2)
    assert_holds(engine, model, V2)


@pytest.mark.parametrize("finish_running", [False, True])
async def test_running_sequences_may_finish_first(finish_running):
    run = Run(finish_running=finish_running)
    _, engine = await run.join("one")
    await run.sync.push(V1)
    assert engine.finishes == [finish_running]


async def test_another_model_is_the_users_error():
    run = Run()
    engine = Engine()
    engine.shard.catalog.boxes["rows"][0] += 1
    await run.join("one", engine)
    with pytest.raises(UserError, match=r"one and the trainer do not fit: 'embed' is \[40, 12\].*\[41, 12\]"):
        await run.sync.push(V1)
