"""Models and replicas that take turns on the same devices: who has which memory, and when."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from atoll.coordinator.fleet.health import HealthWatch
from atoll.coordinator.fleet.replicas import Replica, ReplicaState
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.wire.types import EngineMemory
from tests.unit.test_weight_sync import V1, V2, AtOneAddress, Engine, Run, assert_holds


class Leaver:
    def __init__(self, role: str, events: list[str]) -> None:
        self._role, self._events = role, events

    async def offload(self, *, keep_parameters: bool = False) -> int:
        self._events.append(f"{self._role} leaves" + " but for parameters" * keep_parameters)
        return 0


class Sleeper(Engine):
    """Its weights are NaN from a release to the next push."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__(takes_turns=True)
        self._name, self._events = name, events

    def _called(self, name: str) -> None:
        if name != "receive":
            self._events.append(f"{self._name}: {name}")
        super()._called(name)

    async def release(self) -> None:
        self._called("release")
        self.refit.release()
        for buffer in self.shard.buffers:
            buffer.fill_(np.nan)

    async def restore(self, memory: EngineMemory) -> None:
        self._called(f"restore {memory.name}")
        if memory is EngineMemory.WEIGHTS:
            self.refit.restore()


class Shared(Run):
    """A run whose actor and critic take turns with the replicas. `events`: the calls, in order."""

    def __init__(self, model_folder: Path = Path("no canary"), canary_every: int = 0) -> None:
        super().__init__(model_folder, canary_every=canary_every, takes_turns=True)
        self.events: list[str] = []
        self.models = {role: Leaver(role, self.events) for role in ("actor", "critic")}
        self.trainer.compute_logprobs = self._noting("actor scores", self.trainer.compute_logprobs)

    def _noting(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def noted(*arguments: Any, **settings: Any) -> Any:
            self.events.append(name)
            return await call(*arguments, **settings)

        return noted

    async def start(self, *names: str) -> list[tuple[Replica, Sleeper]]:
        """With their weights for V1, which `model` has."""
        self._has_trainer = True
        joined = [await self.join(name, Sleeper(name, self.events)) for name in names]
        await self.sync.use_trainer(AtOneAddress(self), self.models)
        self.model = self.trainer.train(1)
        await self.sync.push(V1)
        self.sync.take_metrics()
        self.events.clear()
        return joined


class Listener:
    def __init__(self) -> None:
        self.admitted = asyncio.Event()

    async def on_admitted(self, replica: Replica) -> None:
        self.admitted.set()

    async def on_refused(self, replica: Replica, error: UserError) -> None:
        raise error


async def admit(run: Shared, replica: Replica) -> None:
    """As when it joins, or was suspended. Nothing here answers a probe: it has no `generate`."""
    run.replicas.suspend(replica, replica.why)
    listener = Listener()
    watching = asyncio.create_task(HealthWatch(run.replicas, "actor", run.sync, listener).watch(replica))
    await asyncio.wait_for(listener.admitted.wait(), 10)
    watching.cancel()


async def test_memory_is_handed_over_in_the_order_of_its_use(tiny_qwen2: Path) -> None:
    run = Shared(tiny_qwen2, canary_every=1)
    [(replica, engine)] = await run.start("one")
    await run.sync.release()
    assert run.events == ["one: release"]
    assert (run.routed(), run.held()) == (set(), {"one"})
    model = run.trainer.train(2)
    await run.sync.push(V2)
    assert run.events[1:] == [
        "actor leaves but for parameters",
        "critic leaves",
        "one: restore WEIGHTS",
        "actor scores",
        "actor leaves",
        "critic leaves",
        "one: commit",
        "one: restore CACHE",
        "one: score",
    ]
    assert run.routed() == {"one"}
    assert_holds(engine, model, V2)
    assert replica.released == frozenset()
    assert run.sync.take_metrics().keys() == {"timing_s/release", "timing_s/offload", "timing_s/resume"}
    assert run.sync.take_metrics() == {}


async def test_the_first_push_and_a_lost_trainer_begin_with_a_release() -> None:
    run = Shared()
    await run.start("one")
    await run.sync.use_trainer(None)
    assert run.events == ["one: release"]
    assert run.held() == {"one"}


async def test_a_version_is_pushed_again_after_a_step_that_trained_nothing() -> None:
    run = Shared()
    [(_, engine)] = await run.start("one")
    await run.sync.release()
    await run.sync.push(V1)
    assert_holds(engine, run.model, V1)
    assert run.routed() == {"one"}


async def test_who_joins_in_the_models_turn_sleeps_until_the_push() -> None:
    run = Shared()
    await run.start("one")
    await run.sync.release()
    run.events.clear()
    replica, late = await run.join("late", Sleeper("late", run.events))
    await admit(run, replica)
    assert run.events == ["late: release"]
    assert run.held() == {"one", "late"}
    model = run.trainer.train(2)
    await run.sync.push(V2)
    assert run.routed() == {"one", "late"}
    assert_holds(late, model, V2)


async def test_who_does_not_release_is_asked_again_and_gets_its_weights_without_the_models() -> None:
    run = Shared()
    [(replica, engine), _] = await run.start("one", "two")
    engine.fails["release"] = ServiceUnavailableError("no answer within 60 s")
    await run.sync.release()
    assert (replica.state, run.held()) == (ReplicaState.UNHEALTHY, {"two"})
    model = run.trainer.train(2)
    await run.sync.push(V2)
    assert run.routed() == {"two"}
    run.events.clear()
    await admit(run, replica)
    assert run.events == ["one: restore WEIGHTS", "one: commit", "one: restore CACHE"]
    assert run.routed() == {"one", "two"}
    assert_holds(engine, model, V2)
    assert run.replicas.backlog_s(replica) == 0.0  # it was never probed
