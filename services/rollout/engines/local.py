"""The `local` engine: batched KV-cache decoding in plain torch, for a CPU and as numerical reference.

One thread computes; the asyncio side hands it functions to run between two tokens, and gets
completions back through the queue of each `generate` call.
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

from services.rollout.engines.base import Completion, EngineInfo
from services.rollout.engines.local_decoder import Decoder
from services.rollout.engines.local_model import LocalModel
from services.rollout.engines.local_weights import Layout
from services.rollout.refit import Refit
from services.runtime.errors import AtollError, UserError
from services.runtime.model_spec import read_spec
from services.weights.boxes import tensor_checksums
from services.wire.types import Catalog, GroupRequest, PauseMode, Plan, StreamManifest, Version

T = TypeVar("T")

MIN_TEMPERATURE = 1e-6  # but for 0: what logits are divided by must leave them finite


class _Call:
    """One `generate` call: what the compute thread posts arrives in its event loop."""

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
    """See Engine. Replays nothing and keeps no prefix between calls, so a commit leaves nothing stale
    but the keys and values of rows that go on."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, slots: int, max_length: int, version: Version
    ) -> None:
        """Reads the model; `version` names the weights in the folder. Raises UserError where the folder
        holds no model that this engine runs, or `max_length` exceeds its positions."""
        spec = read_spec(folder)
        if max_length > spec.max_positions:
            raise UserError(
                f"rollout.local.max_length = {max_length}, but {folder} has {spec.max_positions} positions: "
                "set it to that or less"
            )
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{folder}: cannot read tokenizer.json ({error})") from error
        self._layout = Layout(spec)
        buffer = self._layout.read(folder, dtype)
        self._refit = Refit([buffer], version)
        self._live = buffer
        self._model = LocalModel(spec, self._layout.bind(buffer), max_length)
        self._decoder: Decoder[_Call] = Decoder(self._model, tokenizer, slots, max_length, version)
        self._slots = slots
        self._max_length = max_length
        self._pause: PauseMode | None = None
        self._pausing: list[Future[None]] = []  # pause calls that wait for quiet
        self._closed = False
        self._calls: set[_Call] = set()
        self._end: Future[None] = Future()  # of the compute thread
        self._end.set_running_or_notify_cancel()  # whoever waits for it and leaves does not cancel it
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
        )

    @property
    def version(self) -> Version:
        return self._decoder.version

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncGenerator[list[Completion], None]:
        for request in requests:
            self._check(request)
        call = _Call()
        self._calls.add(call)

        def leave() -> None:
            self._decoder.abort(lambda caller, _: caller is call)

        missing = sum(len(request.indices) for request in requests)
        self._commands.put(partial(self._decoder.submit, requests, call))
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
            self._pause = mode
            self._pausing.append(quiet)

        self._commands.put(command)
        await asyncio.wrap_future(quiet)

    async def resume(self) -> None:
        def command() -> None:
            self._pause = None
            self._release_pauses()

        await self._between_tokens(command)

    def catalog(self) -> Catalog:
        return self._layout.catalog

    async def receive(self, version: Version, streams: Sequence[StreamManifest], plan: Plan | None) -> int:
        return await asyncio.to_thread(self._refit.receive, version, streams, plan)

    async def commit(self, version: Version) -> float:
        def command() -> float:
            started = time.perf_counter()
            (buffer,) = self._refit.commit(version)
            if buffer is not self._live:
                self._live = buffer
                self._model.weights = self._layout.bind(buffer)
            if version != self._decoder.version:
                self._decoder.set_version(version)
            return time.perf_counter() - started

        return await self._between_tokens(command)

    async def rollback(self, version: Version) -> None:
        await asyncio.to_thread(self._refit.rollback, version)

    async def checksums(self) -> tuple[Version, dict[str, int]]:
        def command() -> tuple[Version, dict[str, int]]:
            return self.version, tensor_checksums(self._layout.catalog, [self._live], self._live.dtype)

        return await self._between_tokens(command)

    async def failed(self) -> None:
        await asyncio.wrap_future(self._end)

    async def close(self) -> None:
        def command() -> None:
            self._closed = True

        self._commands.put(command)
        await asyncio.to_thread(self._thread.join)

    def _check(self, request: GroupRequest) -> None:
        """Raises UserError for what the compute thread must never see."""
        ids, vocab_size, sampling = request.prompt_ids, self._model.spec.vocab_size, request.sampling
        if not 0 < len(ids) < self._max_length:
            raise UserError(
                f"prompt {request.group} has {len(ids)} tokens, expected 1 to {self._max_length - 1}: "
                "shorten it, set data.max_prompt_tokens, or raise rollout.local.max_length"
            )
        if ids.min() < 0 or ids.max() >= vocab_size:
            bad = ids[(ids < 0) | (ids >= vocab_size)]
            raise UserError(
                f"prompt {request.group} has token id {bad[0]}, expected 0 to {vocab_size - 1}: "
                "the tokenizer does not belong to this model"
            )
        valid = (
            sampling.max_new_tokens >= 1
            and (sampling.temperature == 0 or MIN_TEMPERATURE <= sampling.temperature < np.inf)
            and 0 < sampling.top_p <= 1
            and sampling.top_k >= 0
            and all(sampling.stop)
        )
        if not valid:
            raise UserError(
                f"group {request.group}: {sampling}; expected max_new_tokens >= 1, temperature 0 or at "
                f"least {MIN_TEMPERATURE:g}, 0 < top_p <= 1, top_k >= 0 and stop strings that are not empty"
            )

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
        """The compute thread. What may have left half a step behind ends it, and all calls with it."""
        try:
            self._work()
            self._end.set_result(None)
        except Exception as error:
            self._end.set_exception(error)
            for call in tuple(self._calls):
                call.post(error)

    @torch.inference_mode()
    def _work(self) -> None:
        """Consumes commands, and decodes unless paused; waits for a command while there is nothing to
        decode; any command unblocks it."""
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


def _deliver(finished: Sequence[tuple[_Call, Completion]]) -> None:
    """What finished together arrives together, at each caller."""
    for call, pairs in groupby(sorted(finished, key=lambda pair: id(pair[0])), key=lambda pair: pair[0]):
        call.post([completion for _, completion in pairs])
