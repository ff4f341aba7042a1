"""Prompts in, scored groups out: sends, receives, sends again what was lost, has samples graded.

How they are graded is in grading.py.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing

from services.coordinator.grading import Grading
from services.coordinator.groups import InFlight, PendingGroup, Sink
from services.coordinator.replicas import Replica, Replicas
from services.coordinator.rewards import Rewards
from services.runtime.clients import Arrival
from services.runtime.errors import AtollError, StaleFenceError, StoreError
from services.wire.types import FinishReason, GroupId, Sample, SampleId

log = logging.getLogger(__name__)


class Generation:
    def __init__(
        self, replicas: Replicas, rewards: Rewards, *, model: str, max_attempts: int, timeout_s: float
    ) -> None:
        self._replicas = replicas
        self._model = model
        self._max_attempts = max_attempts
        self._timeout_s = timeout_s
        self._groups: InFlight = {}
        self._grading = Grading(rewards, self._groups, self._drop)
        self._waiting: OrderedDict[GroupId, PendingGroup] = OrderedDict()  # for a replica with room
        self._filled = asyncio.Event()

    def submit(self, groups: Sequence[PendingGroup], sink: Sink) -> None:
        """Generates and grades whatever the groups lack."""
        for group in groups:
            self._groups[group.prompt.id] = (group, sink)
            self._grading.submit(
                sample
                for sample, graded in zip(group.samples, group.graded, strict=True)
                if sample is not None and not graded
            )
        self._waiting.update((group.prompt.id, group) for group in groups if group.missing)
        self._filled.set()

    async def cancel(self, id_prefix: str) -> None:
        """Forgets every group whose id starts with the prefix and frees its slots on the replicas."""
        for id in [id for id in self._groups if f"{id}/".startswith(id_prefix)]:
            del self._groups[id]
            self._waiting.pop(id, None)
        for replica in self._replicas:
            try:
                await replica.client.abort(id_prefix)
            except AtollError as error:
                self._replicas.suspend(replica, error)

    def take_metrics(self) -> dict[str, float]:
        """Of the replicas, since the last call."""
        return self._replicas.take_metrics()

    async def run(self) -> None:
        """Runs until cancelled; an error of any part ends all of it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(tasks))
            self._grading.start(tasks)

    async def _send(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes groups to send, oldest first; waits for one, and for a replica with room; unblocked by
        `submit`, by what is lost, by finished samples and by joins."""
        while True:
            await self._filled.wait()
            await self._replicas.wait_for_room(self._timeout_s)
            for replica, groups in self._replicas.share(self._waiting).items():
                for group in groups:
                    del self._waiting[group.prompt.id]
                tasks.create_task(self._follow(replica, groups))
            if not self._waiting:
                self._filled.clear()

    async def _follow(self, replica: Replica, groups: Sequence[PendingGroup]) -> None:
        """Consumes one Generate stream; what it did not deliver is sent again."""
        requests = [request for group in groups for request in group.requests()]
        attempts = [{index: group.attempts[index] for index in group.missing} for group in groups]
        for group, asked in zip(groups, attempts, strict=True):
            for index in asked:
                group.oldest[index] = replica.version.number
        expected = sum(map(len, attempts))
        prompt_tokens = sum(len(group.prompt.token_ids) for group in groups) / expected  # a sample's part
        reason = "the replica ended the stream without it"
        try:
            async with aclosing(replica.client.generate(self._model, requests)) as stream:
                while arrival := await replica.next(stream):
                    expected -= len(arrival.samples)
                    self._replicas.finished(replica, arrival, len(arrival.samples) * prompt_tokens)
                    await self._receive(arrival)
        except AtollError as error:
            if isinstance(error, ValueError | StoreError | StaleFenceError):
                raise  # no replica would take the request, or what has arrived is not in the journal
            reason = f"lost with {replica.entry.name}: {error}"
            self._replicas.suspend(replica, error)
        finally:
            self._replicas.released(replica, expected, expected * prompt_tokens)
        for group, asked in zip(groups, attempts, strict=True):
            lost = [
                index
                for index, attempt in asked.items()
                if group.samples[index] is None and group.attempts[index] == attempt
            ]
            await self._retry(group, lost, reason)

    async def _receive(self, arrival: Arrival) -> None:
        """Accepts the first finished attempt of each sample and queues it for grading."""
        accepted: dict[Sink, list[Sample]] = {}
        for sample in arrival.samples:
            if not (known := self._groups.get(sample.id.group)):
                continue  # cancelled or dropped in the meantime
            group, sink = known
            if sample.finish_reason is not FinishReason.ABORT and group.accept(sample):
                accepted.setdefault(sink, []).append(sample)
        for sink, finished in accepted.items():
            await sink.finished(finished, arrival.payload)
            self._grading.submit(finished)

    async def _retry(self, group: PendingGroup, indices: Sequence[int], reason: str) -> None:
        if not indices or group.prompt.id not in self._groups:
            return
        _, sink = self._groups[group.prompt.id]
        group.again(indices)
        for index in indices:
            group.failures[index] += 1
        if max(group.failures) >= self._max_attempts:
            await self._drop(group, sink, f"{self._max_attempts} attempts failed, the last: {reason}")
            return
        await sink.retried([SampleId(group.prompt.id, index) for index in indices], reason)
        if group.prompt.id not in self._groups:
            return  # dropped meanwhile
        self._waiting[group.prompt.id] = group
        self._waiting.move_to_end(group.prompt.id, last=False)  # it was issued before what waits
        self._filled.set()

    async def _drop(self, group: PendingGroup, sink: Sink, reason: str) -> None:
        """A group is dropped whole, never shrunk."""
        log.warning("group %s is dropped: %s", group.prompt.id, reason)
        await self.cancel(f"{group.prompt.id}/")
        await sink.dropped(group, reason)
