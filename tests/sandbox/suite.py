"""Runs all attacks in one sandbox, concurrently with each other and with a harmless program.

`python -m tests.sandbox.suite SETUP` prints a JSON object: the result of each attack, damage found on the
host, and what was left over.
"""

import asyncio
import ctypes
import json
import os
import sys
from typing import Any

import psutil

from atoll.reward.sandbox.base import Sandbox
from atoll.reward.sandbox.host import start_sandbox
from atoll.reward.score import check_grade
from atoll.reward.verifiers.code import code
from atoll.runtime.errors import AtollError
from atoll.wire.types import ProgramLimits
from tests.sandbox.cases import CASES, Case
from tests.sandbox.setups import SETUPS
from tests.sandbox.targets import targets
from tests.sandbox.verdicts import CHEATS, HONEST, Cheat

NOBODY = 65534  # as whom a sandbox of root runs programs
PROGRAMS = 8  # at once
# A program that answers each frame with itself.
ECHO = """
import os
while head := os.read(3, 4):
    size = int.from_bytes(head, "little")
    frame = b""
    while len(frame) < size:
        frame += os.read(3, size - len(frame))
    os.write(3, head + frame)
"""


LEFT = next(case for case in CASES if case.name == "inside.state_left_by_others")


async def run_suite(setup: str, token: str) -> dict[str, Any]:
    """`token` is in this process's memory and environment, and in a file."""
    _adopt_orphans()
    chosen = SETUPS[setup]
    user = NOBODY if os.getuid() == 0 and not chosen.container else os.getuid()
    before = _processes()
    async with start_sandbox(PROGRAMS, chosen.asks_namespaces) as sandbox:
        with targets(token, user) as made:
            processes, descriptors = _processes(), _descriptors()
            async with sandbox.open(ECHO, ProgramLimits(timeout_s=120.0)) as sibling:
                await sibling.ask(b"hello")
                host = made.described([os.getpid(), *_processes()])
                attacks = await asyncio.gather(*(_attack(sandbox, case, host, token) for case in CASES))
                cheats = await asyncio.gather(*(_cheat(sandbox, cheat) for cheat in CHEATS))
                honest = {kind: (await code(item, sandbox)).value for kind, item in HONEST.items()}
                answered = await sibling.ask(b"still here") == b"still here"
            state = await _attack(sandbox, LEFT, host, token)
            damage = made.damage()
            if not answered:
                damage.append("the program beside them was harmed")
            if _processes() != processes:
                damage.append(f"processes were {processes}, are {_processes()}")
            if _descriptors() != descriptors:
                damage.append(f"descriptors were {descriptors}, are {_descriptors()}")
    if _processes() != before:
        damage.append(f"left after the sandbox: {_processes() - before}")
    return {
        "tier": sandbox.tier,
        "attacks": {case.name: came for case, came in zip(CASES, attacks, strict=True)} | {LEFT.name: state},
        "cheats": {cheat.name: came for cheat, came in zip(CHEATS, cheats, strict=True)},
        "honest": honest,
        "damage": damage,
    }


async def _attack(sandbox: Sandbox, case: Case, host: bytes, token: str) -> str:
    """Empty if it was contained."""
    execution = await sandbox.run(case.source, host, case.limits)
    said = repr(execution)[:600]
    if token.encode() in execution.stdout + execution.stderr or token in execution.detail:
        return f"read the token: {said}"
    return "" if case.contained(execution) else said


async def _cheat(sandbox: Sandbox, cheat: Cheat) -> str:
    """Empty if it was graded 0: an error would let a model get rid of its bad samples."""
    try:
        grade = check_grade(await code(cheat.item, sandbox, case_timeout_s=1.0, timeout_s=2.0))
    except AtollError as error:
        return repr(error)
    printable = grade.reason.isprintable()  # a message takes it, and a terminal does not obey it
    return "" if grade.value == 0.0 and printable else repr(grade)


def _adopt_orphans() -> None:
    """An attack's daemon becomes a child of this process, and is noticed."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def _processes() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run_suite(sys.argv[1], os.environ["ATOLL_TOKEN"]))))
