"""Sends turns to replicas, receives them, and resends lost ones."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.rollouts.generate_call import GenerateCall
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import GroupsInFlight, GroupSink
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import AtollError, ProtocolError, UserError
from atoll.wire.types import GroupId, SampleId

log = logging.getLogger(__name__)

Drop = Callable[[PendingGroup, GroupSink, str], Awaitable[None]]


class Dispatch:
    def __init__(
        self,
        replicas: Replicas,
        groups: GroupsInFlight,
        receive: Callable[[Arrival], Awaitable[None]],
        drop: Drop,
        *,
        model: str,
        max_attempts: int,
        sample_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`receive` is called with finished samples. `drop` removes a group after `max_attempts` failed
        attempts at one sample, with the reason. An attempt fails `sample_timeout_s` after it was sent.
        """
        self._replicas = replicas
        self._groups = groups
        self._deliver = receive
        self._drop = drop
        self._model = model
        self._max_attempts = max_attempts
        self._sample_timeout_s = sample_timeout_s
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[GroupId, PendingGroup] = OrderedDict()  # waiting for a replica with room
        self._filled = asyncio.Event()
        self._calls: dict[GroupId, list[GenerateCall]] = {}  # calls by group
        self._aborts: set[asyncio.Task[None]] = set()

    def submit(self, groups: Sequence[PendingGroup]) -> None:
        """Generates the missing samples of groups in flight."""
        self._waiting.update((group.prompt.id, group) for group in groups if group.missing)
        self._filled.set()

    def cancel(self, id: GroupId, reason: str) -> None:
        """Frees the group's slots on replicas."""
        self._waiting.pop(id, None)
        for call in self._calls.get(id, ()):
            task = asyncio.create_task(self._abort(call.replica, id, reason))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, replica: Replica, id: GroupId, reason: str) -> None:
        """In the background: a replica that does not answer delays nothing else."""
        log.info("asking %s to abort group %s: %s", replica.entry.name, id, reason)
        try:
            await replica.client.abort(f"{id}/")
        except AtollError as error:
            log.warning("%s did not abort group %s: %s", replica.entry.name, id, error)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        tasks.create_task(self._send(tasks))

    def stop(self) -> None:
        """Once the tasks have ended: nobody waits for what is being aborted, either."""
        for abort in self._aborts:
            abort.cancel()

    async def _send(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes groups to send, oldest first; waits for one, and for a replica with room;
        unblocked by `submit`, by what is lost, by finished samples and by joins.
        """
        while True:
            await self._filled.wait()
            await self._replicas.wait_for_room(self._timeout_s)
            waiting = (group.work() for group in self._waiting.values())
            for replica, ids in self._replicas.share(waiting).items():
                together = []
                for id in ids:
                    group = self._waiting.pop(id)
                    if group.sent_alone:
                        tasks.create_task(self._follow(GenerateCall(replica, [group])))
                    else:
                        together.append(group)
                if together:
                    tasks.create_task(self._follow(GenerateCall(replica, together)))
            if not self._waiting:
                self._filled.clear()

    async def _follow(self, call: GenerateCall) -> None:
        """Consumes one Generate call; waits for its replica, up to the call's deadline; unblocked by messages
        and the replica's loss. Resends what was not delivered.
        """
        for group in call.groups:
            self._calls.setdefault(group.prompt.id, []).append(call)
        try:
            async with aclosing(self._arrivals(call)) as arrivals:
                async for arrival in arrivals:
                    prompt_tokens = len(arrival.samples) * call.prompt_tokens
                    self._replicas.record_finished(call.replica, arrival, prompt_tokens)
                    await self._deliver(arrival)
        finally:
            self._replicas.record_released(call.replica, len(call), len(call) * call.prompt_tokens)
            for group in call.groups:
                self._calls[group.prompt.id].remove(call)
                if not self._calls[group.prompt.id]:
                    del self._calls[group.prompt.id]
        lost = [(group, indices) for group, indices in call.lost_indices() if indices]
        if call.is_refused and len(call.groups) > 1:  # caused by one of them
            for group, _ in lost:
                group.sent_alone = True
            self._put_back([group for group, _ in lost])
            return
        if lost:
            log.info("generating missing samples of %d groups again: %s", len(lost), call.reason)
        for group, indices in lost:
            await self._retry(group, indices, call.reason)

    async def _arrivals(self, call: GenerateCall) -> AsyncGenerator[Arrival, None]:
        """Yields what the replica sends; ends with the call, its deadline or the replica's first error.

        A lost stream is joined again as long as something arrives, since the replica may still generate. At
        the deadline it is closed, which ends its samples there; health judges the replica, not this.
        Never raises: `call` records the reason.
        """
        replica, name, may_join = call.replica, call.replica.entry.name, True
        deadline = asyncio.get_running_loop().time() + self._sample_timeout_s
        while call:
            try:
                async with aclosing(replica.client.generate(self._model, call.requests())) as stream:
                    while arrival := await replica.next(stream, deadline):
                        call.accept(arrival)
                        may_join = True
                        yield arrival
                return
            except TimeoutError:
                limit = f"coordinator.sample_timeout_s = {self._sample_timeout_s:g}"
                call.reason = f"timed out: {name} did not finish it within {limit}"
                return
            except UserError as error:
                call.is_refused, call.reason = True, f"{name} refused it: {error}"
                if len(call.groups) == 1:
                    self._replicas.note_refusal(replica, call.groups[0].prompt.id, error)
                return
            except AtollError as error:
                call.reason = f"lost with {name}: {error}"
                if isinstance(error, ProtocolError):
                    self._replicas.blame(replica, error)
                elif may_join and replica.is_joinable_after(error):
                    may_join = False
                    log.warning("rejoining a stream of %s: %s", name, error)
                    continue
                else:
                    self._replicas.suspend(replica, error)
                return

    async def _retry(self, group: PendingGroup, indices: Sequence[int], reason: str) -> None:
        known = self._groups.find(group.prompt.id)
        if not indices or known is None:
            return
        _, sink = known
        group.begin_next_attempt(indices)
        for index in indices:
            group.failures[index] += 1
        if max(group.failures) >= self._max_attempts:
            await self._drop(group, sink, f"{self._max_attempts} attempts failed, the last: {reason}")
            return
        await sink.on_retried([SampleId(group.prompt.id, index) for index in indices], reason)
        if group.prompt.id not in self._groups:
            return  # dropped in the meantime
        self._put_back([group])

    def _put_back(self, groups: Sequence[PendingGroup]) -> None:
        for group in reversed(groups):
            if group.prompt.id in self._groups:
                self._waiting[group.prompt.id] = group
                self._waiting.move_to_end(group.prompt.id, last=False)  # issued earlier than the waiting ones
                self._filled.set()
