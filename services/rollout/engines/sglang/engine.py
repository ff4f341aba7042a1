"""The SGLang engine: a stock SGLang server as a child process, with admission, pausing and weight updates.

SGLang batches, samples, and counts which tokens came from which weights. This module controls admission: at
most `slots` samples at a time, and none while generation is paused, so that waiting samples use the weights
that are live when they start.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from atoll.config.schema import SGLangConfig
from atoll.rollout.engines.base import Completion, EngineInfo
from atoll.rollout.engines.checks import check_awake, check_request, check_sequence
from atoll.rollout.engines.sglang import messages
from atoll.rollout.engines.sglang.arguments import arguments_of, environment_of, reserved_mib
from atoll.rollout.engines.sglang.memory import ServerMemory
from atoll.rollout.engines.sglang.messages import SGLangError
from atoll.rollout.engines.sglang.parameters import num_elements
from atoll.rollout.engines.sglang.server import CONTROL_DEADLINES, ServerLimits, SGLangServer, limits_of
from atoll.rollout.engines.sglang.workers import Workers
from atoll.runtime.errors import EngineDiedError, UserError
from atoll.runtime.memory import BYTES, segment_bytes
from atoll.runtime.model_spec import ModelSpec, check_router_replay, read_spec
from atoll.wire.types import (
    EngineMemory,
    FinishReason,
    Float32,
    Int32,
    PauseMode,
    PushPart,
    ReceiverSetup,
    ShardLayout,
    TurnId,
    TurnRequest,
    Version,
)

T = TypeVar("T")

ABORT_AGAIN_S: Final = 0.5  # an abort that overtakes its request has no effect
STOPPED_MODES: Final = {PauseMode.IN_PLACE: "in_place", PauseMode.RETRACT: "retract"}  # as SGLang calls them


@dataclass(eq=False, slots=True)
class _SampleJob:
    """One sample and its caller."""

    request: TurnRequest
    id: TurnId
    inbox: asyncio.Queue[Completion | Exception]
    rid: str = ""  # SGLang's request id: new at every try
    aborted: bool = False


class SGLangEngine:
    """See Engine. What SGLang cannot promise: that draws depend on seed and position alone. Tokens that are
    cut off by both top_k and top_p are those beyond either, both of the whole distribution; `local` takes
    top_p of what top_k left. While generation is paused in place or retracted, nothing is scored, and what
    is aborted in place is yielded once it continues. A sequence that was retracted, by a pause or for want of
    memory, and is aborted before SGLang takes it up again, is yielded without the tokens that it had."""

    def __init__(
        self,
        server: SGLangServer,
        workers: Workers,
        limits: ServerLimits,
        vocab_size: int,
        dtype: str,
        version: Version,
        routed: ModelSpec | None = None,
    ) -> None:
        """`version` names the weights that the server has. `routed`: the model, if routes are recorded."""
        self._server, self._workers, self._limits = server, workers, limits
        self._vocab_size, self._dtype, self._version, self._routed = vocab_size, dtype, version, routed
        self._queue: deque[_SampleJob] = deque()
        self._running: dict[_SampleJob, asyncio.Task[None]] = {}
        self._inboxes: set[asyncio.Queue[Completion | Exception]] = set()  # of all `generate` calls
        self._aborting: set[asyncio.Task[None]] = set()
        self._changes: set[asyncio.Task[Any]] = set()  # of weights and of pausing
        self._tries = self._answers = self._tokens_generated = self._tokens_prefilled = 0
        self._pause: PauseMode | None = None
        self._committing = False
        self._stopped: PauseMode | None = None  # how SGLang is paused
        self._released: Set[EngineMemory] = frozenset()  # nothing is admitted while there is any
        self._memory = ServerMemory(server, workers)
        self._control = asyncio.Lock()  # of what changes `_stopped` or SGLang's memory
        server.exit.add_done_callback(lambda _: self._fail())

    @classmethod
    async def start(
        cls,
        folder: Path,
        *,
        device: str,
        dtype: str,
        threads: int,
        config: SGLangConfig,
        start_timeout_s: float,
        version: Version,
        setup: ReceiverSetup,
        records_routes: bool = False,
        trainer_ranks: int = 1,
    ) -> Self:
        """Serves the model; `version` names the weights in the folder. `records_routes`: completions tell the
        experts of each token. Raises UserError for a model or an argument that SGLang refuses,
        EngineDiedError if it does not come up."""
        spec = read_spec(folder)
        if records_routes:
            check_router_replay(spec, folder)
        ours = {
            "model_path": folder,
            "dtype": dtype,
            "weight_version": messages.version_text(version),
            "enable_return_routed_experts": records_routes,
        }
        user, turns = config.model_extra or {}, setup.takes_turns
        arguments = arguments_of(user, ours, device, config.tp_size, takes_turns=turns)
        environment = environment_of(device, config.tp_size, threads, takes_turns=turns)
        shard_bytes = num_elements(spec, config.tp_size) * BYTES[dtype]
        segment = segment_bytes(shard_bytes * config.tp_size, trainer_ranks)
        reserved = reserved_mib(
            shard_bytes, setup.transport, staging=setup.staging, takes_turns=turns, segment_bytes=segment
        )
        async with AsyncExitStack() as undo:
            workers = Workers(config.tp_size, version, setup)
            undo.push_async_callback(workers.close)
            server = await SGLangServer.start(
                arguments + workers.arguments,
                environment | workers.environment,
                reserved_mib=reserved if device == "cuda" else 0,
                start_timeout_s=start_timeout_s,
                control_timeout_s=CONTROL_DEADLINES * setup.deadline_s,
            )
            undo.push_async_callback(server.close)
            await workers.attach(server.control)
            limits = limits_of(await server.state())
            undo.pop_all()
        return cls(server, workers, limits, spec.vocab_size, dtype, version, spec if records_routes else None)

    def info(self) -> EngineInfo:
        return EngineInfo(
            vocab_size=self._vocab_size,
            max_length=self._limits.max_length,
            slots=self._limits.slots,
            dtype=self._dtype,
            running=sum(not job.aborted for job in self._running),
            queued=len(self._queue),
            tokens_generated=self._tokens_generated,
            tokens_prefilled=self._tokens_prefilled,
            route_shape=self._routed.route_shape if self._routed else (),
        )

    @property
    def version(self) -> Version:
        return self._version

    async def progress(self) -> int:
        """Its schedulers answer themselves, between two steps: none of them hangs."""
        await self._server.state()
        self._answers += 1
        return self._answers

    async def generate(self, requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Completion], None]:
        for request in requests:
            check_request(request, self._vocab_size, self._limits.max_length, "rollout.sglang.context_length")
            messages.check_sampling(request.sampling, self._vocab_size, self._limits.max_candidates)
        check_awake(self._released)
        if self._server.exit.done():
            raise self._server.death()
        inbox: asyncio.Queue[Completion | Exception] = asyncio.Queue()
        self._inboxes.add(inbox)
        jobs = [_SampleJob(request, id, inbox) for request in requests for id in request.ids]
        self._queue.extend(jobs)
        self._admit()
        missing = len(jobs)
        try:
            while missing:
                outcomes = [await inbox.get()]
                while not inbox.empty():
                    outcomes.append(inbox.get_nowait())
                missing -= len(outcomes)
                if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
                    raise errors[0]
                yield [outcome for outcome in outcomes if isinstance(outcome, Completion)]
        finally:
            self._inboxes.remove(inbox)
            if missing:
                self._end(jobs)

    async def abort(self, id_prefix: str) -> int:
        return self._end(job for job in (*self._queue, *self._running) if str(job.id).startswith(id_prefix))

    async def pause(self, mode: PauseMode) -> None:
        changed, self._pause = mode is not self._pause, mode
        await self._to_its_end(self._obey())
        if mode in STOPPED_MODES:
            await self._server.state()  # its answer comes from behind the pause
            return
        if mode is PauseMode.ABORT and changed:
            self._end((*self._queue, *self._running))
        while self._pause is mode and self._running:
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)

    async def resume(self) -> None:
        self._pause = None
        await self._to_its_end(self._obey())

    async def score_tokens(self, sequences: Sequence[Int32]) -> list[Float32]:
        for ids in sequences:
            check_sequence(
                ids, self._vocab_size, self._limits.max_length - 1, "rollout.sglang.context_length"
            )
        check_awake(self._released)
        async with self._control:  # a commit may be in progress
            if self._stopped is not None:
                raise UserError(f"SGLang scores nothing while paused {self._stopped.name}: resume it first")
        answers = [
            self._server.post("/generate", messages.score_body(ids, self._version)) for ids in sequences
        ]
        return [messages.parse_scores(answer) for answer in await asyncio.gather(*answers)]

    def shard_layouts(self) -> tuple[ShardLayout, ...]:
        return self._workers.shard_layouts()

    async def receive(self, part: PushPart) -> int:
        return await self._workers.receive(part)

    async def commit(self, version: Version) -> float:
        return await self._to_its_end(self._commit(version))

    async def rollback(self, version: Version) -> None:
        await self._workers.rollback(version)

    async def release(self) -> None:
        await self._to_its_end(self._release())

    async def restore(self, memory: EngineMemory) -> None:
        await self._to_its_end(self._restore(memory))

    async def checksums(self) -> tuple[Version, dict[str, int]]:
        sums = await self._workers.checksums()  # after a commit in progress
        return self._version, sums

    async def wait_for_failure(self) -> None:
        await asyncio.wait({self._server.exit})
        raise self._server.death()

    async def close(self) -> None:
        await self._server.close()
        await self._workers.close()

    async def _to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """Runs to the end even if the caller is cancelled: half-way, SGLang would be paused or have unknown
        weights.
        """
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _release(self) -> None:
        if self._stopped is not None:  # what runs could not end
            raise UserError(f"SGLang releases nothing while paused {self._stopped.name}: resume it first")
        self._released = frozenset(EngineMemory)
        self._end((*self._queue, *self._running))
        while self._running:
            await asyncio.wait(self._running.values())
        async with self._control:
            await self._memory.release()

    async def _restore(self, memory: EngineMemory) -> None:
        async with self._control:
            await self._memory.restore(memory)
            self._released -= {memory}
        self._admit()

    async def _commit(self, version: Version) -> float:
        if version == self._version and self._memory.has_weights:
            return 0.0
        async with self._control, self._workers.prepare(version):
            started = time.perf_counter()
            stopped = self._stopped
            self._committing = True
            try:
                await self._stand(stopped or PauseMode.IN_PLACE)
                await self._workers.commit(version, self._server.control)
                self._version, self._memory.has_weights = version, True
                if stopped is PauseMode.RETRACT:  # its sequences keep their keys of the prefix cache
                    await self._server.control("/flush_cache", {})
            except EngineDiedError:  # or its ranks have parted
                await self._server.kill()
                raise
            finally:
                self._committing = False
                if not self._server.exit.done():
                    await self._stand(stopped)
                self._admit()
            return time.perf_counter() - started

    def _admit(self) -> None:
        """Submits jobs that may start."""
        while (
            self._queue
            and self._pause is None
            and not (self._committing or self._released)
            and len(self._running) < self._limits.slots
        ):
            job = self._queue.popleft()
            self._tries += 1
            job.rid = f"{self._tries}:{job.id}"
            self._running[job] = asyncio.create_task(self._run(job, self._version))

    async def _run(self, job: _SampleJob, version: Version) -> None:
        """Generates one sample and delivers it; ends with SGLang's answer or the server's death."""
        outcome: Completion | Exception | None
        try:
            outcome = await self._generate(job, version)
        except Exception as error:
            outcome = error
        del self._running[job]
        if outcome is None:
            self._queue.appendleft(job)
        else:
            job.inbox.put_nowait(outcome)
        self._admit()

    async def _generate(self, job: _SampleJob, version: Version) -> Completion | None:
        """None: to be generated again. A request that reached SGLang's scheduler after other weights than
        its key's came there may have met keys and values of the old ones."""
        started = time.time()
        first_route = job.request.first_route(job.id) if self._routed else None
        body = messages.generate_body(
            job.request, job.rid, version, self._limits.max_length, self._vocab_size, first_route
        )
        answer = await self._server.post("/generate", body)
        completion = messages.parse_completion(answer, job.id, job.request.sampling, started, self._routed)
        self._tokens_generated += len(completion.token_ids)
        self._tokens_prefilled += messages.num_prefilled(answer)
        if job.aborted:
            return completion
        if completion.finish_reason is FinishReason.ABORT:
            raise SGLangError(f"SGLang aborted {job.id}: {answer['meta_info']['finish_reason']}")
        return completion if completion.spans[0].version == version else None

    def _end(self, jobs: Iterable[_SampleJob]) -> int:
        """Aborts those that have not ended; returns how many."""
        alive = [job for job in jobs if not job.aborted]
        waiting, running = set(self._queue).intersection(alive), self._running.keys() & set(alive)
        for job in waiting | running:
            job.aborted = True
        self._queue = deque(job for job in self._queue if job not in waiting)
        for job in waiting:
            job.inbox.put_nowait(messages.aborted_completion(job.id))
        if running:
            task = asyncio.create_task(self._abort_running(running))
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)
        return len(waiting | running)

    async def _abort_running(self, jobs: set[_SampleJob]) -> None:
        """Tells SGLang, and again those that have not ended soon after; ends when all have."""
        while tasks := {job: self._running[job] for job in jobs if job in self._running}:
            await asyncio.gather(
                *(self._server.control("/abort_request", {"rid": job.rid}) for job in tasks),
                return_exceptions=True,  # the sample's caller raises the server's failure
            )
            await asyncio.wait(tasks.values(), timeout=ABORT_AGAIN_S)

    async def _obey(self) -> None:
        """Puts SGLang into the state of the last `pause` or `resume`."""
        async with self._control:
            await self._stand(self._pause if self._pause in STOPPED_MODES else None)
        self._admit()

    async def _stand(self, mode: PauseMode | None) -> None:
        """Pauses SGLang between two tokens, before any later command, or resumes it; holds `_control`. Kills
        a server that does not answer, since it may be paused forever.
        """
        if mode is self._stopped:
            return
        try:
            if mode is None:
                await self._server.control("/continue_generation", {})
            else:
                await self._server.control("/pause_generation", {"mode": STOPPED_MODES[mode]})
        except SGLangError:
            await self._server.kill()
            raise
        self._stopped = mode

    def _fail(self) -> None:
        """The server died: ends every call with its error."""
        for inbox in self._inboxes:
            inbox.put_nowait(self._server.death())
