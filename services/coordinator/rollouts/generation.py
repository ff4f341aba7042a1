"""Prompts in, scored groups out: generates single turns or agent sessions, and grades them."""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from atoll.config.schema import AgentConfig
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.replicas import Replicas
from atoll.coordinator.journal.journal import OpenSession
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rollouts.agent_sessions import AgentSessions
from atoll.coordinator.rollouts.dispatch import Dispatch
from atoll.coordinator.rollouts.grading import Grading
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import GroupsInFlight, GroupSink
from atoll.coordinator.rollouts.session_servers import SessionServers
from atoll.coordinator.rollouts.session_turns import SessionTurns
from atoll.runtime.clients.rollout import Arrival
from atoll.wire.types import FinishReason, GroupId, SampleId, Trajectory, TurnId

log = logging.getLogger(__name__)


class Generation:
    """A Producer: dispatch or sessions before grading."""

    def __init__(
        self,
        replicas: Replicas,
        rewards: Rewards,
        agents: Mapping[str, AgentConfig],
        hosts: AgentHosts,
        gateways: Gateways,
        servers: SessionServers,
        *,
        model: str,
        max_attempts: int,
        sample_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`timeout_s` bounds how long no replica may be there."""
        self._replicas = replicas
        self._agents = agents
        self._gateways = gateways
        self._max_attempts = max_attempts
        self._groups = GroupsInFlight()
        self._grading = Grading(rewards, self._groups, self._drop)
        self._dispatch = Dispatch[PendingGroup](
            replicas,
            self._receive,
            self._lose_turns,
            lambda group: group.prompt.id in self._groups,
            model=model,
            sample_timeout_s=sample_timeout_s,
            timeout_s=timeout_s,
        )
        self._turns = SessionTurns(
            replicas,
            self._record,
            model=model,
            max_attempts=max_attempts,
            sample_timeout_s=sample_timeout_s,
            timeout_s=timeout_s,
        )
        self._sessions = AgentSessions(
            agents, gateways, hosts, servers, self._turns, self._accept, self._lose_session, model=model
        )

    def submit(self, groups: Sequence[PendingGroup], sink: GroupSink) -> None:
        for group in groups:
            self._groups.add(group, sink)
            self._grade(
                group,
                [
                    sample
                    for sample, graded in zip(group.samples, group.graded, strict=True)
                    if sample is not None and not graded
                ],
            )
        self._generate([group for group in groups if group.missing])

    def cancel(self, id: GroupId, reason: str) -> None:
        self._groups.remove(id)
        self._dispatch.cancel(id, reason)
        self._sessions.cancel(id)

    def cut(self, groups: Sequence[PendingGroup]) -> None:
        self._sessions.cut(groups)

    async def finish_running(self) -> None:
        """Returns once replicas have delivered the single turns that they are generating; no other is begun.
        The journal lets agents' open sessions continue."""
        await self._dispatch.finish_running()

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the replicas since the last call."""
        return self._replicas.take_metrics()

    async def run(self) -> None:
        """Consumes what is submitted; runs until cancelled; an error of any part ends all."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._dispatch.start(tasks)
                self._turns.start(tasks)
                self._sessions.start(tasks)
                self._grading.start(tasks)
                self._gateways.serve(self._turns.want, self._turns.leave)
        finally:
            self._gateways.serve(None)
            self._dispatch.stop()
            self._turns.stop()
            self._sessions.stop()

    def _generate(self, groups: Sequence[PendingGroup]) -> None:
        self._dispatch.submit([group for group in groups if not group.prompt.agent])
        self._sessions.submit([group for group in groups if group.prompt.agent])

    def _grade(self, group: PendingGroup, samples: Sequence[Trajectory]) -> None:
        agent = self._agents.get(group.prompt.agent)
        if agent is not None and agent.reward == "session":
            self._grading.keep_rewards(samples)
        else:
            self._grading.submit(samples)

    async def _receive(self, arrival: Arrival) -> None:
        finished = [sample for sample in arrival.samples if sample.finish_reason is not FinishReason.ABORT]
        await self._accept(finished, arrival.payload)

    async def _accept(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        """Accepts the first finished attempt of each sample and queues it for grading."""
        accepted: dict[GroupSink, list[tuple[PendingGroup, Trajectory]]] = {}
        for sample in samples:
            if known := self._groups.find(sample.id.group):  # if not, it was cancelled or dropped
                group, sink = known
                if group.accept(sample):
                    accepted.setdefault(sink, []).append((group, sample))
        for sink, finished in accepted.items():
            await sink.on_finished([sample for _, sample in finished], payload)
            for group, sample in finished:
                self._grade(group, [sample])

    async def _record(self, session: OpenSession) -> bool:
        known = self._groups.find(session.id.group)
        if known is None:
            return False
        group, sink = known
        if not group.note_session(session.id.index, session.attempt, session.version):
            return False
        return await sink.on_session(session)

    async def _lose_turns(self, group: PendingGroup, lost: Sequence[TurnId], reason: str) -> None:
        if await self._begin_next_attempt(group, [id.sample for id in lost], reason):
            self._dispatch.put_back([group])

    async def _lose_session(self, group: PendingGroup, sample: SampleId, reason: str) -> None:
        log.warning("sample %s, attempt %d: %s", sample, group.attempts[sample.index], reason)
        if await self._begin_next_attempt(group, [sample], reason):
            self._sessions.submit([group])

    async def _begin_next_attempt(
        self, group: PendingGroup, samples: Sequence[SampleId], reason: str
    ) -> bool:
        """At each of these samples, up to `max_attempts`; False: the group is not wanted any more."""
        known = self._groups.find(group.prompt.id)
        if known is None:
            return False
        _, sink = known
        indices = [sample.index for sample in samples]
        group.begin_next_attempt(indices)
        for index in indices:
            group.failures[index] += 1
        if max(group.failures) >= self._max_attempts:
            await self._drop(group, sink, f"{self._max_attempts} attempts failed, the last: {reason}")
            return False
        await sink.on_retried(samples, reason)
        return group.prompt.id in self._groups

    async def _drop(self, group: PendingGroup, sink: GroupSink, reason: str) -> None:
        """Groups are dropped as a whole, never shrunk."""
        log.warning("dropped group %s: %s", group.prompt.id, reason)
        self.cancel(group.prompt.id, reason)
        await sink.on_dropped(group, reason)
