"""Samples by agents: each attempt is a gateway session in which an agent requests turns."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from atoll.config.schema import AgentConfig
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.session_servers import SessionServers
from atoll.coordinator.rollouts.session_turns import SessionTurns
from atoll.runtime.clients.agents import AgentsClient
from atoll.runtime.errors import AtollError, ServiceUnavailableError, UserError
from atoll.wire.codec.trajectories import decode_payload, encode_payload
from atoll.wire.types import (
    WHOLE,
    AgentOutcome,
    AgentTask,
    GroupId,
    SampleId,
    ServerAccess,
    SessionEnd,
    SessionId,
    SessionLimits,
    SessionSpec,
    Trajectory,
    TurnReward,
)

log = logging.getLogger(__name__)

RETRY_S: Final = 0.5  # before a gateway is asked again to open or end a session
STOP_S: Final = 10.0  # for a cancelled agent's outcome, which a live process has within five

Receive = Callable[[Sequence[Trajectory], bytes], Awaitable[None]]
Lose = Callable[[PendingGroup, SampleId, str], Awaitable[None]]


@dataclass(eq=False, slots=True)
class _Playing:
    """A sample's attempt while its agent works at it."""

    group: PendingGroup
    index: int
    id: SessionId
    cut: asyncio.Event = field(default_factory=asyncio.Event)  # it is to end with the turns that it has
    task: asyncio.Task[None] | None = None


class AgentSessions:
    def __init__(
        self,
        agents: Mapping[str, AgentConfig],
        gateways: Gateways,
        hosts: AgentHosts,
        servers: SessionServers,
        turns: SessionTurns,
        receive: Receive,
        lose: Lose,
        *,
        model: str,
    ) -> None:
        """`receive` is called with finished samples, and their bytes for the journal; `lose` with failed
        attempts and the reason."""
        self._agents = agents
        self._gateways = gateways
        self._hosts = hosts
        self._servers = servers
        self._turns = turns
        self._receive = receive
        self._lose = lose
        self._model = model
        self._sessions: dict[SessionId, _Playing] = {}
        self._submitted: asyncio.Queue[_Playing] = asyncio.Queue()
        self._farewells: set[asyncio.Task[None]] = set()

    def submit(self, groups: Sequence[PendingGroup]) -> None:
        """Sessions for the missing samples, unless they are there."""
        for group in groups:
            for index in group.missing:
                id = SessionId(SampleId(group.prompt.id, index), group.attempts[index])
                if id not in self._sessions:
                    self._sessions[id] = session = _Playing(group, index, id)
                    self._submitted.put_nowait(session)

    def cancel(self, group: GroupId) -> None:
        for session in self._of({group}):
            del self._sessions[session.id]
            if session.task is not None:
                session.task.cancel()

    def cut(self, groups: Sequence[PendingGroup]) -> None:
        """Ends their sessions with the turns that they have; those that have none continue."""
        for session in self._of({group.prompt.id for group in groups}):
            if self._turns.has_turn(session.id):
                session.cut.set()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._begin(tasks))

    def stop(self) -> None:
        for farewell in self._farewells:
            farewell.cancel()

    def _of(self, groups: set[GroupId]) -> list[_Playing]:
        return [session for id, session in self._sessions.items() if id.sample.group in groups]

    async def _begin(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes submitted sessions; waits for them; unblocked by `submit`."""
        while True:
            session = await self._submitted.get()
            if session.id in self._sessions:
                session.task = tasks.create_task(self._play(session))

    async def _play(self, session: _Playing) -> None:
        """One session from its opening to its sample, or to its loss. Waits for a free place among the
        agent's sessions, for its servers, for its agent, its limit of time, or a cut."""
        agent = self._agents[session.group.prompt.agent]
        try:
            async with self._hosts.place(agent.name) as host, self._servers.lend(agent) as servers:
                sample, reason = await self._attempt(session, agent, host, servers)
        except ServiceUnavailableError as error:
            sample, reason = None, str(error)
        self._sessions.pop(session.id, None)
        if sample is not None:
            await self._receive([sample], encode_payload([sample]))
        else:
            await self._lose(session.group, session.id.sample, reason)

    async def _attempt(
        self, session: _Playing, agent: AgentConfig, host: AgentsClient, servers: Sequence[ServerAccess]
    ) -> tuple[Trajectory | None, str]:
        """The sample; or None, and why the attempt is repeated."""
        try:
            end, outcome = await self._run(session, agent, host, servers)
            end, payload = await self._end(session.id, end)
            self._turns.end(session.id)
        except asyncio.CancelledError:
            self._say_farewell(self._give_up(session.id, host))
            raise
        except AtollError as error:
            self._say_farewell(self._give_up(session.id, host))
            return None, f"session failed: {error}"
        if outcome.environment_failed:
            await self._servers.check(servers)
        what_becomes = "train" if end is SessionEnd.DONE else agent.on_end.of(end.value)
        why = f"{end.value}: {outcome.cause}" if outcome.cause else end.value
        if not payload:
            return None, f"{why}: its agent asked for no turn"
        if what_becomes == "replace":
            return None, why
        [sample] = decode_payload(payload)
        if outcome.reward is not None:
            _check_reward(agent, outcome.reward)
            sample = sample.add_reward(TurnReward(WHOLE, outcome.reward, {"agent": outcome.reward}))
        sample = _weighed(sample, agent.reward_weight)._replace(environment=outcome.environment)
        if agent.reward == "session" and not sample.rewards:
            return None, f"no reward: its session ended ({end.value}) before one was set"
        return _with_weights(sample, agent.train if what_becomes == "train" else "none"), ""

    async def _run(
        self, session: _Playing, agent: AgentConfig, host: AgentsClient, servers: Sequence[ServerAccess]
    ) -> tuple[SessionEnd, AgentOutcome]:
        """Opens the session at a gateway, and has the agent play it; why it ended, and what the agent says. A
        gateway that dies in the midst of the opening is succeeded by another."""
        spec = SessionSpec(
            session.id,
            _new_key(),
            _new_key(),
            session.group.sampling,
            SessionLimits(agent.max_turns, agent.max_tokens),
        )
        while True:
            async with self._gateways.place() as gateway:
                try:
                    url, is_ours = await gateway.client.open(spec)
                except ServiceUnavailableError as error:
                    log.warning("session %s: retrying to open it: %s", session.id, error)
                else:
                    if not is_ours:  # its host continues with the keys it already has
                        spec = replace(spec, agent_key="", reward_key="")
                    task = self._task(session, spec, url, servers)
                    return await self._run_task(session, agent, host, task)
            await asyncio.sleep(RETRY_S)

    def _task(
        self, session: _Playing, spec: SessionSpec, url: str, servers: Sequence[ServerAccess]
    ) -> AgentTask:
        prompt = session.group.prompt
        return AgentTask(
            session=session.id,
            agent=prompt.agent,
            model=self._model,
            url=url,
            agent_key=spec.agent_key,
            reward_key=spec.reward_key,
            messages=prompt.messages,
            ground_truth=prompt.ground_truth,
            data_source=prompt.data_source,
            extra=prompt.extra,
            servers=tuple(servers),
        )

    async def _run_task(
        self, session: _Playing, agent: AgentConfig, host: AgentsClient, task: AgentTask
    ) -> tuple[SessionEnd, AgentOutcome]:
        self._turns.limit(session.id, agent.max_versions)
        running = asyncio.create_task(host.run(task))
        cut = asyncio.create_task(session.cut.wait())
        try:
            timeout_s = agent.max_seconds or None
            await asyncio.wait({running, cut}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                outcome = await running
                return _end_of(outcome), outcome
            end = SessionEnd.AGE if cut.done() else SessionEnd.SECONDS
            self._say_farewell(self._cancel(session.id, host))
            return end, await _last_outcome(running)
        finally:
            running.cancel()
            cut.cancel()

    async def _end(self, id: SessionId, end: SessionEnd) -> tuple[SessionEnd, bytes]:
        """Any gateway can end it; one that dies in the midst of it is succeeded by another."""
        while True:
            gateway = await self._gateways.choose()
            try:
                return await gateway.client.end(id, end)
            except ServiceUnavailableError as error:
                log.warning("session %s: retrying to end it: %s", id, error)
                await asyncio.sleep(RETRY_S)

    def _say_farewell(self, what: Coroutine[None, None, None]) -> None:
        """In the background: what does not answer delays nothing else."""
        task = asyncio.create_task(what)
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _give_up(self, id: SessionId, host: AgentsClient) -> None:
        await self._cancel(id, host)
        try:
            await self._end(id, SessionEnd.CANCELLED)
        except AtollError as error:
            log.warning("session %s was abandoned, but did not end: %s", id, error)
        self._turns.end(id)

    async def _cancel(self, id: SessionId, host: AgentsClient) -> None:
        try:
            await host.cancel(id)
        except AtollError as error:
            log.warning("session %s: its agent was not cancelled: %s", id, error)


def _end_of(outcome: AgentOutcome) -> SessionEnd:
    if outcome.environment_failed:
        return SessionEnd.ENVIRONMENT_FAILED
    return SessionEnd.AGENT_FAILED if outcome.cause else SessionEnd.DONE


async def _last_outcome(cancelled: asyncio.Task[AgentOutcome]) -> AgentOutcome:
    """What an agent leaves although it was cancelled, if anything; it did not fail."""
    await asyncio.wait({cancelled}, timeout=STOP_S)
    if not cancelled.done() or cancelled.exception():
        return AgentOutcome()
    return replace(cancelled.result(), cause="", environment_failed=False)


def _check_reward(agent: AgentConfig, returned: float) -> None:
    """Graders that nobody named would score beside the function. Raises UserError."""
    if agent.reward == "graders":
        raise UserError(
            f"agent {agent.name}: it returned {returned:g}, and reward.graders score its sessions: set "
            'reward = "session" or "both" in its [[agents]] table, or return None'
        )


def _weighed(sample: Trajectory, weight: float) -> Trajectory:
    """With what its session was rewarded with so far times `weight`; its components stay as they are."""
    if weight == 1.0:
        return sample
    rewards = tuple(reward._replace(value=weight * reward.value) for reward in sample.rewards)
    return sample._replace(rewards=rewards)


def _with_weights(sample: Trajectory, train: Literal["main", "side", "all", "none"]) -> Trajectory:
    """With its turns marked `untrained` as chosen; a gateway marks those of side conversations."""
    match train:
        case "main":
            return sample
        case "side":
            turns = [turn._replace(untrained=not turn.untrained) for turn in sample.turns]
        case "all":
            turns = [turn._replace(untrained=False) for turn in sample.turns]
        case "none":
            turns = [turn._replace(untrained=True) for turn in sample.turns]
    return sample._replace(turns=tuple(turns))


def _new_key() -> str:
    return f"atoll-{secrets.token_urlsafe(24)}"
