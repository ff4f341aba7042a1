"""Deduplicates requests: each turn is generated once, however often it is requested."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.rollout.engines.base import Completion, Engine
from atoll.runtime.errors import UserError
from atoll.wire.types import (
    BELOW_PROMPT,
    STATUS_AFTER,
    Node,
    Origin,
    Trajectory,
    Turn,
    TurnId,
    TurnRequest,
)

MAX_REMEMBERED_TOKENS = 1 << 20  # of finished samples: some 10 MB, 400 MB with experts (48 layers of 8)
LINGER_S = 0.02  # that a finished sample waits for others, to share a message
MAX_LINGER_S = 1.0
ORPHAN_TIMEOUT_S = (
    2.0  # that generation continues without a listener: a caller with a broken stream reconnects at once
)
MESSAGES_PER_S = 500  # of a large fleet, all replicas together


def linger_for(num_replicas: int) -> float:
    """How long a finished sample waits for others of its call, in a fleet of that size."""
    return min(max(num_replicas / MESSAGES_PER_S, LINGER_S), MAX_LINGER_S)


@dataclass(eq=False, slots=True)
class _Listener:
    """A call waiting for samples."""

    missing: set[TurnId] = field(default_factory=set)
    inbox: asyncio.Queue[list[Trajectory] | Exception] = field(default_factory=asyncio.Queue)

    async def next(self, expected: int, linger_s: float) -> list[Trajectory]:
        """The next samples to finish, and those of the `expected` that follow within `linger_s`."""
        samples: list[Trajectory] = []
        deadline = None
        while len(samples) < expected:
            try:
                async with asyncio.timeout_at(deadline):
                    arrived = await self.inbox.get()
            except TimeoutError:
                break
            if isinstance(arrived, Exception):
                if not samples:
                    raise arrived
                self.inbox.put_nowait(arrived)  # after what was finished before it
                break
            samples += arrived
            deadline = deadline or asyncio.get_running_loop().time() + linger_s
        return samples


@dataclass(eq=False, slots=True)
class _EngineCall:
    """One engine call and its listeners. It ends early after ORPHAN_TIMEOUT_S without any."""

    running: set[TurnId]
    listeners: set[_Listener] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class Generator:
    def __init__(self, engine: Engine, replica: str, incarnation: str, linger_s: float = LINGER_S) -> None:
        self._engine = engine
        self._linger_s = linger_s
        self._origin = Origin(replica, incarnation)
        self._jobs: dict[TurnId, _EngineCall] = {}  # by each turn that runs
        self._finished: OrderedDict[TurnId, Trajectory] = OrderedDict()  # oldest first
        self._finished_tokens = 0

    async def generate(self, requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Trajectory], None]:
        """Turns as they finish, each a trajectory of its own; those together that finish within `linger_s` of
        each other, and twice as long for each further message: the longer a call has run, the less a delay
        counts.

        A turn that runs is joined, one that has finished is answered again. Once the iterator is closed,
        requests without other listeners are aborted after ORPHAN_TIMEOUT_S. Raises what the engine raises.
        """
        listener = _Listener()
        answers: list[Trajectory] = []
        jobs: set[_EngineCall] = set()
        new = []
        for request in requests:
            unknown = []
            for id in request.ids:
                if id in listener.missing:
                    raise UserError(f"turn {id} is requested twice in one call: request it once")
                if id in self._finished:
                    answers.append(self._finished[id])
                    continue
                listener.missing.add(id)
                if id in self._jobs:
                    jobs.add(self._jobs[id])
                else:
                    unknown.append(id)
            if unknown:
                new.append(replace(request, ids=tuple(unknown)))
        if new:
            jobs.add(self._start(new))
        for job in jobs:
            job.listeners.add(listener)
        expected, linger_s = len(listener.missing), self._linger_s
        try:
            if answers:
                yield answers
            while expected:
                samples = await listener.next(expected, linger_s)
                linger_s = min(2 * linger_s, MAX_LINGER_S)
                expected -= len(samples)
                yield samples
        finally:
            for job in jobs:
                job.listeners.discard(listener)
                if not job.listeners:
                    asyncio.get_running_loop().call_later(ORPHAN_TIMEOUT_S, self._end_orphan, job)

    def forget(self) -> None:
        """Clears remembered samples for a new lineage, which reuses ids."""
        self._finished.clear()
        self._finished_tokens = 0
        for job in set(self._jobs.values()):
            self._end_orphan(job)

    def _end_orphan(self, job: _EngineCall) -> None:
        """Ends an engine call without listeners."""
        if job.task is not None and not job.listeners:
            job.task.cancel()
            self._unlist(job)

    def _start(self, requests: Sequence[TurnRequest]) -> _EngineCall:
        job = _EngineCall({id for request in requests for id in request.ids})
        self._jobs.update(dict.fromkeys(job.running, job))
        job.task = asyncio.create_task(self._run(job, requests))
        return job

    async def _run(self, job: _EngineCall, requests: Sequence[TurnRequest]) -> None:
        """Consumes one engine call for all listeners; ends with its last sample, with an error, or
        cancelled once nobody listens."""
        try:
            async with aclosing(self._engine.generate(requests)) as stream:
                async for completions in stream:
                    self._publish(job, completions)
        except Exception as error:
            for listener in job.listeners:
                listener.inbox.put_nowait(error)
        finally:
            self._unlist(job)

    def _unlist(self, job: _EngineCall) -> None:
        """Lets its unfinished requests be generated again."""
        for id in job.running:
            del self._jobs[id]
        job.running.clear()

    def _publish(self, job: _EngineCall, completions: Sequence[Completion]) -> None:
        samples = {completion.id: self._trajectory(completion) for completion in completions}
        for id, sample in samples.items():
            job.running.remove(id)
            del self._jobs[id]
            self._finished[id] = sample
            self._finished_tokens += sample.num_produced
        while self._finished_tokens > MAX_REMEMBERED_TOKENS:
            _, oldest = self._finished.popitem(last=False)
            self._finished_tokens -= oldest.num_produced
        for listener in job.listeners:
            awaited = [sample for id, sample in samples.items() if id in listener.missing]
            if awaited:
                listener.inbox.put_nowait(awaited)

    def _trajectory(self, completion: Completion) -> Trajectory:
        """Of this turn alone: a tree of one node."""
        node = Node(
            parent=BELOW_PROMPT,
            token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), np.bool_),
            logprobs=completion.logprobs,
            spans=completion.spans,
            routes=completion.routes,
        )
        turn = Turn(
            node=0,
            finish_reason=completion.finish_reason,
            text=completion.text,
            origin=self._origin,
            started=completion.started,
            finished=completion.finished,
            number=completion.id.turn,
            branch=completion.id.branch,
        )
        status = STATUS_AFTER[completion.finish_reason]
        return Trajectory(completion.id.sample, completion.id.attempt, (node,), (turn,), status)
