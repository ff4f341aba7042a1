"""Programs in the sandbox per second and core, and what programs that hang cost the others.

`python -m benchmarks.reward_sandbox` measures only what responses that sleep cost others of the grader code.

The rate is of the whole machine, divided by the cores that this process may use; since the machine may have
other things to do, the CPU time of a program is told, too, with what the service and the zygotes spend on it.
Programs that hang are 1 % of all and come evenly; each runs into its deadline. The clean run that they are
compared with is measured right before.
"""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from atoll.config.schema import GraderConfig
from atoll.reward.graders import SandboxedGrader
from atoll.reward.sandbox.base import CHANNEL_FD, Sandbox
from atoll.reward.sandbox.host import start_sandbox
from atoll.wire.types import (
    FinishReason,
    Grade,
    GroupId,
    ProgramLimits,
    ProgramStatus,
    SampleId,
    ScoreItem,
)

RUNS = 1000
HANGING_EVERY = 100
PROGRAMS = 16  # the default of reward.sandbox.programs
LIMITS = ProgramLimits(timeout_s=5.0)  # the default

SHORT = "print(1)"
SLEEPS = "import time\nwhile True: time.sleep(1)"
SPINS = "while True: pass"
CALLS = 10  # of the function, in one program
CALLED = f"""
import os

def take(size):
    data = b""
    while len(data) < size:
        data += os.read({CHANNEL_FD}, size - len(data))
    return data

def add(a, b):
    return a + b

while True:
    a, b = take(int.from_bytes(take(4), "little")).split()
    answer = str(add(int(a), int(b))).encode()
    os.write({CHANNEL_FD}, len(answer).to_bytes(4, "little") + answer)
"""


HONEST, SLEEPERS = 100, 48  # responses
# By kind of tests: those, a response that passes them, and one that sleeps.
RESPONSES = {
    "asserts": (
        '["assert f(2) == 4", "assert f(3) == 9"]',
        "def f(x): return x * x",
        "import time\ndef f(x): time.sleep(100)",
    ),
    "lines": (
        '{"inputs": ["2", "3", "4", "5"], "outputs": ["4", "9", "16", "25"]}',
        "print(int(input()) ** 2)",
        "import time\ntime.sleep(100)",
    ),
}


def run() -> dict[str, Any]:
    """By tier."""
    return asyncio.run(_run(_measure))


def responses() -> dict[str, Any]:
    """By tier and kind of tests."""
    return asyncio.run(_run(_responses))


async def _run(measure: Callable[[Sandbox], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    measured = {}
    for namespaces in True, False:
        async with start_sandbox(PROGRAMS, namespaces) as sandbox:
            measured[sandbox.tier] = await measure(sandbox)
    return measured


async def _measure(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "print": await _rate(sandbox, _short),
        f"dialogue_{CALLS}_calls": await _rate(sandbox, _dialogue),
        "sleeping": await _beside(sandbox, SLEEPS),
        "spinning": await _beside(sandbox, SPINS),
        "responses": await _responses(sandbox),
    }


async def _rate(sandbox: Sandbox, work: Callable[[Sandbox], Awaitable[None]]) -> dict[str, float]:
    cpu, start = _cpu_s(), time.monotonic()
    await asyncio.gather(*(work(sandbox) for _ in range(RUNS)))
    per_second = RUNS / (time.monotonic() - start)
    return {
        "per_second": per_second,
        "per_second_and_core": per_second / len(os.sched_getaffinity(0)),
        "cpu_ms": (_cpu_s() - cpu) / RUNS * 1000,
    }


async def _beside(sandbox: Sandbox, source: str) -> dict[str, float]:
    """`of_clean`: the rate of those that do not hang until the last of them is done, as a share of the rate
    without any that hang."""
    clean = (await _rate(sandbox, _short))["per_second"]
    hanging, start = [], time.monotonic()
    short = []
    for i in range(RUNS):
        if i % HANGING_EVERY == 0:
            hanging.append(asyncio.create_task(sandbox.run(source, b"", LIMITS)))
        short.append(asyncio.create_task(_short(sandbox)))
    await asyncio.gather(*short)
    per_second = RUNS / (time.monotonic() - start)
    executions = await asyncio.gather(*hanging)
    assert {execution.status for execution in executions} == {ProgramStatus.TIMEOUT}
    return {
        "clean_per_second": clean,
        "per_second": per_second,
        "of_clean": per_second / clean,
        "hanging_cpu_s": sum(execution.cpu_s for execution in executions) / len(executions),
    }


async def _short(sandbox: Sandbox) -> None:
    execution = await sandbox.run(SHORT, b"", ProgramLimits(timeout_s=60.0))
    assert execution.stdout == b"1\n", execution


async def _dialogue(sandbox: Sandbox) -> None:
    async with sandbox.open(CALLED, ProgramLimits(timeout_s=60.0)) as dialogue:
        for i in range(CALLS):
            assert await dialogue.ask(f"{i} 1".encode()) == str(i + 1).encode()


async def _responses(sandbox: Sandbox) -> dict[str, Any]:
    """Seconds until the last of the honest ones is graded, alone and behind those that sleep."""
    grader = SandboxedGrader(GraderConfig.model_validate({"name": "code"}), sandbox, PROGRAMS)
    measured = {}
    for kind, (tests, honest, sleeps) in RESPONSES.items():
        alone = await _graded_s(grader, honest, tests)
        sleeping = [asyncio.create_task(grader.grade(_item(sleeps, tests))) for _ in range(SLEEPERS)]
        beside = await _graded_s(grader, honest, tests)
        grades = await asyncio.gather(*sleeping)
        assert all(isinstance(grade, Grade) and grade.reason.startswith("timeout") for grade in grades)
        measured[kind] = {"alone_s": alone, "beside_sleepers_s": beside, "ratio": beside / alone}
    return measured


async def _graded_s(grader: SandboxedGrader, response: str, tests: str) -> float:
    start = time.monotonic()
    grades = await asyncio.gather(*(grader.grade(_item(response, tests)) for _ in range(HONEST)))
    assert grades == [Grade(1.0, "passed")] * HONEST, grades
    return time.monotonic() - start


def _item(response: str, tests: str) -> ScoreItem:
    sample = SampleId(GroupId("bench", 0, 0), 0)
    return ScoreItem(sample, "", response, tests, "", FinishReason.STOP, 1)


def _cpu_s() -> float:
    """Of this process, of the zygotes, and of the programs that have ended."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:4]) for process in processes)


if __name__ == "__main__":
    print(json.dumps(responses(), indent=2))
