"""Between service and engine: each request id is generated once, however often it is asked for."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.rollout.engines.base import Completion, Engine, request_id
from atoll.runtime.errors import UserError
from atoll.wire.types import GroupRequest, Node, Provenance, Sample, SampleId

MAX_REMEMBERED_TOKENS = 1 << 20  # of finished samples: some 10 MB
LINGER_S = 0.02  # a finished sample waits so long for others: a message costs the coordinator more than they
MAX_LINGER_S = 1.0
ORPHANED_S = 2.0  # that work goes on with nobody listening: a caller whose stream broke comes back at once
MESSAGES_PER_S = 500  # of a large fleet, all replicas together


def linger_for(num_replicas: int) -> float:
    """How long a finished sample waits for others of its call, in a fleet of that size."""
    return min(max(num_replicas / MESSAGES_PER_S, LINGER_S), MAX_LINGER_S)


@dataclass(eq=False, slots=True)
class _Listener:
    """A call that waits for samples."""

    missing: set[str] = field(default_factory=set)  # request ids
    inbox: asyncio.Queue[list[Sample] | Exception] = field(default_factory=asyncio.Queue)

    async def next(self, expected: int, linger_s: float) -> list[Sample]:
        """The next samples to finish, and those of the `expected` that follow within `linger_s`."""
        samples: list[Sample] = []
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
class _Job:
    """One engine call, and who listens to it. It ends early when nobody does for ORPHANED_S."""

    running: set[str]  # request ids
    listeners: set[_Listener] = field(default_factory=set)
    task: asyncio.Task[None] | None = None


class Generator:
    def __init__(self, engine: Engine, replica: str, incarnation: str, linger_s: float = LINGER_S) -> None:
        self._engine = engine
        self._linger_s = linger_s
        self._replica = replica
        self._incarnation = incarnation
        self._jobs: dict[str, _Job] = {}  # by the id of each request that runs
        self._finished: OrderedDict[str, Sample] = OrderedDict()  # by request id, oldest first
        self._finished_tokens = 0

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncGenerator[list[Sample], None]:
        """Samples of all requests as they finish, those together that finish within `linger_s` of each other,
        and twice as long for each further message: the longer a call has run, the less a delay counts.

        A request that runs is joined, one that has finished is answered again. Once the iterator is closed,
        what nobody else waits for is aborted after ORPHANED_S. Raises what the engine raises.
        """
        listener = _Listener()
        answers: list[Sample] = []
        jobs: set[_Job] = set()
        new = []
        for request in requests:
            unknown = []
            for id, index, attempt in _samples(request):
                if id in listener.missing:
                    raise UserError(f"sample {id} is asked for twice in one call: ask once")
                if id in self._finished:
                    answers.append(self._finished[id])
                    continue
                listener.missing.add(id)
                if id in self._jobs:
                    jobs.add(self._jobs[id])
                else:
                    unknown.append((index, attempt))
            if unknown:
                indices, attempts = zip(*unknown, strict=True)
                new.append(replace(request, indices=indices, attempts=attempts))
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
                    asyncio.get_running_loop().call_later(ORPHANED_S, self._end_orphan, job)

    def forget(self) -> None:
        """For a new lineage, which asks again for ids that the old one has seen."""
        self._finished.clear()
        self._finished_tokens = 0
        for job in set(self._jobs.values()):
            self._end_orphan(job)

    def _end_orphan(self, job: _Job) -> None:
        """Unless somebody listens again."""
        if job.task is not None and not job.listeners:
            job.task.cancel()
            self._unlist(job)

    def _start(self, requests: Sequence[GroupRequest]) -> _Job:
        job = _Job({id for request in requests for id, _, _ in _samples(request)})
        self._jobs.update(dict.fromkeys(job.running, job))
        job.task = asyncio.create_task(self._run(job, requests))
        return job

    async def _run(self, job: _Job, requests: Sequence[GroupRequest]) -> None:
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

    def _unlist(self, job: _Job) -> None:
        """Its unfinished requests may be asked for anew."""
        for id in job.running:
            del self._jobs[id]
        job.running.clear()

    def _publish(self, job: _Job, completions: Sequence[Completion]) -> None:
        samples = {request_id(c.group, c.index, c.attempt): self._sample(c) for c in completions}
        for id, sample in samples.items():
            job.running.remove(id)
            del self._jobs[id]
            self._finished[id] = sample
            self._finished_tokens += sample.num_tokens
        while self._finished_tokens > MAX_REMEMBERED_TOKENS:
            _, oldest = self._finished.popitem(last=False)
            self._finished_tokens -= oldest.num_tokens
        for listener in job.listeners:
            awaited = [sample for id, sample in samples.items() if id in listener.missing]
            if awaited:
                listener.inbox.put_nowait(awaited)

    def _sample(self, completion: Completion) -> Sample:
        """A tree of one node."""
        node = Node(
            parent=-1,
            token_ids=completion.token_ids,
            loss_mask=np.ones(len(completion.token_ids), np.bool_),
            logprobs=completion.logprobs,
            spans=completion.spans,
        )
        return Sample(
            id=SampleId(completion.group, completion.index),
            attempt=completion.attempt,
            nodes=(node,),
            finish_reason=completion.finish_reason,
            text=completion.text,
            provenance=Provenance(self._replica, self._incarnation, completion.started, completion.finished),
        )


def _samples(request: GroupRequest) -> list[tuple[str, int, int]]:
    """Request id, index and attempt of each sample."""
    if len(request.indices) != len(request.attempts):
        raise UserError(
            f"group {request.group} has {len(request.indices)} indices and {len(request.attempts)} attempts: "
            "send one attempt per index"
        )
    return [
        (request_id(request.group, index, attempt), index, attempt)
        for index, attempt in zip(request.indices, request.attempts, strict=True)
    ]
