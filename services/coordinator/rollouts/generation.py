"""Prompts in, scored groups out: each sample is one turn of a replica, and graded."""

import asyncio
import logging
from collections.abc import Sequence

from atoll.coordinator.fleet.replicas import Replicas
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rollouts.dispatch import Dispatch
from atoll.coordinator.rollouts.grading import Grading
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import GroupsInFlight, GroupSink
from atoll.runtime.clients.rollout import Arrival
from atoll.wire.types import FinishReason, GroupId, Trajectory, TurnId

log = logging.getLogger(__name__)


class Generation:
    """A Producer: dispatch before grading."""

    def __init__(
        self,
        replicas: Replicas,
        rewards: Rewards,
        *,
        model: str,
        max_attempts: int,
        sample_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`timeout_s` bounds how long no replica may be there."""
        self._replicas = replicas
        self._max_attempts = max_attempts
        self._groups = GroupsInFlight()
        self._grading = Grading(rewards, self._groups, self._drop)
        self._dispatch = Dispatch[PendingGroup](
            replicas,
            self._receive,
            self._lose,
            lambda group: group.prompt.id in self._groups,
            model=model,
            sample_timeout_s=sample_timeout_s,
            timeout_s=timeout_s,
        )

    def submit(self, groups: Sequence[PendingGroup], sink: GroupSink) -> None:
        for group in groups:
            self._groups.add(group, sink)
            self._grading.submit(
                sample
                for sample, graded in zip(group.samples, group.graded, strict=True)
                if sample is not None and not graded
            )
        self._dispatch.submit([group for group in groups if group.missing])

    def cancel(self, id: GroupId, reason: str) -> None:
        self._groups.remove(id)
        self._dispatch.cancel(id, reason)

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the replicas since the last call."""
        return self._replicas.take_metrics()

    async def run(self) -> None:
        """Consumes what is submitted; runs until cancelled; an error of either part ends both."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._dispatch.start(tasks)
                self._grading.start(tasks)
        finally:
            self._dispatch.stop()

    async def _receive(self, arrival: Arrival) -> None:
        """Accepts the first finished attempt of each sample and queues it for grading."""
        accepted: dict[GroupSink, list[Trajectory]] = {}
        for sample in arrival.samples:
            if not (known := self._groups.find(sample.id.group)):
                continue  # cancelled or dropped
            group, sink = known
            if sample.finish_reason is not FinishReason.ABORT and group.accept(sample):
                accepted.setdefault(sink, []).append(sample)
        for sink, finished in accepted.items():
            await sink.on_finished(finished, arrival.payload)
            self._grading.submit(finished)

    async def _lose(self, group: PendingGroup, lost: Sequence[TurnId], reason: str) -> None:
        """Begins the next attempt at the samples, up to `max_attempts` of each."""
        known = self._groups.find(group.prompt.id)
        if known is None:
            return
        _, sink = known
        indices = [id.sample.index for id in lost]
        group.begin_next_attempt(indices)
        for index in indices:
            group.failures[index] += 1
        if max(group.failures) >= self._max_attempts:
            await self._drop(group, sink, f"{self._max_attempts} attempts failed, the last: {reason}")
            return
        await sink.on_retried([id.sample for id in lost], reason)
        self._dispatch.put_back([group])

    async def _drop(self, group: PendingGroup, sink: GroupSink, reason: str) -> None:
        """Groups are dropped as a whole, never shrunk."""
        log.warning("dropped group %s: %s", group.prompt.id, reason)
        self.cancel(group.prompt.id, reason)
        await sink.on_dropped(group, reason)
