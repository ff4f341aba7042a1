"""The engine interface of the rollout service, implemented by `local` and SGLang."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from atoll.wire.types import (
    EngineMemory,
    FinishReason,
    Float32,
    Int32,
    PauseMode,
    PushPart,
    Routes,
    ShardLayout,
    TurnId,
    TurnRequest,
    Version,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished (or aborted) turn as the engine produced it."""

    id: TurnId
    token_ids: Int32  # [T] the response; includes the stop token
    logprobs: Float32  # [T] of the sampling distribution; at temperature 0, of the one at temperature 1
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    text: str  # without the stop token or stop string
    started: float  # Unix seconds
    finished: float  # Unix seconds
    routes: Routes | None = None  # of the tokens from `TurnRequest.first_route` on, but the last; see Node


@dataclass(frozen=True, slots=True)
class EngineInfo:
    vocab_size: int
    max_length: int
    slots: int
    dtype: str
    running: int
    queued: int
    tokens_generated: int
    tokens_prefilled: (
        int  # of contexts: those whose keys and values were kept from a turn before do not count
    )
    route_shape: tuple[int, ...] = ()  # layers, experts of a token; (): experts are not recorded


class Engine(Protocol):
    """One replica's engine. All methods are called from one asyncio loop; none blocks it."""

    def info(self) -> EngineInfo: ...

    @property
    def version(self) -> Version: ...

    async def progress(self) -> int:
        """A number that changes while tokens are produced. Raises if the engine does not answer."""
        ...

    def generate(self, requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Completion], None]:
        """Yields completions as they finish, those of one decode step together.

        What a turn draws depends on seed, epoch, prompt, index, turn, branch and position alone with `local`;
        SGLang draws differently each time. The keys and values of a session's last turn are kept until the
        next commit, as far as there is room, so that the next turn computes only what it adds. Raises
        UserError for a request that the engine cannot take, such as ids outside the vocabulary.

        Closing the iterator early (deadline, cancelled call) aborts what is left of it.
        """
        ...

    async def abort(self, id_prefix: str) -> int:
        """Ends every request whose id (see `TurnId`) starts with the prefix.

        Their partial output is yielded by `generate` with finish reason ABORT. Returns how many.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when no token is being produced any more. Calls may follow each other in any mode; one in
        the mode that holds already changes nothing, so what came since an ABORT is held like all else."""
        ...

    async def resume(self) -> None: ...

    async def score_tokens(self, sequences: Sequence[Int32]) -> list[Float32]:
        """Of each sequence [T], float32 [T-1]: log-probability of each token but the first given those before
        it, under the live weights at temperature 1. Runs beside generation; not every engine scores while
        that is paused. Raises UserError as `generate`."""
        ...

    def shard_layouts(self) -> tuple[ShardLayout, ...]:
        """Per tensor-parallel rank: where it keeps its part of each canonical tensor."""
        ...

    async def receive(self, part: PushPart) -> int:
        """Copies the part into the staging buffer while generation continues; checks every checksum. Returns
        bytes received. Raises WeightPushError if a slice is missing or wrong.
        """
        ...

    async def commit(self, version: Version) -> float:
        """Makes the staged version live between two tokens. Returns the seconds during which generation was
        paused.
        """
        ...

    async def rollback(self, version: Version) -> None:
        """Discards the staged version."""
        ...

    async def release(self) -> None:
        """Ends what runs, as `abort` does, and gives the memory of weights, keys and values back. Nothing is
        generated or scored until all of it is restored: that raises ServiceUnavailableError.
        """
        ...

    async def restore(self, memory: EngineMemory) -> None:
        """Takes memory back. Weights come first: they can then be received, and their bytes are undefined
        until a commit. Raises WeightPushError for CACHE before that.
        """
        ...

    async def checksums(self) -> tuple[Version, dict[str, int]]:
        """The live version, and xxh3-64 of each canonical tensor's bytes in the serving dtype, row-major."""
        ...

    async def wait_for_failure(self) -> None:
        """Waits while the engine works. Raises EngineDiedError once it fails, like every running `generate`;
        after that, only `close` may be called.
        """
        ...

    async def close(self) -> None: ...
