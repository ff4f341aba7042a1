"""Sends turns to replicas, receives them, and reports lost ones."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import aclosing
from typing import Generic

from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.fleet.routing import ContextWork
from atoll.coordinator.rollouts.generate_call import GenerateCall, W
from atoll.runtime.clients.rollout import Arrival
from atoll.runtime.errors import AtollError, ProtocolError, UserError
from atoll.wire.types import TurnId

log = logging.getLogger(__name__)


class Dispatch(Generic[W]):
    """Of works of one kind: the groups of single turns, or the turns of sessions."""

    def __init__(
        self,
        replicas: Replicas,
        deliver: Callable[[Arrival], Awaitable[None]],
        lose: Callable[[W, Sequence[TurnId], str], Awaitable[None]],
        is_wanted: Callable[[W], bool],
        *,
        model: str,
        sample_timeout_s: float,
        timeout_s: float,
    ) -> None:
        """`deliver` is called with finished turns; `lose` with turns that were not delivered, at the latest
        `sample_timeout_s` after they were sent, and the reason: it may put the work back. What is not wanted
        any more is not put back.
        """
        self._replicas = replicas
        self._deliver = deliver
        self._lose = lose
        self._is_wanted = is_wanted
        self._model = model
        self._sample_timeout_s = sample_timeout_s
        self._timeout_s = timeout_s
        self._waiting: OrderedDict[Hashable, W] = OrderedDict()  # waiting for a replica with room
        self._filled = asyncio.Event()
        self._calls: dict[Hashable, list[GenerateCall[W]]] = {}  # calls by work
        self._ended = asyncio.Event()  # a call has
        self._sending: asyncio.Task[None] | None = None
        self._aborts: set[asyncio.Task[None]] = set()

    def submit(self, works: Sequence[W]) -> None:
        self._waiting.update((work.key, work) for work in works)
        self._filled.set()

    def put_back(self, works: Sequence[W]) -> None:
        """Before all that waits: they were submitted earlier."""
        for work in reversed(works):
            if self._is_wanted(work):
                self._waiting[work.key] = work
                self._waiting.move_to_end(work.key, last=False)
                self._filled.set()

    def cancel(self, key: Hashable, reason: str) -> None:
        """Frees the work's slots on replicas."""
        self._waiting.pop(key, None)
        for call in self._calls.get(key, ()):
            [prefix] = {work.id_prefix for work in call.works if work.key == key}
            task = asyncio.create_task(self._abort(call.replica, prefix, reason))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, replica: Replica, prefix: str, reason: str) -> None:
        """In the background: a replica that does not answer delays nothing else."""
        log.info("asking %s to abort %s: %s", replica.entry.name, prefix, reason)
        try:
            await replica.client.abort(prefix)
        except AtollError as error:
            log.warning("%s did not abort %s: %s", replica.entry.name, prefix, error)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._sending = tasks.create_task(self._send(tasks))

    async def finish_running(self) -> None:
        """Sends nothing more; returns once all calls have ended."""
        if self._sending is not None:
            self._sending.cancel()
        while self._calls:
            self._ended.clear()
            await self._ended.wait()

    def stop(self) -> None:
        """Once the tasks have ended: nobody waits for what is being aborted, either."""
        for abort in self._aborts:
            abort.cancel()

    async def _send(self, tasks: asyncio.TaskGroup) -> None:
        """Consumes works, oldest first; waits for one, and for a replica with room; unblocked by `submit`,
        by what is put back, by finished turns and by joins.
        """
        while True:
            await self._filled.wait()
            await self._replicas.wait_for_room(self._timeout_s)
            offered: dict[ContextWork, W] = {}
            for replica, demands in self._replicas.share(self._offer(offered)).items():
                together = []
                for demand in demands:
                    work = offered[demand]
                    del self._waiting[work.key]
                    if work.sent_alone:
                        tasks.create_task(self._follow(GenerateCall(replica, [work])))
                    else:
                        together.append(work)
                if together:
                    tasks.create_task(self._follow(GenerateCall(replica, together)))
            if not self._waiting:
                self._filled.clear()

    def _offer(self, offered: dict[ContextWork, W]) -> Iterator[ContextWork]:
        """What waits, in order; as much as is looked at is put into `offered`."""
        for work in self._waiting.values():
            demand = work.demand()
            offered[demand] = work
            yield demand

    async def _follow(self, call: GenerateCall[W]) -> None:
        """Consumes one Generate call; waits for its replica, up to the call's deadline; unblocked by messages
        and the replica's loss. Reports what was not delivered.
        """
        for work in call.works:
            self._calls.setdefault(work.key, []).append(call)
        try:
            async with aclosing(self._arrivals(call)) as arrivals:
                async for arrival in arrivals:
                    context_tokens = len(arrival.samples) * call.context_tokens
                    self._replicas.record_finished(call.replica, arrival, context_tokens)
                    await self._deliver(arrival)
        finally:
            self._replicas.record_released(call.replica, len(call), len(call) * call.context_tokens)
            for work in call.works:
                self._calls[work.key].remove(call)
                if not self._calls[work.key]:
                    del self._calls[work.key]
            self._ended.set()
        lost = list(call.lost())
        if call.is_refused and len(call.works) > 1:  # caused by one of them
            for work, _ in lost:
                work.sent_alone = True
            self.put_back([work for work, _ in lost])
            return
        if lost:
            log.info("turns of %d groups or sessions were lost: %s", len(lost), call.reason)
        for work, ids in lost:
            await self._lose(work, ids, call.reason)

    async def _arrivals(self, call: GenerateCall[W]) -> AsyncGenerator[Arrival, None]:
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
                if len(call.works) == 1:
                    self._replicas.note_refusal(replica, call.works[0].demand().group, error)
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
