"""Services that leave: they get no new work, and may go once nothing is in progress there."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from atoll.coordinator.control import RunControl, RunProgress, RunState, TrainerLeavesError
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.departures import Departures
from atoll.coordinator.fleet.directory import ServiceDirectory
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.replicas import Replica, Replicas, ReplicaState
from atoll.coordinator.fleet.scaling import Scaling
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rewards.verdict_sources import RewardServices
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.wire.types import ServiceEntry, Trajectory, TurnId, TurnRequest, UndrawnTurn, Version
from tests.builders import arrival, node, pending, run_config, sample, turn_request
from tests.fake_replicas import V3, Fleet
from tests.fake_rewards import FakeService
from tests.fake_servers import item
from tests.fakes import FakeRun, ListSource, batch
from tests.tokens import CALLER
from tests.virtual_clock import timed


def entry(name: str, role: str = "rollout", incarnation: str = "1") -> ServiceEntry:
    return ServiceEntry(role, name, incarnation, "127.0.0.1:9")


def soon(work: Any) -> asyncio.Task[None]:
    return asyncio.create_task(work)


async def until(control: RunControl, holds: Callable[[RunProgress], bool]) -> None:
    while not holds(control.progress):
        await asyncio.wait_for(control.follow(control.progress.revision, 30), 30)


async def turns_over(task: asyncio.Task[None]) -> bool:
    """Whether it is done once all others have had their turns."""
    for _ in range(10):
        await asyncio.sleep(0)
    return task.done()


@timed
async def test_a_replica_keeps_its_samples_and_gets_neither_traffic_nor_weights() -> None:
    fleet = Fleet(None, None)
    await fleet.route_all()
    leaving, staying = fleet.members
    leaving.load.record_sent(2, 10.0, 0.0)
    drained = soon(fleet.replicas.drain(leaving))
    assert not await turns_over(drained)
    fleet.replicas.hold(leaving)  # by a push, or the loss of a trainer
    await fleet.replicas.route(leaving)
    assert leaving.state is ReplicaState.DRAINING
    assert list(fleet.replicas) == [staying]
    assert fleet.replicas.waiting == frozenset()
    fleet.replicas.record_released(leaving, 1, 5.0)
    assert not await turns_over(drained)
    fleet.replicas.record_released(leaving, 1, 5.0)
    await drained


@timed
async def test_a_replica_that_fails_while_it_leaves_is_lost_with_its_samples() -> None:
    fleet = Fleet(None)
    await fleet.route_all()
    [leaving] = fleet.members
    leaving.load.record_sent(1, 5.0, 0.0)
    drained = soon(fleet.replicas.drain(leaving))
    assert not await turns_over(drained)
    fleet.replicas.suspend(leaving, "its stream broke")
    assert leaving.state is ReplicaState.LOST  # health would bring it back otherwise
    fleet.replicas.record_released(leaving, 1, 5.0)
    await drained


@timed
async def test_a_reward_service_gives_its_verdicts_and_another_gets_the_next() -> None:
    leaving, staying = FakeService(seconds={0: 5.0}), FakeService()
    services = RewardServices(600.0, 600.0, AsyncMock())
    services.add(leaving, 1)  # type: ignore[arg-type]

    async def ask() -> None:
        async for _ in services.ask([item(0)], 0.0):
            pass

    first = soon(ask())
    assert not await turns_over(first)
    services.add(staying, 1)  # type: ignore[arg-type]
    drained = soon(services.drain(leaving))  # type: ignore[arg-type]
    assert not await turns_over(drained)
    await ask()
    assert [len(leaving.calls), len(staying.calls)] == [1, 1]
    await first
    await drained


async def test_an_agent_process_plays_its_sessions_to_their_end() -> None:
    hosts, leaving, staying = AgentHosts(), object(), object()
    hosts.add(leaving, {"a": 9})  # type: ignore[arg-type]
    async with hosts.place("a"):
        drained = soon(hosts.drain(leaving))  # type: ignore[arg-type]
        assert not await turns_over(drained)
        hosts.add(staying, {"a": 1})  # type: ignore[arg-type]
        async with hosts.place("a") as chosen:
            assert chosen is staying
        assert not await turns_over(drained)
    await drained
    hosts.remove(leaving)  # type: ignore[arg-type]  # when it has left


class DrawStream:
    """A gateway that wants the turns of a queue, and notes how many answers it has heard."""

    def __init__(self) -> None:
        self.wants: asyncio.Queue[list[TurnRequest]] = asyncio.Queue()
        self.heard = 0

    async def draw(self, answers: Any) -> Any:
        hearing = asyncio.create_task(self._hear(answers))
        try:
            while True:
                yield await self.wants.get()
        finally:
            hearing.cancel()

    async def _hear(self, answers: Any) -> None:
        async for drawn, undrawn in answers:
            self.heard += len(drawn) + len(undrawn)


async def test_a_gateway_gets_the_turns_that_it_waits_for_and_no_others() -> None:
    gateways, leaving, staying = Gateways(), DrawStream(), DrawStream()
    asked: list[TurnId] = []
    gateways.serve(lambda link, requests: asked.extend(id for r in requests for id in r.ids))
    gateways.add("gateway-0", leaving)  # type: ignore[arg-type]
    link = await gateways.choose()
    first, second = (turn_request([1], turn=turn) for turn in range(2))
    leaving.wants.put_nowait([first])
    drained = soon(asyncio.sleep(0))
    assert await turns_over(drained)
    drained = soon(gateways.drain(leaving))  # type: ignore[arg-type]
    assert not await turns_over(drained)
    leaving.wants.put_nowait([first, second])  # its stream broke, and its session went on
    gateways.add("gateway-1", staying)  # type: ignore[arg-type]
    assert (await gateways.choose()).name == "gateway-1"
    assert not await turns_over(drained)
    assert asked == [*first.ids, *first.ids]
    link.answer([], [UndrawnTurn(first.ids[0], "given up", None)])
    await asyncio.wait_for(drained, 30)
    assert leaving.heard == 1
    for gateway in (leaving, staying):
        gateways.remove(gateway)  # type: ignore[arg-type]


async def test_who_asks_again_whether_it_may_leave_waits_for_the_same() -> None:
    departures, asked, idle = Departures(), [], asyncio.Event()
    await departures.drain(entry("rollout-0"))  # nothing was sent to anyone yet

    async def let_go(leaving: ServiceEntry) -> None:
        asked.append(leaving)
        await idle.wait()

    departures.serve(let_go)
    first = soon(departures.drain(entry("rollout-0")))
    assert not await turns_over(first)
    first.cancel()  # its deadline has passed
    second = soon(departures.drain(entry("rollout-0")))
    assert not await turns_over(second)
    idle.set()
    await asyncio.wait_for(second, 30)
    await departures.drain(entry("rollout-0"))
    assert asked == [entry("rollout-0")]
    await departures.drain(entry("rollout-0", incarnation="2"))  # its successor is another service
    assert len(asked) == 2


def test_an_operator_drains_one_incarnation_and_its_launcher_starts_no_other() -> None:
    departures, there = Departures(), [entry("rollout-0"), entry("rollout-1"), entry("actor-0", "actor")]
    assert departures.tell("rollout-1", there) == (entry("rollout-1"), "")
    assert departures.is_told(entry("rollout-1"))
    assert not departures.is_told(entry("rollout-1", incarnation="2"))
    assert not departures.is_told(entry("rollout-0"))
    assert departures.told == ("rollout-1",)
    departures.take_back(["rollout-0", "rollout-1"])
    assert departures.told == ()


def test_who_drains_the_last_of_a_role_is_told_that_the_run_waits() -> None:
    departures, there = Departures(), [entry("rollout-0"), entry("rollout-1"), entry("actor-0", "actor")]
    assert "actor-0 is the run's only actor: the run waits" in departures.tell("actor-0", there)[1]
    assert departures.tell("rollout-1", there)[1] == ""
    assert "rollout-0 is the run's only rollout" in departures.tell("rollout-0", there)[1]


def test_an_unknown_name_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(
        UserError, match="no service is called 'rollout-7'; registered services: rollout-0, r"
    ):
        Departures().tell("rollout-7", [entry("rollout-0"), entry("rollout-1")])


def test_the_launcher_can_run_as_many_replicas_as_a_cpu_may_hold() -> None:
    scaling = Scaling.of(run_config(), has_launcher=True)
    assert scaling.number == 0  # as the config says
    scaling.change("rollout", 5)
    assert scaling.number == 5
    with pytest.raises(UserError, match="got 0 replicas, expected at least 1"):
        scaling.change("rollout", 0)
    with pytest.raises(UserError, match="got the role 'reward', expected rollout"):
        scaling.change("reward", 2)
    assert scaling.number == 5


def test_replicas_that_cannot_be_scaled_are_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match="no launcher runs the services of this run: under Docker Compose"):
        Scaling.of(run_config(), has_launcher=False).change("rollout", 2)
    without = run_config(run={"mode": "supervised"})
    with pytest.raises(UserError, match='a run of mode "supervised" has no rollout replicas'):
        Scaling.of(without, has_launcher=True).change("rollout", 2)
    with pytest.raises(UserError, match=r"got 3 replicas, expected at most 2: placement\.gpus\.rollout has"):
        Scaling(refusal="", limit=2).change("rollout", 3)


async def test_a_scaled_run_takes_drained_replicas_back() -> None:
    control = RunControl(trains=True, scaling=Scaling(refusal=""))
    before = control.progress.revision
    await control.tell_to_leave("rollout-1", [entry("rollout-0"), entry("rollout-1")])
    assert control.departures.told == ("rollout-1",)
    await control.scale("rollout", 2)
    assert (control.departures.told, control.scaling.number) == ((), 2)
    assert control.progress.revision == before + 2  # its launcher hears of both


async def test_a_trainer_may_leave_at_once_where_there_is_nothing_to_save() -> None:
    control = RunControl(trains=True)
    for state in (RunState.STARTING, RunState.WARMING_UP, RunState.RECOVERING, RunState.FINISHED):
        await control.report(state=state)
        await asyncio.wait_for(control.hand_over("actor-0"), 30)
    assert control.leaving == ""


async def test_a_trainer_that_leaves_waits_for_the_loop_which_gives_up_its_waiting() -> None:
    control = RunControl(trains=True)
    await control.report(state=RunState.TRAINING)
    leaving = [soon(control.hand_over(name)) for name in ("critic-0", "actor-0")]
    assert await control.run_unless_stopped(asyncio.Event().wait()) is None
    assert await control.run_unless_left(asyncio.Event().wait()) is None
    assert (control.leaving, control.checkpoint_requested, control.stopping) == (
        "actor-0, critic-0",
        True,
        False,
    )
    await control.let_go()
    await asyncio.wait_for(asyncio.gather(*leaving), 30)
    assert await control.run_unless_stopped(asyncio.sleep(0, "done")) == "done"


async def test_a_trainer_that_leaves_a_run_that_ends_is_let_go_by_its_end() -> None:
    control = RunControl(trains=True)
    await control.report(state=RunState.SAVING)
    leaving = soon(control.hand_over("actor-0"))
    assert not await turns_over(leaving)
    await control.report(state=RunState.FINISHED)
    await asyncio.wait_for(leaving, 30)


class Weights:
    async def may_generate(self, replica: Replica) -> bool:
        return True

    async def catch_up(self, replica: Replica) -> None: ...

    async def wait_for_push(self) -> None: ...


class Registered:
    def __init__(self, *entries: ServiceEntry) -> None:
        self.services = lambda: entries


@timed
async def test_a_run_that_was_complete_starts_again_with_one_of_each() -> None:
    """Operators may have scaled it down; one that leaves does not count."""
    fleet, there = Fleet(None, None), (entry("rollout-0"), entry("rollout-1"))
    membership = ServiceDirectory(
        Registered(*there),  # type: ignore[arg-type]
        Replicas(CALLER, 5.0),
        Rewards(retries=0),
        AgentHosts(),
        Gateways(),
        CALLER,
        5.0,
        Weights(),
        "actor",
        AsyncMock(),
    )
    membership._clients.update(zip(there, fleet.members, strict=True))
    with pytest.raises(ServiceUnavailableError, match="still missing: 1 x rollout"):
        await membership.wait_for({"rollout": 3}, 10.0)
    assert membership.needed({"rollout": 2}) == {"rollout": 2}
    await membership.wait_for({"rollout": 2}, 10.0)
    assert membership.needed({"rollout": 2}) == {"rollout": 1}
    await membership.drain(there[1])
    await membership.wait_for({"rollout": 1}, 10.0)
    await membership.drain(there[0])
    with pytest.raises(ServiceUnavailableError, match="still missing: 1 x rollout"):
        await membership.wait_for({"rollout": 1}, 10.0)


SUMS = {"sets": [{"name": "sums", "path": "sums.parquet"}], "best": "sums/avg@1"}


async def test_a_trainer_that_leaves_is_saved_after_its_step_and_nothing_is_rolled_back(
    tmp_path: Path,
) -> None:
    """Two batches are there; the third step waits for groups, which is given up."""
    run = FakeRun(tmp_path, source=ListSource([batch(1), batch(2)]))
    looping = asyncio.create_task(run.run())
    await until(run.control, lambda progress: progress.step == 2)
    await asyncio.wait_for(run.control.hand_over("actor-0"), 30)
    with pytest.raises(TrainerLeavesError, match="actor-0 leaves; step 2 is saved"):
        await looping
    assert run.checkpoints.steps() == [2]
    assert run.events[-2:] == [("push", 2), ("save", "actor", 2)]
    assert run.control.leaving == ""


async def test_a_trainer_leaves_a_paused_run_too(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    looping = asyncio.create_task(run.run(step=1))
    await run.control.pause()
    await until(run.control, lambda progress: progress.state is RunState.PAUSED)
    await asyncio.wait_for(run.control.hand_over("actor-0"), 30)
    with pytest.raises(TrainerLeavesError, match="step 1 is saved"):
        await looping


async def test_what_a_guard_has_refused_is_not_saved_for_a_trainer_that_leaves(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, {"guards": {"min_entropy": 2.0, "action": "pause"}})
    looping = asyncio.create_task(run.run())
    await until(run.control, lambda progress: progress.state is RunState.PAUSED)
    await asyncio.wait_for(run.control.hand_over("actor-0"), 30)
    assert run.control.progress.state is RunState.PAUSED
    assert run.checkpoints.steps() == []
    looping.cancel()
    await asyncio.wait([looping])


async def test_a_validation_is_given_up_for_a_trainer_that_leaves_and_made_up_for(tmp_path: Path) -> None:
    sections = {"run": {"steps": 2}, "validation": {**SUMS, "every": 1, "at_start": False}}
    run = FakeRun(tmp_path, sections)
    begun = asyncio.Event()

    async def never(step: int, version: Version) -> Mapping[str, float]:
        begun.set()
        await asyncio.Event().wait()
        return {}

    run.validate = never  # type: ignore[method-assign]
    looping = asyncio.create_task(run.run())
    await begun.wait()
    await asyncio.wait_for(run.control.hand_over("actor-0"), 30)
    with pytest.raises(TrainerLeavesError, match="step 1 is saved"):
        await looping
    state, _, _ = run.checkpoints.load(1)
    later = FakeRun(tmp_path, sections, source=ListSource([batch(2)], first=2), validations=[0.5, 0.75])
    await later.run(step=1, unrecorded=state.row)
    assert later.events == [
        *(("push", 1), ("validate", 1)),
        *(("update", "actor", 2), ("push", 2), ("validate", 2), ("save", "actor", 1)),
    ]
    assert [row["val/sums/avg@1"] for row in later.rows() if row["step"]] == [0.5, 0.75]


class HalfDone:
    """A replica that sends the samples that it was asked for once it may."""

    def __init__(self) -> None:
        self.was_asked, self.may_send = asyncio.Event(), asyncio.Event()
        self.asked: list[TurnId] = []

    async def generate(self, model: str, requests: Sequence[TurnRequest]) -> AsyncGenerator[Arrival, None]:
        ids = [id for request in requests for id in request.ids]
        self.asked += ids
        self.was_asked.set()
        await self.may_send.wait()
        yield arrival(*(sample(id.sample, node([4, 5], versions=V3)) for id in ids))


class Sink:
    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None: ...

    async def on_completed(self, group: PendingGroup) -> None: ...


async def test_generation_ends_with_the_samples_that_replicas_have() -> None:
    """Those of the first group arrive; the second, for which there was no room, is not sent."""
    peer = HalfDone()
    fleet = Fleet(peer)
    await fleet.route_all()
    running = asyncio.create_task(fleet.generation.run())
    first, second = pending(0, 64), pending(1, 64)
    fleet.generation.submit([first, second], Sink())  # type: ignore[arg-type]
    await peer.was_asked.wait()
    finished = soon(fleet.generation.finish_running())
    assert not await turns_over(finished)
    peer.may_send.set()
    await asyncio.wait_for(finished, 30)
    assert (first.missing, len(second.missing), len(peer.asked)) == ((), 64, 64)
    running.cancel()
    await asyncio.wait([running])
