"""WeightSync over real publishers and refits, called in this process instead of over gRPC."""

import asyncio
import hashlib
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.config.schema import WeightsSection
from atoll.config.transports import TRANSPORTS
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.weight_sync import delivery, plans
from atoll.coordinator.weight_sync.canary import Canary, CanaryError
from atoll.coordinator.weight_sync.sync import WeightSync
from atoll.rollout.refit import Refit
from atoll.runtime.clients.base import Caller
from atoll.runtime.errors import (
    AtollError,
    DivergedError,
    ServiceUnavailableError,
    UserError,
    WeightPushError,
)
from atoll.trainer import publish
from atoll.weights.transport.base import open_receiver, open_sender
from atoll.wire.info import RolloutInfo, TrainerInfo
from atoll.wire.types import (
    Float32,
    Int32,
    Membership,
    PublishedPart,
    PublishRequest,
    PushPart,
    Segments,
    ServiceEntry,
    StreamManifest,
    Version,
)
from tests.unit.weight_layouts import Shard, random_model, shard_layouts, shards

V1, V2, V3, V4 = (Version("a3f0", number) for number in range(1, 5))
DEADLINE_S = 60.0  # of a part: no test but one waits for it


def logprobs(model: Mapping[str, torch.Tensor], token_ids: Int32) -> Float32:
    """What the model "computes": any change of any weight shows."""
    mean = torch.cat([tensor.flatten() for tensor in model.values()]).mean().item()
    return (mean - 0.01 * token_ids).astype(np.float32)


class Trainer:
    def __init__(self, transport: str = "shm", tensor: int = 2) -> None:
        self.shards = shards(tensor)
        sender = partial(open_sender, transport, DEADLINE_S, "127.0.0.1")
        self.publishers = [
            publish.Publisher(
                rank, shard.buffers, sender, stays_readable=TRANSPORTS[transport].stays_readable
            )
            for rank, shard in enumerate(self.shards)
        ]
        self._compute = ThreadPoolExecutor(1)
        self.model: dict[str, torch.Tensor] = {}
        self.calls: list[tuple[Version, int, int]] = []  # version, part, plans sent
        self.epochs: list[Membership] = []
        self.scored = 0
        self.error: AtollError | None = None

    def train(self, seed: int) -> dict[str, torch.Tensor]:
        self.model = random_model(seed)
        for shard in self.shards:
            shard.fill(self.model)
        return self.model

    async def info(self) -> TrainerInfo:
        return TrainerInfo("", 2, 2, 1, 1, 1, 1, 0, 0, "", tuple(shard_layouts(self.shards)), ("actor",))

    async def publish_weights(self, request: PublishRequest) -> PublishedPart:
        self.calls.append((request.version, request.part, len(request.new_plans)))
        self.epochs += request.members.values()
        if self.error:
            raise self.error
        # one after the other, as on a rank's compute thread: also after one that is given up
        return await asyncio.get_running_loop().run_in_executor(
            self._compute,
            lambda: publish.merge_published([p.publish(request) for p in self.publishers]),
        )

    async def compute_logprobs(self, segments: Segments, temperature: float) -> Float32:
        assert temperature == 1
        self.scored += 1
        return logprobs(self.model, segments.token_ids)


class Engine:
    """A replica's client and the replica behind it."""

    def __init__(self, gap: int = 0, transport: str = "shm", *, takes_turns: bool = False) -> None:
        self.shard = shards(1, gap=gap)[0]
        receiver = open_receiver(transport, DEADLINE_S)
        self.refit = Refit(self.shard.buffers, Version("", 0), receiver, takes_turns=takes_turns)
        self.calls: list[str] = []
        self.plans = 0
        self.memberships: list[Membership] = []
        self.finishes: list[bool] = []
        self.fails: dict[str, AtollError] = {}
        self.is_off = 0.0  # by how much what it computes is wrong
        self.aborted: list[str] = []
        self.looks = 0  # at its progress

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise self.fails[name]

    async def receive_weights(self, part: PushPart) -> int:
        self._called("receive")
        self.plans += part.plan is not None
        self.memberships.append(part.membership)
        return await asyncio.to_thread(self.refit.receive, part)

    async def commit_weights(self, version: Version, *, finish_running: bool) -> float:
        self._called("commit")
        self.finishes.append(finish_running)
        self.refit.commit(version)
        return 0.25

    async def progress(self) -> int:
        return 0

    async def rollback_weights(self, version: Version) -> None:
        self._called("rollback")
        self.refit.rollback(version)

    async def score_tokens(self, sequences: Sequence[Int32]) -> list[Float32]:
        self._called("score")
        model = self.model()
        return [logprobs(model, ids)[1:] + np.float32(self.is_off) for ids in sequences]

    async def abort(self, id_prefix: str) -> int:
        self.aborted.append(id_prefix)
        return 0

    def model(self) -> dict[str, torch.Tensor]:
        model = {name: torch.full_like(tensor, torch.nan) for name, tensor in random_model(0).items()}
        Shard(self.shard.shard_layout, self.refit.commit(self.refit.version)).read_into(model)
        return model


class AtOneAddress:
    """A client of whichever process serves the run's trainer at the moment."""

    def __init__(self, run: "Run") -> None:
        self._run = run

    def __getattr__(self, name: str) -> object:
        return getattr(self._run.trainer, name)


class Run:
    def __init__(
        self,
        model_folder: Path = Path("no canary"),
        *,
        transport: str = "shm",
        finish_running: bool = False,
        canary_every: int = 0,
        takes_turns: bool = False,
    ) -> None:
        self.transport = transport
        self.trainer = Trainer(transport)
        self._has_trainer = False
        self.replicas = Replicas(Caller(), 1.0)
        self.sync = WeightSync(
            self.replicas,
            Canary(model_folder, canary_every, tolerance=0.05),
            WeightsSection(transport=transport, deadline_s=DEADLINE_S),
            "float32",
            finish_running=finish_running,
            first_epoch=7 << 32,
            takes_turns=takes_turns,
        )

    async def join(self, name: str, engine: Engine | None = None) -> tuple[Replica, Engine]:
        if not self._has_trainer:
            self._has_trainer = True
            await self.sync.use_trainer(AtOneAddress(self))
        engine = engine or Engine(transport=self.transport)
        version = engine.refit.version
        info = RolloutInfo(
            name, name, version, 0, 512, 0, "float32", (engine.shard.shard_layout,), 0, 0, 0, 0
        )
        replica = Replica(ServiceEntry("rollout", name, f"{name}-1", ""), engine, info, version)
        await self.sync.catch_up(replica)
        return replica, engine

    def routed(self) -> set[str]:
        return {replica.entry.name for replica in self.replicas}

    def held(self) -> set[str]:
        return {replica.entry.name for replica in self.replicas.waiting}


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
    assert (
        report.metrics().items()
        >= {
            "weights/num_bytes": bytes_of_two_classes,
            "weights/stall_s": 0.25,
            "weights/num_replicas": 2,
            "weights/failed": 0,
        }.items()
    )

    model = run.trainer.train(2)
    await run.sync.push(V2)
    assert_holds(engine_2, model, V2)
    assert [plans for _, _, plans in run.trainer.calls] == [2, 0, 0, 0]  # two rounds, of two ranks; sent once
    assert engine_1.plans == 1
    assert (await run.sync.push(V3)).num_bytes == 0  # nothing changed
    assert_holds(engine_2, model, V3)


async def test_members_of_a_class_are_numbered_and_keep_their_epoch():
    run = Run()
    engines = [Engine(), Engine(), Engine(gap=4)]
    for name, engine in zip(("one", "two", "other"), engines, strict=True):
        await run.join(name, engine)
    run.trainer.train(1)
    await run.sync.push(V1)
    await run.sync.push(V2)
    epoch = (7 << 32) + 1
    assert {membership for engine in engines[:2] for membership in engine.memberships} == {
        Membership(epoch, 2, 0),
        Membership(epoch, 2, 1),
    }
    assert set(engines[2].memberships) == {Membership(epoch, 1, 0)}
    assert set(run.trainer.epochs) == {Membership(epoch, 2), Membership(epoch, 1)}
    await run.join("late", engines[0])
    await run.sync.push(V3)
    assert run.trainer.epochs[-1].epoch == epoch + 1  # another member


async def test_the_trainer_writes_ahead_while_replicas_receive():
    run = Run()
    run.trainer = Trainer(tensor=4)  # of which a replica hears one after the other: four parts
    _, engine = await run.join("one")
    model = run.trainer.train(1)
    seen: list[int] = []  # parts asked of the trainer when each receive began
    receive = engine.receive_weights

    async def slow(*arguments: object) -> int:
        for _ in range(3):  # lets the trainer's task run
            await asyncio.sleep(0)
        seen.append(len(run.trainer.calls))
        return await receive(*arguments)

    engine.receive_weights = slow
    await run.sync.push(V1)
    assert seen == [2, 3, 4, 4]
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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_replica_that_comes_back_with_its_weights_gets_no_push(transport):
    """Its lease had ended while it stood still."""
    run = Run(transport=transport)
    (replica, engine), (_, other) = await run.join("one"), await run.join("other")
    model = run.trainer.train(1)
    await run.sync.push(V1)
    trained, pushed = list(run.trainer.calls), list(engine.calls)
    run.replicas.lose(replica, "its lease ended")
    again, _ = await run.join("one", engine)
    assert run.routed() == {"one", "other"}
    assert (run.trainer.calls, engine.calls) == (trained, [*pushed, "commit"])
    assert_holds(engine, model, V1)
    run.replicas.suspend(again, "it generates garbage")
    await run.sync.catch_up(again)
    assert ("receive" in engine.calls[len(pushed) :]) == (transport == "shm")  # tcp waits for the next push
    assert other.calls == pushed


async def test_who_joins_during_a_push_catches_up_at_its_end():
    run = Run()
    _, engine = await run.join("one")
    run.trainer.train(1)
    await run.sync.push(V1)
    receive, late = engine.receive_weights, Engine()

    async def join_meanwhile(*arguments: object) -> int:
        if run.held() == set():
            await asyncio.wait_for(run.join("late", late), 5)  # does not wait for the push
        return await receive(*arguments)

    engine.receive_weights = join_meanwhile
    model = run.trainer.train(2)
    assert (await run.sync.push(V2)).num_replicas == 1
    await run.replicas.wait_for(2, 5)
    assert_holds(late, model, V2)


async def test_a_push_takes_over_who_is_catching_up():
    run = Run()
    await run.join("one")
    run.trainer.train(1)
    await run.sync.push(V1)
    slow, begun = Engine(), asyncio.Event()
    receive = slow.receive_weights

    async def never(*arguments: object) -> int:
        begun.set()
        return await asyncio.Event().wait()

    slow.receive_weights = never
    joining = asyncio.create_task(run.join("slow", slow))
    await asyncio.wait_for(begun.wait(), 5)
    slow.receive_weights = receive
    model = run.trainer.train(2)
    await asyncio.wait_for(run.sync.push(V2), 5)
    await asyncio.wait_for(joining, 5)
    assert run.routed() == {"one", "slow"}
    assert_holds(slow, model, V2)


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
    assert run.held() == set()


@pytest.mark.parametrize("when", ["receive", "commit"])
@pytest.mark.parametrize("error", [WeightPushError("a slice is wrong"), ServiceUnavailableError("no answer")])
async def test_failed_replica_costs_one_push_and_catches_up(when, error):
    run = Run()
    (_, well), (replica, ill) = await run.join("well"), await run.join("ill")
    old = run.trainer.train(1)
    await run.sync.push(V1)
    model = run.trainer.train(2)
    ill.fails[when] = error
    report = await run.sync.push(V2)
    assert report.failed == {"ill": str(error)}
    assert report.metrics()["weights/failed"] == 1
    assert run.routed() == {"well"}
    assert_holds(well, model, V2)
    assert_holds(ill, old, V1)
    assert (await run.sync.push(V3)).failed == {}  # not before it is seen to generate
    calls = list(run.trainer.calls)
    ill.fails.clear()
    await run.sync.catch_up(replica)
    assert run.routed() == {"well", "ill"}
    assert_holds(ill, model, V3)
    assert run.trainer.calls == calls


async def test_a_replica_that_is_alone_may_try_again():
    run = Run()
    _, engine = await run.join("one")
    model = run.trainer.train(1)
    receive, failures = engine.receive_weights, iter([WeightPushError("a slice is wrong")])

    async def once_wrong(*arguments: object) -> int:
        for failure in failures:
            raise failure
        return await receive(*arguments)

    engine.receive_weights = once_wrong
    assert (await run.sync.push(V1)).failed == {}
    assert_holds(engine, model, V1)


async def test_nobody_takes_the_version():
    run = Run()
    _, engine = await run.join("one")
    run.trainer.train(1)
    engine.fails["receive"] = WeightPushError("cannot map the weights")
    with pytest.raises(WeightPushError, match="no replica accepted the weights a3f0:1: one: cannot map the"):
        await run.sync.push(V1)
    assert engine.calls == ["receive"] * 2
    assert run.routed() == set()


async def test_a_replica_that_is_silent_has_the_deadline_of_a_part(monkeypatch):
    monkeypatch.setattr(delivery, "ANSWER_S", 0.1)
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE_S", 1.0)
    run = Run()
    (_, well), (_, silent) = await run.join("well"), await run.join("silent")

    async def never(*arguments: object) -> int:
        return await asyncio.Event().wait()

    silent.receive_weights = never
    model = run.trainer.train(1)
    report = await asyncio.wait_for(run.sync.push(V1), 10)
    assert report.failed.keys() == {"silent"}
    assert "within weights.deadline_s = 1 s" in report.failed["silent"]
    assert_holds(well, model, V1)


@pytest.mark.parametrize("call", ["commit_weights", "score_tokens", "rollback_weights"])
async def test_a_replica_that_hangs_costs_a_push_its_silence_and_no_more(monkeypatch, tiny_qwen2, call):
    """Its process may well send heartbeats."""
    monkeypatch.setattr(delivery, "ANSWER_S", 0.1)
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE_S", 0.4)
    run = Run(tiny_qwen2, canary_every=1)
    (_, well), (_, hangs) = await run.join("well"), await run.join("hangs")

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    setattr(hangs, call, never)
    model = run.trainer.train(1)
    if call == "rollback_weights":
        run.trainer.error = ServiceUnavailableError("gone")
        with pytest.raises(ServiceUnavailableError, match="gone"):
            await asyncio.wait_for(run.sync.push(V1), 30)
        return
    report = await asyncio.wait_for(run.sync.push(V1), 30)
    assert report.failed.keys() == {"hangs"}
    assert "no progress for 0.5 s" in report.failed["hangs"]
    assert_holds(well, model, V1)


async def test_a_commit_may_wait_for_running_sequences_as_long_as_they_get_on(monkeypatch):
    monkeypatch.setattr(delivery, "ANSWER_S", 0.1)
    monkeypatch.setattr(sys.modules[__name__], "DEADLINE_S", 0.3)
    run = Run(finish_running=True)
    _, engine = await run.join("one")
    commit, done = engine.commit_weights, asyncio.Event()

    async def after_the_sequences(version: Version, *, finish_running: bool) -> float:
        await done.wait()
        return await commit(version, finish_running=finish_running)

    async def progress() -> int:
        engine.looks += 1
        if engine.looks == 30:  # three times the longest silence
            done.set()
        return engine.looks

    engine.commit_weights, engine.progress = after_the_sequences, progress
    model = run.trainer.train(1)
    await asyncio.wait_for(run.sync.push(V1), 30)
    assert_holds(engine, model, V1)


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
    run.trainer.train(1)
    await run.sync.push(V1)
    assert engine.finishes == [finish_running]


async def test_another_model_is_the_users_error():
    run = Run()
    engine = Engine()
    engine.shard.shard_layout.boxes["rows"][0] += 1
    await run.join("one", engine)
    with pytest.raises(UserError, match=r"one and the trainer do not fit: 'embed' is \[40, 12\].*\[41, 12\]"):
        await run.sync.push(V1)


async def test_a_replica_with_another_model_stays_out_and_the_push_reaches_the_others():
    run = Run()
    await run.join("one")
    stray = Engine()
    stray.shard.shard_layout.boxes["rows"][0] += 1
    misfit, _ = await run.join("stray", stray)
    run.trainer.train(1)
    assert (await run.sync.push(V1)).num_replicas == 1
    assert run.routed() == {"one"}
    assert "stray and the trainer do not fit" in misfit.why
    with pytest.raises(UserError, match="stray and the trainer do not fit"):
        await run.sync.catch_up(misfit)  # as health does once it generates
    run.trainer.train(2)
    assert (await run.sync.push(V2)).num_replicas == 1


async def test_a_replicas_shard_layouts_are_hashed_once(monkeypatch):
    """For a large model that takes milliseconds, in which the coordinator stands still."""
    run, hashed = Run(), []
    monkeypatch.setattr(plans, "sha256", lambda: hashed.append(1) or hashlib.sha256())
    for name in ("one", "two"):
        await run.join(name)
    for version in (V1, V2, V3):
        run.trainer.train(version.number)
        await run.sync.push(version)
    assert len(hashed) == 2


# Transports that both ends enter together


async def test_collective_push_goes_on_in_one_new_epoch():
    run = Run(transport="tcp")
    engines = {name: Engine(transport="tcp") for name in ("one", "two", "dead")}
    replicas = {name: (await run.join(name, engine))[0] for name, engine in engines.items()}
    model = run.trainer.train(1)
    await run.sync.push(V1)
    for engine in engines.values():
        assert_holds(engine, model, V1)

    engines["dead"].fails["receive"] = ServiceUnavailableError("no answer")
    model, before = run.trainer.train(2), len(run.trainer.epochs)
    report = await run.sync.push(V2)
    assert report.failed == {"dead": "no answer"}
    assert report.num_replicas == 2
    assert run.routed() == {"one", "two"}
    first = (7 << 32) + 1
    assert sorted({m.epoch for m in run.trainer.epochs[before:]}) == [first, first + 1]
    assert run.trainer.epochs[-1] == Membership(first + 1, 2)
    for name in ("one", "two"):
        assert_holds(engines[name], model, V2)

    # it is there again: held for the next push, of which it is a member
    engines["dead"].fails.clear()
    await run.sync.catch_up(replicas["dead"])
    assert run.held() == {"dead"}
    model = run.trainer.train(3)
    await run.sync.push(V3)
    assert run.routed() == {"one", "two", "dead"}
    assert_holds(engines["dead"], model, V3)


async def test_collective_push_does_not_wait_for_who_is_gone():
    """The others would wait for it in the first part, until the deadline."""
    run = Run(transport="tcp")
    (_, one), (_, two), (_, dead) = [await run.join(name, Engine(transport="tcp")) for name in "abc"]
    dead.fails["receive"] = ServiceUnavailableError("no answer")
    model = run.trainer.train(1)
    report = await asyncio.wait_for(run.sync.push(V1), 20)
    assert report.failed == {"c": "no answer"}
    for engine in (one, two):
        assert_holds(engine, model, V1)


async def test_collective_push_without_the_one_whose_bytes_are_wrong():
    """Others of its class have got the part, so it is to blame, and nothing of it is committed."""
    run = Run(transport="tcp")
    (_, well), (_, ill) = await run.join("well"), await run.join("ill")
    old = run.trainer.train(1)
    await run.sync.push(V1)
    receive = ill.refit._receiver.take

    def corrupted(stream: StreamManifest, membership: Membership) -> torch.Tensor:
        part = receive(stream, membership)
        part[5] ^= 1
        return part

    ill.refit._receiver.take = corrupted
    model = run.trainer.train(2)
    report = await run.sync.push(V2)
    assert report.failed.keys() == {"ill"}
    assert "got checksum" in report.failed["ill"]
    assert_holds(well, model, V2)
    assert_holds(ill, old, V1)


async def test_collective_replica_that_nobody_stands_in_for_gets_a_push_of_its_own():
    run = Run(transport="tcp")
    replica, _ = await run.join("one")
    model = run.trainer.train(1)
    await run.sync.push(V1)
    run.replicas.lose(replica, "it died")
    run.trainer.train(2)  # in the midst of a step: what was published is kept
    _, again = await run.join("one")
    assert run.routed() == {"one"}
    assert_holds(again, model, V1)


async def test_who_joins_a_collective_push_that_nobody_else_survives_gets_one_of_its_own():
    """It was held for the next push, before which somebody has to generate."""
    run = Run(transport="tcp")
    _, dies = await run.join("dies", Engine(transport="tcp"))
    late = Engine(transport="tcp")

    async def die(*_: object) -> int:
        await run.join("late", late)
        raise ServiceUnavailableError("the engine died")

    dies.receive_weights = die
    model = run.trainer.train(1)
    await asyncio.wait_for(run.sync.push(V1), 20)
    assert run.routed() == {"late"}
    assert_holds(late, model, V1)


# The canary


async def test_canary_keeps_out_who_computes_something_else(tiny_qwen2):
    run = Run(tiny_qwen2, canary_every=1)
    (_, well), (_, ill) = await run.join("well"), await run.join("ill")
    run.trainer.train(1)
    assert (await run.sync.push(V1)).metrics()["weights/canary_failed"] == 0
    assert run.trainer.scored == 1

    ill.is_off = 0.06
    model = run.trainer.train(2)
    report = await run.sync.push(V2)
    assert report.failed.keys() == {"ill"}
    assert "differ from the trainer's by 0.06 on average" in report.failed["ill"]
    assert report.metrics()["weights/canary_failed"] == 1
    assert report.metrics()["weights/canary_diff/max"] == pytest.approx(0.06, rel=1e-3)
    assert (run.routed(), run.held()) == ({"well"}, {"ill"})
    assert (well.aborted, ill.aborted) == ([], [""])  # what runs is generated anew elsewhere

    ill.is_off = 0.04
    model = run.trainer.train(3)
    report = await run.sync.push(V3)
    assert run.routed() == {"well", "ill"}
    assert_holds(ill, model, V3)
    assert report.metrics()["weights/canary_diff/max"] == pytest.approx(0.04, rel=1e-3)


async def test_canary_that_is_not_finite(tiny_qwen2):
    run = Run(tiny_qwen2, canary_every=1)
    (_, well), (_, ill) = await run.join("well"), await run.join("ill")
    run.trainer.train(1)
    ill.is_off = float("nan")
    assert (await run.sync.push(V1)).failed.keys() == {"ill"}
    message = str(CanaryError(float("nan"), 0.05))
    assert "differ from the trainer's by nan on average" in message
    assert message.endswith("so its weights are damaged: look at its log")
    well.is_off = float("inf")
    with pytest.raises(WeightPushError, match=r"no replica accepted .* differ from the trainer's by inf"):
        await run.sync.push(V2)


async def test_canary_compares_late_joiners_with_what_the_trainer_said(tiny_qwen2):
    run = Run(tiny_qwen2, canary_every=1)
    await run.join("one")
    run.trainer.train(1)
    await run.sync.push(V1)
    run.trainer.train(2)
    await run.join("late")
    ill = Engine()
    ill.is_off = 1.0
    await run.join("ill", ill)
    assert (run.routed(), run.held()) == ({"one", "late"}, {"ill"})
    assert run.trainer.scored == 1


@pytest.mark.parametrize(("every", "scored"), [(0, 0), (1, 4), (3, 2)])
async def test_canary_every_so_many_pushes(tiny_qwen2, every, scored):
    run = Run(tiny_qwen2, canary_every=every)
    await run.join("one")
    for seed, version in enumerate((V1, V2, V3, V4)):
        run.trainer.train(seed)
        await run.sync.push(version)
    assert run.trainer.scored == scored


async def test_trainer_that_fails_at_the_canary_leaves_nobody_routed(tiny_qwen2):
    run = Run(tiny_qwen2, canary_every=1)
    await run.join("one")
    run.trainer.train(1)

    async def gone(*_: object, **__: object) -> Float32:
        raise ServiceUnavailableError("the trainer is gone")

    run.trainer.compute_logprobs = gone
    with pytest.raises(ServiceUnavailableError, match="the trainer is gone"):
        await run.sync.push(V1)
    assert (run.routed(), run.held()) == (set(), {"one"})


async def test_a_trainer_that_has_diverged_is_to_blame_and_no_replica(tiny_qwen2):
    run = Run(tiny_qwen2, canary_every=1)
    await run.join("one")
    run.trainer.train(1)

    async def diverged(segments: Segments, temperature: float) -> Float32:
        return np.full(len(segments.token_ids), np.nan, np.float32)

    run.trainer.compute_logprobs = diverged
    with pytest.raises(DivergedError, match=r"training has diverged: .* lower trainer\.optimizer\.learning"):
        await run.sync.push(V1)
    assert (run.routed(), run.held()) == (set(), {"one"})


def test_canary_asks_each_side_the_same(tiny_qwen2):
    """The trainer gets one tree per text, and its answer lacks what no token comes before."""
    canary = Canary(tiny_qwen2, every=1, tolerance=0.05)
    asked: dict[str, list[list[int]]] = {}

    class Both:
        async def compute_logprobs(self, segments: Segments, temperature: float) -> Float32:
            starts = segments.offsets[1:-1]
            asked["trainer"] = [ids.tolist() for ids in np.split(segments.token_ids, starts)]
            assert segments.parents.tolist() == [-1] * len(segments.groups)
            return np.where(segments.predecessors >= 0, segments.token_ids / 64, 0).astype(np.float32)

        async def score_tokens(self, sequences: Sequence[Int32]) -> list[Float32]:
            asked["replica"] = [ids.tolist() for ids in sequences]
            return [(ids[1:] / 64).astype(np.float32) for ids in sequences]

    async def difference(max_length: int) -> float:
        return canary.compare(await canary.ask_trainer(Both()), await canary.ask_replica(Both(), max_length))

    assert asyncio.run(difference(512)) == 0
    assert asked["trainer"] == asked["replica"]
    assert {len(ids) for ids in asked["replica"]} == {32}
    assert asyncio.run(difference(16)) == 0
    assert {len(ids) for ids in asked["replica"]} == {15}
