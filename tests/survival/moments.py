"""Moments inside the services of a run, at which a test can hold them.

Services report "decode" (each decoding step of a replica that has work), "grade" (each response) and "loss"
(each micro-batch of an update) on the Unix socket SURVIVAL_SOCKET. A test can thus send a signal in the
middle of a step. It counts moments, so the speed of the machine does not matter.
"""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from atoll import ScoreItem

SOCKET = "SURVIVAL_SOCKET"
HANG_S = 300.0  # only a hang takes as long

# Runs a replica, and reports each decoding step that has work.
DECODING = """#!{python}
import runpy, sys
sys.path.insert(0, "{root}")
from atoll.rollout.engines.local_decoder import Decoder
from tests.survival.moments import report

step = Decoder.step

def reporting(self, admit):
    if self.num_rows > 0:
        report("decode")
    return step(self, admit)

Decoder.step = reporting
sys.argv = sys.argv[2:]
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""


def environment(folder: Path) -> dict[str, str]:
    """Of the services of the run in `folder`; their temporary files go to a folder of their own."""
    temporary_folder(folder).mkdir(parents=True, exist_ok=True)
    return {
        SOCKET: str(moments_socket(folder)),
        "TMPDIR": str(temporary_folder(folder)),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torchinductor"),  # it is for later processes
    }


def temporary_folder(folder: Path) -> Path:
    return folder / "tmp"


def moments_socket(folder: Path) -> Path:
    return folder / "moments"


def report(moment: str) -> None:
    """Returns once the test lets the service continue, at once if no test listens any more."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError):
        connection.connect(os.environ[SOCKET])
        connection.sendall(f"{moment}\n".encode())
        connection.recv(1)


def grade(item: "ScoreItem") -> float:
    """Grades as exact_match does, and reports each response."""
    report("grade")
    return float(item.response == item.ground_truth)


def ppo_clip(tokens: Any) -> Any:
    """The built-in loss; reports each micro-batch."""
    from atoll.trainer.losses import loss

    report("loss")
    return loss.ppo_clip(tokens)


def decoding_python(folder: Path, module: str = "atoll.rollout") -> Path:
    """An interpreter for `rollout.python` whose replicas, run by `module`, report their decoding steps."""
    path = folder / "decoding_python"
    path.write_text(DECODING.format(python=sys.executable, root=Path(__file__).parents[2], module=module))
    path.chmod(0o755)
    return path


@dataclass
class Moments:
    """Counts what the services of the run in `folder` report, for as long as the context lasts."""

    folder: Path
    counts: dict[str, int] = field(default_factory=dict)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _held: dict[str, int] = field(default_factory=dict)  # the count at which it is to be held
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def __aenter__(self) -> Self:
        server = await asyncio.start_unix_server(self._hear, moments_socket(self.folder))
        await self._stack.enter_async_context(server)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._held.clear()
        await self._wake()
        await self._stack.aclose()
        moments_socket(self.folder).unlink()

    @asynccontextmanager
    async def at(self, moment: str, count: int) -> AsyncIterator[None]:
        """Waits for the `count`-th of these moments from now. The services that report it, and those that
        report it again, wait until the context is left."""
        self._held[moment] = target = self.counts.get(moment, 0) + count
        async with asyncio.timeout(HANG_S), self._changed:
            await self._changed.wait_for(lambda: self.counts.get(moment, 0) >= target)
        try:
            yield
        finally:
            del self._held[moment]
            await self._wake()

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # the service has ended
            moment = (await reader.readline()).decode().strip()
            self.counts[moment] = number = self.counts.get(moment, 0) + 1
            await self._wake()
            async with self._changed:
                await self._changed.wait_for(lambda: number < self._held.get(moment, number + 1))
            writer.write(b"\n")
            writer.close()
            await writer.wait_closed()

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
