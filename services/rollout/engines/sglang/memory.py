"""The device memory of an SGLang server, which it gives back while models use the device."""

from collections.abc import Sequence, Set
from typing import Final

from atoll.rollout.engines.sglang.messages import SGLangError
from atoll.rollout.engines.sglang.server import SGLangServer
from atoll.rollout.engines.sglang.workers import Workers
from atoll.runtime.errors import WeightPushError
from atoll.wire.types import EngineMemory

TAGS: Final = {EngineMemory.WEIGHTS: ["weights"], EngineMemory.CACHE: ["kv_cache", "cuda_graph"]}  # SGLang's


class ServerMemory:
    """Calls exclude one another, and commits."""

    def __init__(self, server: SGLangServer, workers: Workers) -> None:
        self._server, self._workers = server, workers
        self._away: Set[EngineMemory] = frozenset()
        self.has_weights = True  # those of its version: not from a release to the next commit

    async def release(self) -> None:
        """Nothing must be running. SGLang ends if it is told to release what it has released."""
        if here := set(EngineMemory) - self._away:
            self.has_weights = False
            await self._server.state()  # its answer comes after the last batch: SGLang has to be idle
            await self._workers.release()
            await self._call("/release_memory_occupation", [tag for memory in here for tag in TAGS[memory]])
            self._away = frozenset(EngineMemory)

    async def restore(self, memory: EngineMemory) -> None:
        if memory is EngineMemory.CACHE and not self.has_weights:
            raise WeightPushError(f"{memory!r} is restored before a version is committed: push one first")
        if memory in self._away:
            await self._call("/resume_memory_occupation", TAGS[memory])
            self._away -= {memory}
            if memory is EngineMemory.WEIGHTS:
                await self._workers.restore()

    async def _call(self, path: str, tags: Sequence[str]) -> None:
        """Kills a server that fails: what memory it has is unknown then."""
        try:
            await self._server.control(path, {"tags": tags})
        except SGLangError:
            await self._server.kill()
            raise
