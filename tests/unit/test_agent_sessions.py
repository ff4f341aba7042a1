"""What becomes of an agent's session: a sample, its weights, or another attempt."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from atoll.config.schema import AgentConfig, SessionEndsConfig
from atoll.coordinator.background import BackgroundWork
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.rollouts.agent_sessions import AgentSessions
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.runtime.errors import ServiceUnavailableError
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.types import (
    WHOLE,
    AgentOutcome,
    AgentTask,
    ExternalServer,
    SampleId,
    ServerAccess,
    SessionEnd,
    SessionId,
    Trajectory,
    Turn,
    TurnReward,
)
from tests.builders import group_id, node, pending, sample, sample_id

ENVIRONMENT = ServerAccess(ExternalServer("env", "maze", "http://maze", "openenv"), "sesame")
ID = SessionId(SampleId(group_id(), 0), 0)


def trajectory() -> Trajectory:
    """A main turn, and one on the side."""
    made = sample(sample_id(), node([3, 4]), node([5]))
    first, second = made.turns
    return made._replace(turns=(first, second._replace(untrained=True)))


class Stage:
    """One session; what the gateway and the agent's process do is set by the test."""

    def __init__(self, payload: bytes | None = None, **settings: Any) -> None:
        self.agent = AgentConfig.model_construct(name="solver", **settings)
        self.payload = encode_payload([trajectory()]) if payload is None else payload
        self.ends: list[SessionEnd] = []
        self.tasks: list[AgentTask] = []
        self.cancelled: list[SessionId] = []
        self.at_cancel: AgentOutcome | None = AgentOutcome("cancelled")  # None: it does not answer
        self.ended_by_gateway: SessionEnd | None = None  # by a limit
        self.outcome: asyncio.Future[AgentOutcome] = asyncio.get_running_loop().create_future()
        self.results: asyncio.Queue[Trajectory | str] = asyncio.Queue()
        self.gateway = MagicMock(open=AsyncMock(return_value=("http://g", True)), end=self._end)
        self.begun, self.ended = asyncio.Event(), asyncio.Event()
        self.turns: Any = MagicMock(has_turn=MagicMock(return_value=True), end=lambda _: self.ended.set())
        self.servers = MagicMock(check=AsyncMock())
        self.checked: list[tuple[Sequence[ServerAccess], int]] = []
        self.servers.lend.return_value.__aenter__.return_value = (ENVIRONMENT,)
        self.group = pending(0, 1)
        self.group.prompt = replace(self.group.prompt, agent="solver")
        self.sessions: AgentSessions

    async def _end(self, id: SessionId, end: SessionEnd) -> tuple[SessionEnd, bytes]:
        assert id == ID
        self.ends.append(end)
        return self.ended_by_gateway or end, self.payload

    async def _run(self, task: AgentTask) -> AgentOutcome:
        self.tasks.append(task)
        self.begun.set()
        return await self.outcome

    async def _cancel(self, id: SessionId) -> None:
        self.cancelled.append(id)
        if self.at_cancel is not None and not self.outcome.done():
            self.outcome.set_result(self.at_cancel)

    async def _receive(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        assert payload == encode_payload(samples)
        self.results.put_nowait(samples[0])

    async def _lose(self, group: PendingGroup, id: SampleId, reason: str) -> None:
        assert (group, id) == (self.group, ID.sample)
        self.results.put_nowait(reason)

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[BackgroundWork]:
        link = MagicMock(client=self.gateway)
        gateways = MagicMock(choose=AsyncMock(return_value=link))
        gateways.place.return_value.__aenter__.return_value = link
        hosts = AgentHosts()
        hosts.add(MagicMock(run=self._run, cancel=self._cancel), {"solver": 1})
        agents = {"solver": self.agent}
        self.sessions = AgentSessions(
            agents, gateways, hosts, self.servers, self.turns, self._receive, self._lose, model="toy"
        )
        self.sessions.submit([self.group])

        async def run() -> None:
            async with asyncio.TaskGroup() as tasks:
                self.sessions.start(tasks)

        work = BackgroundWork(run())
        try:
            yield work
        finally:
            await work.end()

    async def play(self, outcome: AgentOutcome) -> Trajectory | str:
        self.outcome.set_result(outcome)
        async with self.playing() as work:
            return await work.wait_for(self.results.get())


def weights(result: Trajectory | str) -> list[bool]:
    assert isinstance(result, Trajectory)

    def weighs(turn: Turn) -> bool:
        return not turn.untrained

    return list(map(weighs, result.turns))


def score_of(result: Trajectory | str) -> float | str:
    return result if isinstance(result, str) else result.score


@pytest.mark.parametrize(
    ("train", "expected"),
    [("main", [True, False]), ("side", [False, True]), ("all", [True, True])],
)
async def test_the_agent_chooses_the_conversations_that_train(train: str, expected: list[bool]) -> None:
    stage = Stage(train=train)
    assert weights(await stage.play(AgentOutcome())) == expected
    assert stage.ends == [SessionEnd.DONE]
    [task] = stage.tasks
    assert (task.session, task.url, task.agent, task.model) == (ID, "http://g", "solver", "toy")
    assert task.agent_key != task.reward_key
    assert len(task.agent_key) > 30


@pytest.mark.parametrize(
    ("outcome", "end"),
    [
        (AgentOutcome("ValueError: x"), SessionEnd.AGENT_FAILED),
        (AgentOutcome("Broken: y", environment_failed=True), SessionEnd.ENVIRONMENT_FAILED),
    ],
)
async def test_on_end_says_what_becomes_of_a_failure(outcome: AgentOutcome, end: SessionEnd) -> None:
    name = end.value.replace(" ", "_")
    assert await Stage().play(outcome) == f"{end.value}: {outcome.cause}"  # replaced by default
    for what, expected in (("train", [True, False]), ("weight_0", [False, False])):
        stage = Stage(on_end=SessionEndsConfig.model_validate({name: what}))
        assert weights(await stage.play(outcome)) == expected
        assert stage.ends == [end]


async def test_a_sessions_servers_are_checked_before_its_next_attempt_if_they_failed() -> None:
    for outcome, checked in ((AgentOutcome("x"), []), (AgentOutcome("y", environment_failed=True), [1])):
        stage = Stage()
        stage.servers.check.side_effect = lambda servers, stage=stage: stage.checked.append(
            (servers, stage.results.qsize())
        )
        await stage.play(outcome)
        assert stage.tasks[0].servers == (ENVIRONMENT,)
        assert stage.checked == [((ENVIRONMENT,), 0) for _ in checked]


async def test_what_an_agent_leaves_is_for_graders() -> None:
    sample = await Stage().play(AgentOutcome(environment={"mine.py": "x = 1"}))
    assert isinstance(sample, Trajectory)
    assert sample.environment == {"mine.py": "x = 1"}


async def test_a_session_without_a_turn_is_no_sample() -> None:
    assert await Stage(payload=b"").play(AgentOutcome()) == "done: its agent asked for no turn"


async def test_a_missing_reward_is_an_error() -> None:
    reason = await Stage(reward="session").play(AgentOutcome())
    assert reason == "no reward: its session ended (done) before one was set"


REWARDED = encode_payload([trajectory().add_reward(TurnReward(WHOLE, 0.5, {"session": 0.5}))])
STOPPED = AgentOutcome("PermissionDeniedError: this session has ended")


@pytest.mark.parametrize("limit", [SessionEnd.TURNS, SessionEnd.TOKENS, SessionEnd.VERSIONS])
async def test_a_limit_of_the_gateway_takes_no_reward_away(limit: SessionEnd) -> None:
    for payload, outcome, score in (
        (REWARDED, STOPPED, 0.5),
        (None, AgentOutcome(reward=0.25), 0.25),
        (REWARDED, AgentOutcome(reward=0.25), 0.75),
        (None, STOPPED, f"no reward: its session ended ({limit.value}) before one was set"),
    ):
        for what, expected in (("train", [True, False]), ("weight_0", [False, False])):
            on_end = SessionEndsConfig.model_validate({limit.value: what})
            stage = Stage(payload, reward="session", on_end=on_end)
            stage.ended_by_gateway = limit
            result = await stage.play(outcome)
            assert score_of(result) == score
            assert isinstance(result, str) or weights(result) == expected


@pytest.mark.parametrize("limit", [SessionEnd.SECONDS, SessionEnd.AGE])
async def test_an_agent_that_is_out_of_time_keeps_its_reward(
    limit: SessionEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.coordinator.rollouts.agent_sessions.STOP_S", 0.01)
    for payload, at_cancel, score in (
        (REWARDED, AgentOutcome("cancelled"), 0.5),
        (None, AgentOutcome(reward=0.25), 0.25),
        (REWARDED, None, 0.5),
        (None, None, f"no reward: its session ended ({limit.value}) before one was set"),
    ):
        stage = Stage(payload, reward="session", max_seconds=0.01 if limit is SessionEnd.SECONDS else 0)
        stage.at_cancel = at_cancel
        async with stage.playing() as work:
            await stage.begun.wait()
            if limit is SessionEnd.AGE:
                stage.sessions.cut([stage.group])
            assert score_of(await work.wait_for(stage.results.get())) == score
        assert stage.ends == [limit]


async def test_a_session_that_is_cut_ends_with_the_turns_that_it_has() -> None:
    stage = Stage()
    async with stage.playing() as work:
        await stage.begun.wait()
        stage.turns.has_turn.return_value = False
        stage.sessions.cut([stage.group])  # nothing to train on yet: it goes on
        stage.turns.has_turn.return_value = True
        stage.sessions.cut([stage.group])
        assert weights(await work.wait_for(stage.results.get())) == [True, False]
    assert stage.ends == [SessionEnd.AGE]
    assert stage.cancelled == [ID]


async def test_a_session_has_its_time() -> None:
    stage = Stage(max_seconds=0.01)
    async with stage.playing() as work:
        assert weights(await work.wait_for(stage.results.get())) == [True, False]
    assert stage.ends == [SessionEnd.SECONDS]
    assert stage.cancelled == [ID]


async def test_a_cancelled_group_ends_its_sessions() -> None:
    stage = Stage()
    async with stage.playing():
        await stage.begun.wait()
        stage.sessions.cancel(ID.sample.group)
        await stage.ended.wait()
    assert stage.ends == [SessionEnd.CANCELLED]
    assert stage.cancelled == [ID]
    assert stage.results.empty()


async def test_gateways_that_are_away_cost_no_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.coordinator.rollouts.agent_sessions.RETRY_S", 0)
    stage = Stage()
    stage.gateway.open.side_effect = [ServiceUnavailableError("gone"), ("http://g", False)]
    assert weights(await stage.play(AgentOutcome())) == [True, False]
    assert stage.tasks[0].agent_key == ""  # it is open already, with keys that its agent has
