"""The host side of the sandbox: zygotes, interpreter and concurrency."""

import asyncio
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from atoll.reward.sandbox import seccomp
from atoll.reward.sandbox.attacks import run_attacks
from atoll.reward.sandbox.base import Dialogue, Sandbox
from atoll.reward.sandbox.processes import ProgramProcess, ZygoteSettings
from atoll.reward.sandbox.program_slots import ProgramSlots, SleepWatch
from atoll.reward.sandbox.zygote_pool import ZygotePool
from atoll.runtime.errors import SandboxError, UserError
from atoll.wire.types import Execution, ProgramLimits

log = logging.getLogger(__name__)

NOBODY = 65534
_PROBE_S = 30.0


@asynccontextmanager
async def start_sandbox(
    programs: int, namespaces: bool, interpreter: str | None = None
) -> AsyncIterator[Sandbox]:
    """Starts a sandbox and runs its self-test; at most `programs` run concurrently, others wait.

    `namespaces`: use them if a probe shows that they work. `interpreter`: overrides the default one. Raises
    SandboxError if this machine cannot confine programs, and UserError if there is no readable interpreter.
    """
    calls = seccomp.program(platform.machine())
    user = _user()
    chosen = await asyncio.to_thread(_interpreter, user, interpreter)
    settings = ZygoteSettings(chosen, user, namespaces, calls)
    refusal = await _probe(settings) if namespaces else ""
    if refusal:
        log.info("Programs run without namespaces: %s", refusal)
        settings = replace(settings, namespaces=False)
    sandbox = await ForkSandbox.start(programs, settings, refusal)
    try:
        await run_attacks(sandbox, user)
        yield sandbox
    finally:
        await sandbox.close()


class ForkSandbox:
    """Implements Sandbox. One zygote per core; programs go to the least busy one."""

    def __init__(
        self, tier: str, zygotes: ZygotePool, slots: ProgramSlots, watch: SleepWatch, refusal: str = ""
    ) -> None:
        self.tier, self.refusal = tier, refusal
        self._zygotes, self._slots, self._watch = zygotes, slots, watch

    @classmethod
    async def start(cls, programs: int, settings: ZygoteSettings, refusal: str = "") -> "ForkSandbox":
        """Does not run the attacks."""
        tier = "landlock, seccomp" + (", namespaces" if settings.namespaces else "")
        zygotes = await ZygotePool.start(min(programs, len(os.sched_getaffinity(0))), settings)
        return cls(tier, zygotes, ProgramSlots(programs), SleepWatch(lambda: None), refusal)

    def watched(self, when_all_sleep: Callable[[], None]) -> "ForkSandbox":
        return ForkSandbox(self.tier, self._zygotes, self._slots, SleepWatch(when_all_sleep), self.refusal)

    def apart(self, programs: int) -> "ForkSandbox":
        return ForkSandbox(self.tier, self._zygotes, ProgramSlots(programs), self._watch, self.refusal)

    async def run(self, source: str, stdin: bytes, limits: ProgramLimits) -> Execution:
        async with (
            self._slots.acquire() as park,
            self._program(source, stdin, limits, talks=False, park=park) as program,
        ):
            return await program.wait_ended()

    @asynccontextmanager
    async def open(
        self, source: str, limits: ProgramLimits, *, shares_slot_with: Dialogue | None = None
    ) -> AsyncIterator[Dialogue]:
        place = self._slots.acquire() if shares_slot_with is None else nullcontext(lambda: None)
        async with (
            place as park,
            self._program(source, b"", limits, talks=True, park=park) as program,
        ):
            await program.wait_started()
            yield program

    async def close(self) -> None:
        await self._zygotes.close()

    @asynccontextmanager
    async def _program(
        self, source: str, stdin: bytes, limits: ProgramLimits, talks: bool, park: Callable[[], None]
    ) -> AsyncIterator[ProgramProcess]:
        with self._watch.program() as fall_asleep:

            def step_aside(sleeps: bool) -> None:
                park()
                if sleeps:
                    fall_asleep()

            program = ProgramProcess(
                await self._zygotes.least_busy(), source, stdin, limits, talks, step_aside
            )
            try:
                yield program
            finally:
                await program.terminate()


async def _probe(settings: ZygoteSettings) -> str:
    """Why programs cannot have namespaces and a writable directory on this machine; "" if they can."""
    try:
        sandbox = await ForkSandbox.start(1, settings)
    except SandboxError as error:
        return str(error)
    try:
        execution = await sandbox.run("print(open('file', 'w').write('x'))", b"", ProgramLimits())
        return "" if execution.stdout == b"1\n" else f"a program could not write a file: {execution.detail}"
    except SandboxError as error:
        return str(error)
    finally:
        await sandbox.close()


def _user() -> int | None:
    """The user that programs run as, if not this process's user.

    Root without the capability to change users, as in a container that dropped all capabilities, merely owns
    files, and Landlock protects those.
    """
    if os.geteuid() != 0:
        return None
    status = Path("/proc/self/status").read_text().split()
    capabilities = int(status[status.index("CapEff:") + 1], 16)
    setgid_setuid = 0b11 << 6
    return NOBODY if capabilities & setgid_setuid == setgid_setuid else None


def _interpreter(user: int | None, chosen: str | None) -> str:
    """The first interpreter that `user` can run: this process's own, or the system's of the same version."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own: str = sys._base_executable  # type: ignore[attr-defined]  # a virtual environment's link target
    candidates = [own, shutil.which(name, path="/usr/local/bin:/usr/bin")] if chosen is None else [chosen]
    for candidate in candidates:
        if candidate is None:
            continue
        command = [candidate, "-I", "-S", "-c", "import ctypes"]
        try:
            subprocess.run(
                command,
                user=user,
                group=user,
                env={},
                cwd="/",
                check=True,
                capture_output=True,
                timeout=_PROBE_S,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.info("interpreter %s is not usable: %s", candidate, error)
        else:
            return candidate
    who = "nobody, the user that runs programs," if user else "this user"
    raise UserError(
        f"{who} cannot start {' or '.join(filter(None, candidates))}, the interpreter of the sandbox: "
        f"make the folders above it accessible (chmod o+x), or install {name} in /usr/bin"
    )
