"""What graders and tools ask of a sandbox.

A program is Python source. It runs as `__main__` in a process of its own that was forked from a clean
interpreter, can reach nothing but its own memory, its standard streams and (with namespaces) one sized
directory that is its working directory, and is gone with all its children when the call returns.
"""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from atoll.wire.types import Execution, Limits


class Dialogue(Protocol):
    """A program that is talked to while it runs: on its descriptor CHANNEL_FD, in frames of a 4-byte
    little-endian length and that many bytes, both ways."""

    async def ask(self, frame: bytes) -> bytes | None:
        """The program's next frame; None where it ends, breaks a limit or sends what is no frame."""
        ...

    async def end(self) -> Execution:
        """Ends the program if it still runs, and says how it went until then."""
        ...


class Sandbox(Protocol):
    tier: str  # "landlock, seccomp", "landlock, seccomp, namespaces"

    async def run(self, source: str, stdin: bytes, limits: Limits) -> Execution:
        """From start to end. Raises SandboxError where that says nothing about the program."""
        ...

    def open(
        self, source: str, limits: Limits, *, beside: Dialogue | None = None
    ) -> AbstractAsyncContextManager[Dialogue]:
        """Starts a program for a dialogue; `limits.timeout_s` covers all of it. Raises SandboxError as `run`
        does; leaving ends the program.

        `beside`: takes turns with that one, so the two count as one of the programs at once. To wait for a
        place while holding one could last forever.
        """
        ...

    async def close(self) -> None: ...


CHANNEL_FD = 3
MAX_FRAME_BYTES = 4 << 20
