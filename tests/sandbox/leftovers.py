"""Runs two thousand programs and prints what they left, a line for each process, descriptor, mount or file:

    python -m tests.sandbox.leftovers namespaces|without

In a process that does nothing else: in that of other tests, gRPC closes the descriptors of channels that were
collected as garbage some time later, in a thread of its own.
"""

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from atoll.reward.sandbox.base import Sandbox
from atoll.reward.sandbox.host import NOBODY, start_sandbox
from atoll.wire.types import ProgramLimits, ProgramStatus

PROGRAMS = 4  # at once
WRITE = "open('file', 'w').write('x' * 1000)\n"  # where a program has a directory
ENDS = {
    "print(1)": ProgramStatus.OK,
    "import os; os._exit(1)": ProgramStatus.EXIT_CODE,
    "1 / 0": ProgramStatus.EXCEPTION,
    "import os; os.abort()": ProgramStatus.SIGNAL,
}


async def two_thousand_runs(namespaces: bool) -> list[str]:
    async with start_sandbox(PROGRAMS, namespaces) as sandbox:
        await _run_each(sandbox, 1)
        before = _present()
        for _ in range(20):
            await _run_each(sandbox, 25)
        after = _present()
    return [f"left: {line}" for line in after - before] + [f"gone: {line}" for line in before - after]


async def _run_each(sandbox: Sandbox, times: int) -> None:
    write = WRITE if "namespaces" in sandbox.tier else ""
    runs = [sandbox.run(write + source, b"", ProgramLimits()) for source in [*ENDS] * times]
    statuses = [execution.status for execution in await asyncio.gather(*runs)]
    assert statuses == list(ENDS.values()) * times, statuses


def _present() -> set[str]:
    """What a run could leave behind; no two lines are equal, since descriptors and mounts have numbers."""
    lines = _files()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        who, folder = f"process {process.pid}", Path(f"/proc/{process.pid}")
        if process.status() == psutil.STATUS_ZOMBIE:
            lines.add(f"{who} is a zombie")
            continue
        lines.add(who)
        lines |= {f"{who} mounts {line}" for line in (folder / "mountinfo").read_text().splitlines()}
        for number in os.listdir(folder / "fd"):
            with suppress(FileNotFoundError):  # the one that listed them
                lines.add(f"{who} has descriptor {number}: {os.readlink(folder / 'fd' / number)}")
    return lines


def _files() -> set[str]:
    """Files of the user that programs run as: those of others come and go."""
    found, user = set(), NOBODY if os.geteuid() == 0 else os.geteuid()
    for entry in (entry for folder in ("/", "/dev/shm", "/var/tmp") for entry in os.scandir(folder)):
        with suppress(FileNotFoundError):
            if entry.stat(follow_symlinks=False).st_uid == user:
                found.add(f"file {entry.path}")
    return found


if __name__ == "__main__":
    print(*sorted(asyncio.run(two_thousand_runs(sys.argv[1] == "namespaces"))), sep="\n", end="")
