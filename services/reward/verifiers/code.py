"""Model-written code against test cases.

The response's code runs only in a sandbox, and no expected value ever enters its process: it gets a
function's arguments or stdin, and returns plain data. That is compared on the host, or in a second sandbox if
a dataset's tests are code. Formats: code_tests.py.
"""

import asyncio
import inspect
import marshal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Annotated, Any, Self

from annotated_types import Gt

from atoll.reward.sandbox.base import Dialogue, Sandbox
from atoll.reward.verifiers import code_harness
from atoll.reward.verifiers.code_compare import equals, excerpt, output_difference, read_json
from atoll.reward.verifiers.code_harness import ANSWER, CALL, FAILURE, Verdict, decode, encode, read_answer
from atoll.reward.verifiers.code_program import program
from atoll.reward.verifiers.code_tests import AssertTests, CallTests, OutputTests, read_tests
from atoll.runtime.errors import UserError
from atoll.wire.types import Execution, Grade, ProgramLimits, ProgramStatus, ScoreItem

# Programs of one response at once: with more, a few responses that sleep in every case would take all places
# of the sandbox for programs that sleep.
RUNS_AHEAD = 2

# Compiled once, by an interpreter of the sandbox's version: in the sandbox, it would take as long as a
# program does.
_COMPILED = marshal.dumps(compile(inspect.getsource(code_harness), "code_harness.py", "exec"))
_HARNESS = f"import marshal\nexec(marshal.loads({_COMPILED!r}))\n"


async def code(
    item: ScoreItem,
    sandbox: Sandbox,
    is_file: bool = False,
    *,
    pass_fraction: bool = False,
    case_timeout_s: Annotated[float, Gt(0)] = 6.0,
    timeout_s: Annotated[float, Gt(0)] = 20.0,
    memory_mb: Annotated[int, Gt(0)] = 512,
) -> Grade:
    """1.0 if all test cases pass, otherwise 0.0; or the fraction that passes.

    `is_file`: the response is a program, without text around it. `case_timeout_s` limits one call or run,
    `timeout_s` all of a response's; both are wall time of its programs. The reason is "passed", or that of
    the first failing case: wrong answer, compile error, exception, timeout, memory, output limit, crash, exit
    code, no answer; or no code. Raises UserError if the row has no valid test cases, SandboxError if the
    sandbox fails.
    """
    tests = read_tests(item.ground_truth, item.extra)
    source = program(item.response, tests, is_file)
    if source is None:
        return Grade(0.0, "no code")
    limits = ProgramLimits(timeout_s=timeout_s, memory_bytes=memory_mb << 20)
    match tests:
        case OutputTests():
            verdicts = await _run_outputs(tests, source, sandbox, limits, case_timeout_s, pass_fraction)
        case CallTests():
            async with _Response(sandbox, source, limits, case_timeout_s) as response:
                verdicts = await _run_calls(tests, response, pass_fraction)
        case AssertTests():
            # the tests can still report after the response has run out of time
            judge_limits = replace(limits, timeout_s=timeout_s + case_timeout_s)
            async with (
                sandbox.open(_judge(tests, pass_fraction), judge_limits) as judge,
                _Response(sandbox, source, limits, case_timeout_s, shares_slot_with=judge) as response,
            ):
                verdicts = await _run_asserts(judge, response)
    return _grade(verdicts, tests.num_cases, pass_fraction)


def _grade(verdicts: Sequence[Verdict], num_cases: int, pass_fraction: bool) -> Grade:
    passed = 0
    reason = ""
    for number, (kind, detail) in enumerate(verdicts, start=1):
        if kind == "broken":
            raise UserError(f"test cases: case {number} is not a test: {detail}")
        passed += kind == "passed"
        if kind != "passed" and not reason:
            reason = f"{kind}: case {number}{': ' if detail else ''}{detail}"
    if reason:
        return Grade(passed / num_cases if pass_fraction else 0.0, reason)
    return Grade(1.0, "passed")


async def _run_outputs(
    tests: OutputTests,
    source: str,
    sandbox: Sandbox,
    limits: ProgramLimits,
    case_timeout_s: float,
    keep_going: bool,
) -> list[Verdict]:
    """Runs some programs ahead of the one whose output is compared next; the first failure ends them."""
    gate = asyncio.Semaphore(RUNS_AHEAD)
    case_limits = replace(limits, timeout_s=case_timeout_s)

    async def run(stdin: str) -> Execution:
        async with gate:
            return await sandbox.run(source, stdin.encode(), case_limits)

    runs = [asyncio.create_task(run(stdin)) for stdin, _ in tests.cases]
    verdicts: list[Verdict] = []
    left_s = limits.timeout_s
    try:
        for task, (_, expected) in zip(runs, tests.cases, strict=True):
            execution = await task
            left_s -= execution.wall_s
            verdict = _ending(execution)
            if verdict is None:  # in a thread: a megabyte of numbers takes seconds
                verdict = await asyncio.to_thread(_compare_output, execution.stdout, expected)
            verdicts.append(verdict)
            if left_s < 0:
                verdicts[-1] = ("timeout", f"{limits.timeout_s:g} s for all cases")
            if left_s < 0 or (verdicts[-1][0] != "passed" and not keep_going):
                break
    finally:
        for task in runs:
            task.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
    return verdicts


def _compare_output(stdout: bytes, expected: str) -> Verdict:
    difference = output_difference(stdout.decode(errors="replace"), expected)
    return ("passed", "") if difference is None else ("wrong answer", difference)


def _compare_value(answer: bytes, number: int, expected: Sequence[Any]) -> Verdict:
    kind, content = read_answer(answer, number, read_json)
    if kind != "value":
        return kind, content
    if any(equals(content, value) for value in expected):
        return "passed", ""
    return "wrong answer", f"got {excerpt(content)}, expected {excerpt(expected[0])}"


async def _run_calls(tests: CallTests, response: "_Response", keep_going: bool) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for number, (arguments, expected) in enumerate(tests.cases, start=1):
        try:
            frame = encode((number, tests.function, arguments, {}))
        except ValueError as error:
            raise UserError(f"test cases: case {number}: {error}") from None
        answer = await response.ask(frame)
        if isinstance(answer, bytes):
            answer = await asyncio.to_thread(_compare_value, answer, number, expected)
        verdicts.append(answer)
        if answer[0] != "passed" and not keep_going:
            break
    return verdicts


def _judge(tests: AssertTests, keep_going: bool) -> str:
    return f"{_HARNESS}judge({tests.setup!r}, {tests.source!r}, {tests.functions!r}, {keep_going})"


async def _run_asserts(judge: Dialogue, response: "_Response") -> list[Verdict]:
    """Forwards the tests' calls to the response's program, and its answers back, until the tests report."""
    called = False
    frame = await judge.ask(b"begin")
    while frame is not None and frame[:1] == CALL:
        called = True
        answer = await response.ask(frame[1:])
        frame = await judge.ask(ANSWER + answer if isinstance(answer, bytes) else FAILURE + encode(answer))
    report: list[Verdict] | None = None if frame is None else decode(frame[1:])
    if report is None:
        kind, detail = _ending(await judge.end()) or ("no answer", "")
        report = [(kind, f"{detail} (of the tests, on the response's values)")]
    if not called and all(kind != "broken" for kind, _ in report):
        raise UserError(f"test cases: the tests never call the response: got {report[:1]}")
    return report


class _Response:
    """The response's program, which answers calls. If it ends, it is restarted for the next call, within the
    time left for all of them."""

    def __init__(
        self,
        sandbox: Sandbox,
        source: str,
        limits: ProgramLimits,
        call_timeout_s: float,
        shares_slot_with: Dialogue | None = None,
    ) -> None:
        self._open = partial(sandbox.open, shares_slot_with=shares_slot_with)
        self._source = f"{_HARNESS}serve({source!r})"
        self._limits = limits
        self._call_timeout_s = call_timeout_s
        self._left_s = limits.timeout_s
        self._dialogue: Dialogue | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def ask(self, call: bytes) -> bytes | Verdict:
        """What the program sends, which is untrusted; or why it sends nothing."""
        if self._left_s <= 0:
            return "timeout", f"{self._limits.timeout_s:g} s for all cases"
        if self._dialogue is None:
            limits = replace(self._limits, timeout_s=self._left_s)
            self._dialogue = await self._stack.enter_async_context(self._open(self._source, limits))
        late: Verdict | None = None
        try:
            async with asyncio.timeout(self._call_timeout_s):
                answer = await self._dialogue.ask(call)
        except TimeoutError:
            answer, late = None, ("timeout", f"{self._call_timeout_s:g} s for one call")
        if answer is not None:
            return answer
        execution = await self._dialogue.end()
        self._left_s -= execution.wall_s
        self._dialogue = None
        await self._stack.aclose()
        return late or _ending(execution) or ("no answer", "its program ended, or closed the channel")


def _ending(execution: Execution) -> Verdict | None:
    """None: it ended normally."""
    detail = execution.detail
    match execution.status:
        case ProgramStatus.OK:
            return None
        case ProgramStatus.EXCEPTION if detail.startswith("MemoryError"):
            return "memory", ""
        case ProgramStatus.SIGNAL:
            return "crash", detail
    return execution.status.value, detail
