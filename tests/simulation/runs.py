"""A run of the real coordinator over several lives: journal, source, loop and checkpoints are the real ones.

Everything that happens follows from the seed.
"""

import asyncio
import contextlib
import functools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import redis

from atoll.cli.audit import AuditReport, audit
from atoll.config.load import validate
from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.coordinator.assembly import Assembly
from atoll.coordinator.background import first_cause
from atoll.coordinator.control import RunControl
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.directory import TrainerLostError
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.health import WeightProvider
from atoll.coordinator.fleet.replicas import Replica, Replicas, ReplicaState, now
from atoll.coordinator.journal.ledger import LEDGER
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.weight_sync.push_report import PushReport
from atoll.runtime.clients.base import Caller
from atoll.runtime.store import Store
from atoll.runtime.tokenizer import tokenizer_digest
from atoll.wire.types import ServiceEntry, Version
from tests.builders import NO_GPUS
from tests.conftest import write_tokenizer
from tests.simulation.process import SCRIPTS, Killed, Line, NumberedTimeout, Process
from tests.simulation.services import MAX_QUEUED, FakeGrader, FakeReplica, FakeTrainer, Fate, History

FATAL_WRITES = ("ISSUE", "FINISH", "RETRY", "DROP", "CONSUME", "COMMIT", "BRANCH")
TURNS_OF_A_STEP = 300
STORE_LOST = 0.15  # how often, after a life


@dataclass(frozen=True)
class Scene:
    """What a seed chooses for all lives of its run."""

    seed: int
    config: RunConfig
    fate: Fate
    fault_rate: float
    num_restarts: int

    def dice(self, *names: object) -> random.Random:
        return random.Random(f"{self.seed} {names}")


def scene(seed: int, folder: Path) -> Scene:
    dice = random.Random(f"{seed} scene")
    sources = []
    for number in range(dice.randint(1, 3)):
        path = folder / f"rows-{number}.jsonl"
        rows = [row(number, i) for i in range(dice.randint(5, 14))]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        sources.append({"path": path, "weight": dice.choice((0.5, 1.0, 2.0))})
    (folder / "toy").mkdir()
    staleness = dice.randrange(4)
    tree: dict[str, dict[str, Any]] = {
        "run": {"name": "toy", "dir": folder, "steps": dice.randint(8, 16), "seed": seed},
        "model": {"path": write_model(folder)},
        "data": {"train": sources, "shuffle": dice.random() < 0.8},
        "coordinator": {
            "prompts_per_step": dice.randint(2, 4),
            "samples_per_prompt": dice.randint(2, 3),
            "greedy_baseline": dice.random() < 0.2,
            "max_staleness": staleness,
            "partial_rollouts": staleness > 0 and dice.random() < 0.5,
            "max_sample_attempts": 1000,
            "max_dropped_share": 1.0,
            "dump": dice.random() < 0.5,
        },
        "rollout": {"sampling": {"max_new_tokens": 8}, "local": {"max_length": 512}},
        "reward": {"graders": [{"name": "exact_match"}]},
        "algorithm": {"num_minibatches": dice.choice((1, 1, 2))},
        "checkpoint": {"every": dice.choice((0, 0, 0, 4, 7)), "keep": dice.randint(1, 2)},
    }
    if tree["coordinator"]["greedy_baseline"]:
        tree["algorithm"]["advantage"] = {"name": "remax"}
    if dice.random() < 0.5:
        tree["algorithm"]["filter"] = {"name": "scores_differ", "max_refill": 1000}
    faults = dice.choice((0.0, 0.02, 0.06))
    fate = Fate(
        seed,
        ungradable=dice.choice((0.0, 0.08)),
        flat=dice.choice((0.0, 0.15)),
        refused=dice.choice((0.0, 0.0, 0.02)),
    )
    config = resolve(validate(tree, "scene"), NO_GPUS)
    return Scene(seed, config, fate, faults, dice.choice((0, 1, 2, 3, 3, 4, 4, 5, 5)))


def row(source: int, number: int) -> dict[str, object]:
    question = f"{source}+{number}="
    return {
        "data_source": "toy",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": str(source + number)},
    }


def write_model(folder: Path) -> Path:
    """What the coordinator reads of a model: its tokenizer."""
    model = folder / "model"
    model.mkdir()
    write_tokenizer(model)
    (model / "config.json").write_text(json.dumps({"vocab_size": 64, "eos_token_id": 1}))
    return model


class Life:
    """One coordinator process with its services, from its start to its death or the run's end."""

    def __init__(self, scene: Scene, number: int, store_url: str) -> None:
        self.scene = scene
        self.dice = scene.dice("life", number)
        self.process = Process(scene.dice("process", number))
        self._resume = number > 0
        self._is_last = number >= scene.num_restarts
        self._url = store_url
        self._first_step: int | None = None
        self._fatal_step: int | None = None  # counted from the first
        self.trainer = self.new_trainer()

    def run(self) -> str:
        """What became of it: "finished", "stopped", "killed" or "gave up"."""
        Line.process = self.process
        try:
            return self.process.run(self._live())
        except Killed:
            return "killed"
        except ExceptionGroup as errors:
            if "the trainer refused" not in str(first_cause(errors)):
                raise
            self.scene.fate.refused = 0.0  # somebody has fixed the cause
            return "gave up"

    async def _live(self) -> str:
        config = self.scene.config
        store = Store(self._url, config.run.name)
        caller = Caller(await store.take_epoch())
        control = RunControl(trains=True)
        servers = SimpleNamespace(open=nothing, watch=forever, missing=list)
        assembly = Assembly(config, store, None, servers, control, caller)  # type: ignore[arg-type]
        background = [asyncio.create_task(self._ask_for_checkpoints(control))]
        if not self._is_last:
            background.append(asyncio.create_task(self._end_early(control)))
        await assembly.run(self._resume)
        for task in background:
            task.cancel()
        return "stopped" if control.stopping else "finished"

    def new_trainer(self) -> FakeTrainer:
        scene = self.scene
        digest = tokenizer_digest(scene.config.model.path)
        return FakeTrainer(scene.fate, self.dice, digest, scene.fault_rate / 10, self._begins)

    def _begins(self, step: int) -> None:
        if self._first_step is None:
            self._first_step = step
        if self._fatal_step is not None and step >= self._first_step + self._fatal_step:
            self.process.kill_in(self.dice.randrange(TURNS_OF_A_STEP))

    async def _end_early(self, control: RunControl) -> None:
        """In one of the ways that a coordinator may end; where the run is over before, in none."""
        dice = self.dice
        match dice.choice(("step", "step", "step", "write", "stop")):
            case "step":
                self._fatal_step = dice.choice((0, 1, 2, 4, 6, 8))
            case "write":
                script = dice.choice(FATAL_WRITES)
                often = script in ("FINISH", "RETRY")
                nth = dice.randint(1, 60 if often else 8)
                self.process.kill_at_write(script, nth, after=dice.random() < 0.5)
            case "stop":
                await asyncio.sleep(dice.uniform(0, 30))
                await control.stop()

    async def _ask_for_checkpoints(self, control: RunControl) -> None:
        while self.dice.random() < 0.6:
            await asyncio.sleep(self.dice.uniform(0, 20))
            await control.request_checkpoint()


class FakeMembership:
    """All services are there from the start. Replicas recover from what they are suspended for; a trainer
    that has died comes back as another process."""

    def __init__(
        self,
        life: Life,
        registry: None,
        replicas: Replicas,
        rewards: Rewards,
        agent_hosts: AgentHosts,
        gateways: Gateways,
        caller: Caller,
        timeout_s: float,
        weights: WeightProvider,
        *others: object,
    ) -> None:
        self._life = life
        self._weights = weights
        self._replicas = []
        for number in range(2):
            dice = life.scene.dice("replica", number, life.dice.random())
            client = FakeReplica(f"rollout-{number}", dice, life.scene.fault_rate)
            entry = ServiceEntry("rollout", client.name, "1", "")
            info = SimpleNamespace(slots=64, vocab_size=64, max_length=4096)
            self._replicas.append(Replica(entry, client, info, Version("", 0)))  # type: ignore[arg-type]
        grader = FakeGrader(life.scene.fate, life.dice, life.scene.fault_rate)
        rewards.add(grader, MAX_QUEUED)  # type: ignore[arg-type]

    @property
    def models(self) -> dict[str, FakeTrainer]:
        return {"actor": self._life.trainer}

    def model(self, role: str) -> FakeTrainer:
        return self.models[role]

    def needed(self, expected: Mapping[str, int]) -> Mapping[str, int]:
        return expected

    async def follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(self._heal(replica))

    async def _heal(self, replica: Replica) -> None:
        while True:
            if replica.state is ReplicaState.UNHEALTHY:
                await asyncio.sleep(self._life.dice.uniform(0, 2) + max(0, replica.excluded_until - now()))
                await self._weights.catch_up(replica)
            replica.state_changed.clear()
            await replica.state_changed.wait()

    async def wait_for(self, *arguments: object) -> None: ...

    async def watch_trainers(self, *, or_absent: bool = False) -> None:
        await self._life.trainer.died.wait()
        raise TrainerLostError("the fake trainer is gone")

    async def reconnect(self) -> None:
        await asyncio.sleep(3)
        self._life.trainer = self._life.new_trainer()


class FakeSync:
    """Weights reach replicas after a while. Without partial rollouts, running samples end first."""

    def __init__(self, life: Life, replicas: Replicas, *others: object, **options: Any) -> None:
        self._dice = life.dice
        self._replicas = replicas
        self._finish_running = options["finish_running"]
        self._version: Version | None = None
        self._lock = asyncio.Lock()

    async def push_and_measure(self, version: Version) -> Mapping[str, float]:
        async with self._lock:
            await asyncio.sleep(self._dice.uniform(0, 1))
            self._version = version
            members = sorted(
                {*self._replicas, *self._replicas.waiting}, key=lambda replica: replica.entry.name
            )
            await asyncio.gather(*map(self._go_live, members))
        return PushReport(0.1, 1, 0.0, len(members), {}, (), 0).metrics()

    async def catch_up(self, replica: Replica) -> None:
        self._replicas.hold(replica)
        if self._version is None:
            return
        async with self._lock:
            await self._go_live(replica)

    async def may_generate(self, replica: Replica) -> bool:
        return True

    async def release(self) -> None:
        """Its replicas have devices of their own."""

    async def use_trainer(self, trainer: object, models: object = None) -> None:
        async with self._lock:
            self._version = None
            for replica in self._replicas:
                self._replicas.hold(replica)

    async def _go_live(self, replica: Replica) -> None:
        assert self._version is not None
        self._replicas.hold(replica)
        with replica.track_commit(self._version):
            await replica.client.commit(self._version, finish_running=self._finish_running)  # type: ignore[attr-defined]
        await self._replicas.route(replica)


@dataclass(frozen=True)
class Outcome:
    lives: tuple[str, ...]  # what became of each
    history: History  # what the trainer's weights are made of
    audits: tuple[AuditReport, ...]  # after each life
    ticks: int  # of all event loops


def simulate(scene: Scene, store_url: str) -> Outcome:
    """Runs all lives up to the end of the run."""
    lives: list[Life] = []
    ends: list[str] = []
    audits: list[AuditReport] = []
    clear(store_url)
    try:
        while "finished" not in ends:
            life = Life(scene, len(lives), store_url)
            lives.append(life)
            with faked(life):
                ends.append(life.run())
            if (scene.config.folder / LEDGER).exists():  # else it was killed before its first line
                audits.append(audit(scene.config.folder))
            if ends[-1] != "finished" and scene.dice("store", len(ends)).random() < STORE_LOST:
                clear(store_url)
                ends[-1] += ", store lost"
        ticks = sum(life.process.ticks for life in lives)
        return Outcome(tuple(ends), lives[-1].trainer.history, tuple(audits), ticks)
    finally:
        for life in lives:
            life.process.bury()


def clear(store_url: str) -> None:
    """The store is lost. Scripts are there: that a run is its server's first is no difference."""
    with redis.Redis(unix_socket_path=store_url.removeprefix("unix://")) as client:
        client.flushall()
        for script in SCRIPTS.values():
            client.script_load(script.text)


@contextlib.contextmanager
def faked(life: Life) -> Iterator[None]:
    """The assembly's doors to other processes lead to the life's."""
    with (
        patch("redis.asyncio.connection.UnixDomainSocketConnection", Line),
        patch("asyncio.timeouts.Timeout", NumberedTimeout),
        patch("atoll.coordinator.assembly.ServiceDirectory", functools.partial(FakeMembership, life)),
        patch("atoll.coordinator.assembly.WeightSync", functools.partial(FakeSync, life)),
    ):
        yield


async def nothing(*arguments: object) -> None: ...


async def forever(*arguments: object) -> None:
    await asyncio.Event().wait()
