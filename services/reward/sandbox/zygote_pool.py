"""The zygotes of a sandbox."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Self

from atoll.reward.sandbox.processes import ZygoteProcess, ZygoteSettings
from atoll.runtime.errors import SandboxError

log = logging.getLogger(__name__)


class ZygotePool:
    """A fixed number of zygotes. Dead ones are replaced on demand."""

    def __init__(self, settings: ZygoteSettings, zygotes: Sequence[ZygoteProcess]) -> None:
        self._settings = settings
        self._zygotes = list(zygotes)
        self._replacing = asyncio.Lock()
        self._is_open = True

    @classmethod
    async def start(cls, count: int, settings: ZygoteSettings) -> Self:
        """Raises SandboxError if one of them cannot work here."""
        starting = [asyncio.create_task(ZygoteProcess.start(settings)) for _ in range(count)]
        await asyncio.wait(starting)
        if failed := [error for task in starting if (error := task.exception())]:
            for task in starting:
                if not task.exception():
                    task.result().close()
            raise failed[0]
        return cls(settings, [task.result() for task in starting])

    async def least_busy(self) -> ZygoteProcess:
        """A living zygote, until the caller's next await. Raises SandboxError if the pool is closed or a
        zygote cannot be started."""
        async with self._replacing:
            while True:
                if not self._is_open:
                    raise SandboxError("the sandbox is closed")
                for i, zygote in enumerate(self._zygotes):
                    if not zygote.is_alive:
                        log.warning("sandbox zygote exited, starting another")
                        self._zygotes[i] = await ZygoteProcess.start(self._settings)
                # others may have died while one was started
                if living := [zygote for zygote in self._zygotes if zygote.is_alive]:
                    return min(living, key=lambda zygote: zygote.num_programs)

    async def close(self) -> None:
        """Running and waiting programs end with a SandboxError."""
        async with self._replacing:
            self._is_open = False
            for zygote in self._zygotes:
                zygote.close()
