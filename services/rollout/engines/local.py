"""The `local` engine: batched KV-cache decoding in plain torch, for CPUs and as numerical reference.

One thread computes; the asyncio side hands it functions to run between two tokens; completions return through
the queue of each `generate` call.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer

from atoll.config.schema import TokenLimit
from atoll.rollout.engines.base import Completion, EngineInfo
from atoll.rollout.engines.checks import check_awake, check_request, check_sequence
from atoll.rollout.engines.local_adapters import AdapterLayout
from atoll.rollout.engines.local_decoder import Decoder
from atoll.rollout.engines.local_model import LocalModel
from atoll.rollout.engines.local_weights import BufferLayout, ReleasableCopy
from atoll.rollout.refit import Refit
from atoll.runtime.errors import (
    AtollError,
    EngineDiedError,
    ServiceUnavailableError,
    UserError,
    WeightPushError,
)
from atoll.runtime.malloc import return_freed_memory
from atoll.runtime.model_spec import check_length, check_router_replay, read_spec
from atoll.weights.boxes import tensor_checksums
from atoll.weights.transport.base import Receiver
from atoll.wire.types import (
    EngineMemory,
    Float32,
    Int32,
    LoraSpec,
    PauseMode,
    PushPart,
    ShardLayout,
    TurnRequest,
    Version,
)

T = TypeVar("T")

LENGTH_SETTING = "rollout.local.max_length"


class _CallInbox:
    """Of one `generate` call: what the compute thread posts arrives in its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[list[Completion] | Exception] = asyncio.Queue()

    def post(self, item: list[Completion] | Exception) -> None:
        self._loop.call_soon_threadsafe(self._inbox.put_nowait, item)

    async def next(self) -> list[Completion]:
        item = await self._inbox.get()
        if isinstance(item, Exception):
            raise item
        return item


class LocalEngine:
    """See Engine. Between calls it keeps the keys and values of sessions alone, and a commit drops those, so
    that nothing stale is left but the keys and values of running rows."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        slots: int,
        max_length: int,
        version: Version,
        receiver: Receiver,
        lora: LoraSpec | None = None,
        records_routes: bool = False,
        takes_turns: bool = False,
    ) -> None:
        """Reads the model; `version` names the weights in the folder. With `lora`, its adapters alone are
        pushed. `records_routes`: completions tell the experts of each token. `takes_turns`: see Refit. Raises
        UserError if the folder holds no model that this engine runs, `max_length` exceeds its positions, or
        it has no experts to record."""
        spec = read_spec(folder)
        check_length(TokenLimit(LENGTH_SETTING, max_length), spec, folder)
        if records_routes:
            check_router_replay(spec, folder)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{folder}: cannot read tokenizer.json ({error})") from error
        layout = BufferLayout(spec)
        self._layout: BufferLayout | AdapterLayout = layout
        buffer = layout.read(folder, dtype)
        if lora is not None:
            self._layout = AdapterLayout(layout, layout.bind(buffer), lora)
            buffer = self._layout.zeros()
        self._memory = ReleasableCopy(buffer) if takes_turns else None
        if self._memory is not None:
            buffer = self._memory.tensor
        self._refit = Refit([buffer], version, receiver, takes_turns=takes_turns)
        self._live = buffer
        self._released: frozenset[EngineMemory] = frozenset()
        self._model = LocalModel(spec, self._layout.bind(buffer), max_length, records_routes)
        self._decoder: Decoder[_CallInbox] = Decoder(self._model, tokenizer, slots, max_length, version)
        self._slots = slots
        self._max_length = max_length
        self._pause: PauseMode | None = None
        self._pausing: list[Future[None]] = []  # pause calls waiting for running sequences
        self._closed = False
        self._calls: set[_CallInbox] = set()
        self._end: Future[None] = Future()  # of the compute thread
        self._end.set_running_or_notify_cancel()  # cancelling a waiter does not cancel it
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    def info(self) -> EngineInfo:
        return EngineInfo(
            vocab_size=self._model.spec.vocab_size,
            max_length=self._max_length,
            slots=self._slots,
            dtype=str(self._live.dtype).removeprefix("torch."),
            running=self._decoder.num_rows,
            queued=self._decoder.num_waiting,
            tokens_generated=self._decoder.tokens_generated,
            tokens_prefilled=self._decoder.tokens_prefilled,
            route_shape=self._model.spec.route_shape if self._model.records_routes else (),
        )

    @property
    def version(self) -> Version:
        return self._decoder.version

    async def progress(self) -> int:
        return self._decoder.tokens_generated

    async def generate(self, requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Completion], None]:
        for request in requests:
            check_request(request, self._model.spec.vocab_size, self._max_length, LENGTH_SETTING)
        call = _CallInbox()
        self._calls.add(call)  # registered first: the thread records its end, then notifies all calls
        if self._end.done():
            self._calls.remove(call)
            raise self._end.exception() or EngineDiedError("the engine has been closed")

        def leave() -> None:
            self._decoder.abort(lambda caller, _: caller is call)

        missing = sum(len(request.ids) for request in requests)
        self._commands.put(partial(self._submit, requests, call))
        try:
            while missing:
                completions = await call.next()
                missing -= len(completions)
                yield completions
        finally:
            self._calls.remove(call)
            if missing:
                self._commands.put(leave)

    async def abort(self, id_prefix: str) -> int:
        def command() -> int:
            aborted = self._decoder.abort(lambda _, id: id.startswith(id_prefix))
            _deliver(aborted)
            return len(aborted)

        return await self._between_tokens(command)

    async def pause(self, mode: PauseMode) -> None:
        quiet: Future[None] = Future()

        def command() -> None:
            if mode is PauseMode.RETRACT:
                self._decoder.retract()
            if mode is PauseMode.ABORT and self._pause is not mode:  # if repeated, newer requests are spared
                _deliver(self._decoder.abort(lambda *_: True))
            self._pause = mode
            self._pausing.append(quiet)

        self._commands.put(command)
        await asyncio.wrap_future(quiet)

    async def resume(self) -> None:
        def command() -> None:
            self._pause = None
            self._release_pauses()

        await self._between_tokens(command)

    async def score_tokens(self, sequences: Sequence[Int32]) -> list[Float32]:
        for ids in sequences:
            check_sequence(ids, self._model.spec.vocab_size, self._max_length, LENGTH_SETTING)

        def command() -> list[Float32]:
            self._check_awake()
            return [self._model.score(torch.from_numpy(ids.astype(np.int64))).numpy() for ids in sequences]

        return await self._between_tokens(command)

    def shard_layouts(self) -> tuple[ShardLayout, ...]:
        return (self._layout.shard_layout,)

    async def receive(self, part: PushPart) -> int:
        return await asyncio.to_thread(self._refit.receive, part)

    async def commit(self, version: Version) -> float:
        def command() -> float:
            started = time.perf_counter()
            (self._live,) = self._refit.commit(version)
            self._model.weights = self._layout.bind(self._live)
            if version != self._decoder.version:
                self._decoder.set_version(version)
            return time.perf_counter() - started

        return await self._between_tokens(command)

    async def rollback(self, version: Version) -> None:
        await asyncio.to_thread(self._refit.rollback, version)

    async def release(self) -> None:
        memory = self._memory
        if memory is None:
            raise UserError('this engine keeps its memory: set placement.mode = "colocated"')

        def command() -> None:
            _deliver(self._decoder.abort(lambda *_: True))
            self._refit.release()
            self._released = frozenset(EngineMemory)
            self._decoder.release()
            memory.release()
            return_freed_memory()

        await self._between_tokens(command)

    async def restore(self, memory: EngineMemory) -> None:
        def command() -> None:
            if memory is EngineMemory.WEIGHTS:
                self._refit.restore()
            elif not self._refit.holds_version:
                raise WeightPushError(f"{memory!r} is restored before a version is committed: push one first")
            self._released -= {memory}  # both take memory as it is written to

        await self._between_tokens(command)

    async def checksums(self) -> tuple[Version, dict[str, int]]:
        def command() -> tuple[Version, dict[str, int]]:
            self._check_awake()
            return self.version, tensor_checksums(self._layout.shard_layout, [self._live], self._live.dtype)

        return await self._between_tokens(command)

    async def wait_for_failure(self) -> None:
        await asyncio.wrap_future(self._end)

    async def close(self) -> None:
        def command() -> None:
            self._closed = True

        self._commands.put(command)
        await asyncio.to_thread(self._thread.join)

    def _submit(self, requests: Sequence[TurnRequest], call: _CallInbox) -> None:
        try:
            self._check_awake()
            self._decoder.submit(requests, call)
        except ServiceUnavailableError as error:
            call.post(error)

    def _check_awake(self) -> None:
        check_awake(self._released)

    async def _between_tokens(self, function: Callable[[], T]) -> T:
        """Runs it on the compute thread."""
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)
                    if not isinstance(error, AtollError):
                        raise

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        """The compute thread. An error that may leave half a step behind ends it and all calls."""
        try:
            self._work()
            self._end.set_result(None)
        except Exception as error:
            death = EngineDiedError(f"the engine failed: {type(error).__name__}: {error}")
            death.__cause__ = error
            self._end.set_exception(death)
            for call in tuple(self._calls):
                call.post(death)

    @torch.inference_mode()
    def _work(self) -> None:
        """Consumes commands and decodes unless paused; waits for a command while there is nothing to decode;
        unblocked by any command.
        """
        while not self._closed:
            if not self._can_decode():
                self._release_pauses()
                self._commands.get()()
            while not self._commands.empty():
                self._commands.get()()
            if self._can_decode():
                _deliver(self._decoder.step(admit=self._pause is None))

    def _can_decode(self) -> bool:
        if self._pause is PauseMode.IN_PLACE:
            return False
        return bool(self._decoder.num_rows or (self._pause is None and self._decoder.num_waiting))

    def _release_pauses(self) -> None:
        for quiet in self._pausing:
            if quiet.set_running_or_notify_cancel():
                quiet.set_result(None)
        self._pausing.clear()


def _deliver(finished: Sequence[tuple[_CallInbox, Completion]]) -> None:
    """Delivers completions of one step together to each caller."""
    for call, pairs in groupby(sorted(finished, key=lambda pair: id(pair[0])), key=lambda pair: pair[0]):
        call.post([completion for _, completion in pairs])
