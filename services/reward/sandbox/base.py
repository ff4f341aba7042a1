"""The sandbox interface for graders and tools.

A program is Python source. It runs as `__main__` in its own process, forked from a clean interpreter. It can
access only its own memory, its standard streams and (with namespaces) a working directory of limited size,
and is gone, with all its children, when the call returns.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from atoll.wire.types import Execution, ProgramLimits


class Dialogue(Protocol):
    """A dialogue with a running program over its descriptor CHANNEL_FD. Frames in both directions are a
    4-byte little-endian length followed by that many bytes."""

    async def ask(self, frame: bytes) -> bytes | None:
        """The program's next frame; None if it ends, exceeds a limit or sends an invalid frame."""
        ...

    async def end(self) -> Execution:
        """Ends the program if it still runs; returns its execution so far."""
        ...


class Sandbox(Protocol):
    tier: str  # "landlock, seccomp", "landlock, seccomp, namespaces"
    refusal: str  # why this machine gives no namespaces; "" if it does, or was not asked

    async def run(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        """Runs a program to its end. Raises SandboxError if the sandbox, not the program, fails."""
        ...

    def open(
        self, source: str, limits: ProgramLimits, *, shares_slot_with: Dialogue | None = None
    ) -> AbstractAsyncContextManager[Dialogue]:
        """Starts a program for a dialogue; `limits.timeout_s` covers all of it. Raises SandboxError like
        `run`; leaving the context ends the program.

        `shares_slot_with`: the two programs run alternately and share one slot. (Waiting for a slot while
        holding another could deadlock.)
        """
        ...

    def watched(self, when_all_sleep: Callable[[], None]) -> "Sandbox":
        """The same sandbox for one caller. Calls `when_all_sleep`, perhaps repeatedly, if all programs that
        this caller runs at that moment sleep."""
        ...

    def apart(self, programs: int) -> "Sandbox":
        """The same sandbox for programs that are counted separately: at most so many run concurrently,
        whatever the others do."""
        ...

    async def close(self) -> None:
        """Running and waiting programs end with a SandboxError."""
        ...


CHANNEL_FD = 3
MAX_FRAME_BYTES = 4 << 20
