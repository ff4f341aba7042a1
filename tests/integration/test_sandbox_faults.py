"""The sandbox and its grader when zygotes die, when programs pile up, and when responses hang."""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from atoll.config.schema import GraderConfig
from atoll.reward.graders import SandboxedGrader
from atoll.reward.sandbox import processes
from atoll.reward.sandbox.base import Sandbox
from atoll.reward.sandbox.host import start_sandbox
from atoll.reward.sandbox.processes import ProgramProcess, ZygoteProcess
from atoll.reward.score import Failure, Outcome
from atoll.runtime.errors import SandboxError
from atoll.wire.types import Grade, ProgramLimits
from tests.unit.verifier_items import item

HANG_S = 60.0  # only a hang takes that long

ASSERTS = '["assert f(2) == 4", "assert f(3) == 9"]'
LINES = '{"inputs": ["2", "3", "4", "5"], "outputs": ["4", "9", "16", "25"]}'
HONEST = {ASSERTS: "def f(x): return x * x", LINES: "print(int(input()) ** 2)"}
SLEEPS = {
    ASSERTS: "import time\ndef f(x): time.sleep(1000)",
    LINES: "import time\ntime.sleep(1000)",
}

Zygotes = dict[int, ZygoteProcess]  # in the order in which they were started


@pytest.fixture
def zygotes(monkeypatch: pytest.MonkeyPatch) -> Zygotes:
    """Every zygote that the test starts, on a machine of two cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    started: Zygotes = {}
    numbers = itertools.count()
    start = ZygoteProcess.start

    async def record(settings: processes.ZygoteSettings) -> ZygoteProcess:
        number = next(numbers)
        started[number] = await start(settings)
        return started[number]

    monkeypatch.setattr(ZygoteProcess, "start", record)
    return started


@pytest_asyncio.fixture
async def sandbox(zygotes: Zygotes) -> AsyncIterator[Sandbox]:
    async with start_sandbox(4, namespaces=False) as started:
        yield started


def grader(sandbox: Sandbox, **settings: float) -> SandboxedGrader:
    return SandboxedGrader(GraderConfig.model_validate({"name": "code", **settings}), sandbox, programs=4)


async def kill(zygote: ZygoteProcess) -> None:
    """Returns once the sandbox has noticed."""
    zygote._process.kill()
    async with asyncio.timeout(HANG_S):
        while zygote.is_alive:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("first", [0, 1])
async def test_a_zygote_that_dies_while_another_is_replaced_gets_no_program(
    first: int, sandbox: Sandbox, zygotes: Zygotes, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kill(zygotes[first])
    start = ZygoteProcess.start

    async def start_while_the_other_dies(settings: processes.ZygoteSettings) -> ZygoteProcess:
        monkeypatch.setattr(ZygoteProcess, "start", start)
        await kill(zygotes[1 - first])
        return await start(settings)

    monkeypatch.setattr(ZygoteProcess, "start", start_while_the_other_dies)
    running = asyncio.create_task(sandbox.run("print(1)", b"", ProgramLimits()))
    done, _ = await asyncio.wait([running], timeout=HANG_S)
    assert done
    assert running.result().stdout == b"1\n"


async def test_a_program_of_a_dead_zygote_is_an_error_at_once(sandbox: Sandbox, zygotes: Zygotes) -> None:
    await kill(zygotes[0])
    with pytest.raises(SandboxError, match="cannot be started"):
        ProgramProcess(zygotes[0], "print(1)", b"", ProgramLimits(), talks=True, park=lambda _: None)
    assert zygotes[0].num_programs == 0


@pytest.mark.parametrize("num_kills", [30, pytest.param(200, marks=pytest.mark.long)])
async def test_no_call_outlives_its_deadline_while_zygotes_are_killed(
    num_kills: int, sandbox: Sandbox, zygotes: Zygotes
) -> None:
    """Kills a zygote at random, every few verdicts."""
    chance = random.Random(num_kills)
    code = grader(sandbox, deadline_s=HANG_S)
    verdicts: list[Outcome] = []
    another = asyncio.Event()
    is_over = False

    async def keep_grading() -> None:
        while not is_over:
            async with asyncio.timeout(HANG_S + processes.KILL_S):
                verdicts.append(await code.grade(item(HONEST[ASSERTS], ASSERTS)))
            another.set()

    grading = [asyncio.create_task(keep_grading()) for _ in range(8)]
    for _ in range(num_kills):
        left = chance.randrange(4)  # verdicts until the next one
        while left > 0 or not (alive := [zygote for zygote in zygotes.values() if zygote.is_alive]):
            another.clear()
            await another.wait()
            left -= 1
        chance.choice(alive)._process.kill()
    is_over = True
    await asyncio.gather(*grading)
    failures = [verdict for verdict in verdicts if verdict != Grade(1.0, "passed")]
    assert all(isinstance(failed, Failure) and failed.retryable for failed in failures), failures
    assert len(zygotes) > num_kills / 2  # the others were killed twice, or are not needed any more
    # no place was lost: four responses need all of them at once
    tasks = [sandbox.run("input()", b"", ProgramLimits(timeout_s=1.0)) for _ in range(4)]
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*tasks, code.grade(item(HONEST[ASSERTS], ASSERTS)))


async def test_one_zygote_holds_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the open files that a program may have, of which it inherits one for each of the others."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    limits = ProgramLimits(timeout_s=1000.0)
    async with start_sandbox(80, namespaces=False) as sandbox:
        asleep = [asyncio.create_task(sandbox.run(SLEEPS[LINES], b"", limits)) for _ in range(79)]
        executions = [await sandbox.run("print(1)", b"", limits) for _ in range(3)]
        assert [execution.stdout for execution in executions] == [b"1\n"] * 3
        assert not any(task.done() for task in asleep)
        for task in asleep:
            task.cancel()
        await asyncio.wait(asleep)


@pytest.mark.parametrize("tests", [ASSERTS, LINES], ids=["asserts", "lines"])
async def test_responses_that_sleep_hold_up_no_others(sandbox: Sandbox, tests: str) -> None:
    """Three times as many as there are places, and they never wake."""
    code = grader(sandbox, deadline_s=2000.0, case_timeout_s=1000.0, timeout_s=1000.0)
    sleeping = [asyncio.create_task(code.grade(item(SLEEPS[tests], tests))) for _ in range(12)]
    async with asyncio.timeout(HANG_S):
        grades = await asyncio.gather(*[code.grade(item(HONEST[tests], tests)) for _ in range(20)])
    assert grades == [Grade(1.0, "passed")] * 20
    assert not any(task.done() for task in sleeping)
    for task in sleeping:
        task.cancel()
    await asyncio.wait(sleeping)
