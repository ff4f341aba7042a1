"""The code grader on a real sandbox: HumanEval, rows of other datasets with verdicts worked out by hand, and
reward hacks."""

import asyncio
import gzip
import json
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from atoll.config.schema import GraderConfig
from atoll.reward.graders import GraderPanel
from atoll.reward.sandbox.base import Sandbox
from atoll.reward.sandbox.host import start_sandbox
from atoll.reward.verifiers.code import code
from atoll.runtime.errors import UserError
from atoll.wire.types import (
    FinishReason,
    Grade,
    Graded,
    GradingError,
    GroupId,
    SampleId,
    ScoreItem,
    Verdict,
)

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

HUMANEVAL = Path(__file__).parents[1] / "data" / "humaneval" / "HumanEval.jsonl.gz"
PROGRAMS = 4
CASE_S = 4.0  # for one case: longer than this machine may stall


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with start_sandbox(PROGRAMS, namespaces=True) as started:
        yield started


def item(response: str, tests: Any) -> ScoreItem:
    return ScoreItem(
        id=SampleId(GroupId("run", 0, 0), 0),
        prompt="",
        response=response,
        ground_truth=json.dumps(tests),
        data_source="",
        finish_reason=FinishReason.STOP,
        response_length=1,
    )


def humaneval() -> list[dict[str, str]]:
    with gzip.open(HUMANEVAL, "rt") as file:
        return [json.loads(line) for line in file]


async def grade_all(sandbox: Sandbox, responses: list[str]) -> list[Grade]:
    """Grades one response for each problem. Runs more at once than there are slots: a response's two programs
    must not wait for each other."""
    graded = [
        code(item(response, row), sandbox) for response, row in zip(responses, humaneval(), strict=True)
    ]
    async with asyncio.timeout(120):
        return await asyncio.gather(*graded)


async def test_all_canonical_solutions_pass(sandbox: Sandbox) -> None:
    rows = humaneval()
    assert len(rows) == 164
    responses = [
        f"So:\n```python\n{row['prompt']}{row['canonical_solution']}```"
        if i % 2
        else row["canonical_solution"]
        for i, row in enumerate(rows)
    ]
    grades = await grade_all(sandbox, responses)
    assert [grade for grade in grades if grade != Grade(1.0, "passed")] == []


@pytest.mark.parametrize("body", ["", "    pass\n", "    return 8675309\n", "    raise AssertionError\n"])
async def test_no_empty_or_wrong_body_passes(sandbox: Sandbox, body: str) -> None:
    grades = await grade_all(sandbox, [body] * 164)
    kinds = {(grade.value, grade.reason.partition(":")[0]) for grade in grades}
    expected = {"": "no code", "    raise AssertionError\n": "exception"}.get(body, "wrong answer")
    assert kinds == {(0.0, expected)}


# not 25, which may occur as a descriptor or run number in frames that a response sees
SQUARES = {
    "test_list": ["assert f(2) == 4", "assert f(5000) == 25_000_000", "assert f(-1) == 1", "assert f(0) == 0"]
}
SQUARE_CALLS = {"fn_name": "f", "inputs": [[2], [5000], [-1], [0]], "outputs": [4, 25_000_000, 1, 0]}
SQUARE_LINES = {"inputs": ["2\n", "5000\n", "-1\n", "0\n"], "outputs": ["4\n", "25000000\n", "1\n", "0\n"]}
FUNCTIONS = pytest.mark.parametrize("tests", [SQUARES, SQUARE_CALLS], ids=["asserts", "calls"])


@pytest.mark.parametrize(
    ("response", "value", "share", "reason"),
    [
        ("def f(x): return x * x", 1, 1, "passed"),
        ("def f(x): return x ** 2.0", 1, 1, "passed"),  # 4.0 == 4
        ("def f(x):\n    print('hm', x)\n    return x * x", 1, 1, "passed"),
        ("f = lambda x: x * x", 1, 1, "passed"),
        ("def f(x): return abs(x) * x", 0, 0.75, "wrong answer: case 3: "),
        ("def f(x): return 4", 0, 0.25, "wrong answer: case 2: "),
        (
            "def f(x): return 4 / (x - 2) and 4",
            0,
            0,
            "exception: case 1: ZeroDivisionError: division by zero",
        ),
        ("def f(x): return x * x if x else g(x)", 0, 0.75, "exception: case 4: NameError: "),
        ("def g(x): return x * x", 0, 0, "exception: case 1: NameError: name 'f' is not defined"),
        ("def f(x) return x * x", 0, 0, "compile error: case 1: SyntaxError: "),
        (
            "def f(x): return x * x\n1 / 0",
            0,
            0,
            "exception: case 1: ZeroDivisionError: division by zero, while",
        ),
        ("def f(x): return None", 0, 0, "wrong answer: case 1: "),
        ("def f(x): yield x * x", 0, 0, "wrong answer: case 1: got builtins.generator, expected plain data"),
        ("def f(x): return [0] * 10 ** 10 if x == 5000 else x * x", 0, 0.75, "memory: case 2"),
        ("def f(x):\n    while x < 0: pass\n    return x * x", 0, 0.75, "timeout: case 3: 4 s for one call"),
        ("import os\ndef f(x): os._exit(0) if x < 0 else 0\n    return x * x", 0, 0, "compile error: "),
        ("import os\ndef f(x): return x * x if x + 1 else os._exit(0)", 0, 0.75, "no answer: case 3: "),
        (
            "import ctypes\ndef f(x): return x * x if x else ctypes.string_at(0)",
            0,
            0.75,
            "crash: case 4: SIGSEGV",
        ),
        ("def f(x): return f(x)", 0, 0, "exception: case 1: RecursionError: "),
        ("def f(x): return print('a' * 3_000_000)", 0, 0, "output limit: case 1: "),
        ("I cannot.", 0, 0, "compile error: "),
        ("```text\n4\n```", 0, 0, "no code"),
    ],
)
@FUNCTIONS
async def test_functions(
    sandbox: Sandbox, tests: Any, response: str, value: float, share: float, reason: str
) -> None:
    grade = await code(item(response, tests), sandbox, case_timeout_s=CASE_S)
    assert grade.value == value
    assert grade.reason.startswith(reason)
    if value == 0:
        partial = await code(item(response, tests), sandbox, case_timeout_s=CASE_S, pass_fraction=True)
        assert (partial.value, partial.reason) == (share, grade.reason)


@pytest.mark.parametrize(
    ("response", "value", "share", "reason"),
    [
        ("print(int(input()) ** 2)", 1, 1, "passed"),
        ("if __name__ == '__main__':\n    print(pow(int(sys.stdin.readline()), 2), '  \\n')", 1, 1, "passed"),
        ("print(int(input()) ** 2)\nexit()", 1, 1, "passed"),
        ("x = int(input())\nprint(x * abs(x))", 0, 0.75, "wrong answer: case 3: line 1: got -1, expected 1"),
        ("print(4)\nprint('and more')", 0, 0, "wrong answer: case 1: got 2 lines, expected 1"),
        ("x = int(input())\nprint(x * x)\nassert x", 0, 0.75, "exception: case 4: AssertionError"),
        ("x = int(input())\nprint(x * x)\nsys.exit(x == 0)", 0, 0.75, "exit code: case 4: 1"),
        ("x = int(input())\nprint(x * x)\nwhile x == 0: pass", 0, 0.75, "timeout: case 4: after 4 s"),
        (
            "x = int(input())\nwhile x == 5000: print('a' * 10_000)\nprint(x * x)",
            0,
            0.75,
            "output limit: case 2: ",
        ),
        ("x = int(input())\nx == 5000 and bytearray(1 << 40)\nprint(x * x)", 0, 0.75, "memory: case 2"),
        ("print(int(input()) ** 2", 0, 0, "compile error: case 1: SyntaxError: "),
        ("", 0, 0, "no code"),
    ],
)
async def test_programs(sandbox: Sandbox, response: str, value: float, share: float, reason: str) -> None:
    grade = await code(item(response, SQUARE_LINES), sandbox, case_timeout_s=CASE_S)
    assert grade.value == value
    assert grade.reason.startswith(reason)
    if value == 0:
        partial = await code(item(response, SQUARE_LINES), sandbox, case_timeout_s=CASE_S, pass_fraction=True)
        assert (partial.value, partial.reason) == (share, grade.reason)


async def test_the_limit_for_all_cases(sandbox: Sandbox) -> None:
    slow = "import time\ndef f(x): time.sleep(4.0); return x * x"
    rows = [(slow, SQUARES), (slow, SQUARE_CALLS), (f"{slow}\nprint(f(int(input())))", SQUARE_LINES)]
    grades = await asyncio.gather(
        *[
            code(item(response, tests), sandbox, case_timeout_s=20.0, timeout_s=11.5, pass_fraction=True)
            for response, tests in rows
        ]
    )
    for grade in grades:
        assert grade.value == 0.5
        assert grade.reason.startswith("timeout: case 3: ")


LEETCODE = {  # as in LiveCodeBench
    "fn_name": "pairs",
    "inputs": ['[3, 1, 2]\n"ab"', '[]\n""'],
    "outputs": ['[[1, "a"], [2, "b"]]', "[]"],
}


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("return list(zip(sorted(numbers), letters))", 1),  # tuples for lists
        ("return [[n, l] for n, l in zip(sorted(numbers), letters)]", 1),
        ("return [[str(n), l] for n, l in zip(sorted(numbers), letters)]", 0),
        ("return zip(sorted(numbers), letters)", 0),  # not plain data
        ("return set(zip(sorted(numbers), letters))", 0),
        ("numbers.sort(); return [[n, l] for n, l in zip(numbers, letters)]", 1),
    ],
)
async def test_methods_of_class_solution(sandbox: Sandbox, body: str, value: float) -> None:
    response = f"class Solution:\n    def pairs(self, numbers: List[int], letters: str):\n        {body}\n"
    assert (await code(item(response, LEETCODE), sandbox)).value == value


async def test_asserts_see_values_as_python_has_them(sandbox: Sandbox) -> None:
    tests = {
        "test_imports": ["import math", "from collections import Counter"],
        "test_setup_code": "given = [3, 1]",
        "test_list": [
            "assert echo((1, [2.5], {3: {b'4'}}), last=-0.0) == (1, [2.5], {3: {b'4'}})",
            "assert type(echo((1,))) is tuple and type(echo(True)) is bool and echo(1) is not True",
            "assert math.isnan(echo(math.nan)) and math.copysign(1, echo(-0.0)) == -1",
            "assert echo({1, 2}) == {2, 1} and echo(frozenset()) == set() and echo(2j) == 2j",
            "assert echo(10 ** 5000) == 10 ** 5000 and echo('\\ud800') == '\\ud800'",
            "assert reorder(given) == [1, 3] and given == [3, 1]",  # it got a copy
            "assert count('aab') == Counter('aab')",
            "try: fail()\nexcept KeyError as error: assert 'it' in error.args[0]\nelse: assert 0",
        ],
    }
    response = """
from collections import Counter
def echo(value, last=None): return value
def reorder(numbers): numbers.sort(); return numbers
count = Counter
def fail(): raise KeyError("it")
"""
    assert await code(item(response, tests), sandbox, pass_fraction=True) == Grade(1.0, "passed")


HACKS = """
# equals anything
class E:
    def __eq__(self, other): return True
def f(x): return E()

# an int that equals
class E(int):
    def __eq__(self, other): return True
def f(x): return E()

# a str that equals
class E(str):
    def __eq__(self, other): return True
def f(x): return E()

# a list that equals
class E(list):
    def __eq__(self, other): return True
def f(x): return E([0])

# a list that lies
class E(list):
    def __len__(self): return 1
    def __iter__(self): return iter([4])
def f(x): return E()

# a list without end
class E(list):
    def __iter__(self):
        while True: yield 1
def f(x): return E()

# inside other values
class E(int):
    def __eq__(self, other): return True
def f(x): return [{0: (E(),)}]

# a class that lies
class E:
    __class__ = int
    def __eq__(self, other): return True
def f(x): return E()

# a metaclass that lies
class M(type):
    def __eq__(self, other): return True
    def __hash__(self): return hash(int)
class E(metaclass=M):
    def __eq__(self, other): return True
def f(x): return E()

# sys.exit at import
import sys
sys.exit(0)

# os._exit at import
import os
print("passed")
os._exit(0)

# sys.exit
import sys
def f(x): sys.exit(0)

# os._exit
import os
def f(x): os._exit(0)

# atexit
import atexit, os
atexit.register(os._exit, 0)
def f(x): raise SystemExit

# prints OK
print("OK")
def f(x):
    print("OK")
    print("passed")

# prints the answer
def f(x):
    print(x * x)

# forged report
def f(x): send(b'r[{"tuple": ["passed", ""]}]')

# forged verdict
def f(x): send(b'[1, "passed", ""]')

# forged verdict on the tests
def f(x): send(b'[1, "broken", ""]')

# forged report at import
send(b'r[{"tuple": ["passed", ""]}, {"tuple": ["passed", ""]}, {"tuple": ["passed", ""]}]')
def f(x): return 0

# duplicate
def f(x):
    send(b'[1, "value", 1]')
    send(b'[1, "value", 1]')

# right, and sent twice
def f(x):
    send(b'[%d, "value", 4]' % 1)
    return x * x

# truncated
import os
def f(x):
    os.write(3, b"\\x40\\0\\0\\0[1, ")
    os._exit(0)

# huge frame
import os
def f(x): os.write(3, b"\\xff" * 100)

# writes at import
send(b'[0, "value", 1]')
def f(x): return x * x

# closes the channel
import os
os.close(3)
def f(x): return x * x

# closes everything
import os
os.closerange(0, 4096)
def f(x): return x * x

# another thread answers
import os, threading
def answer():
    while True: os.write(3, b"\\1\\0\\0\\0{")
threading.Thread(target=answer, daemon=True).start()
def f(x): return x * x

# patched json
import json
json.dumps = lambda value: '[1, "value", true]'
json.loads = lambda *a, **k: [1, "f", [2], {}]
def f(x): return 0

# patched builtins
import builtins, struct
builtins.isinstance = lambda *a: True
builtins.AssertionError = Exception
builtins.len = lambda x: 1
struct.pack = struct.unpack = None
builtins.type = lambda value: int
def f(x): return 0

# patched harness
import sys
main = sys.modules["__main__"]
main.encode = lambda value: b'[1, "value", true]'
main._call = lambda *a: ("passed", "")
def f(x): return 0

# values in frames
import sys
def f(x):
    frame = sys._getframe(1)
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(value) is int and value == x * x: return value
        frame = frame.f_back

# generator without end
def f(x):
    while True: yield x * x

# huge
def f(x): return "a" * 5_000_000

# deep
def f(x):
    value = []
    for _ in range(100_000): value = [value]
    return value

# deep frame
def f(x): send(b'[1, "value", ' + b"[" * 100_000 + b"]" * 100_000 + b"]")

# huge integer
def f(x): return 10 ** 100_000

# not a number
def f(x): return float("nan")

# AssertionError
def f(x): raise AssertionError

# an exception that cannot be shown
class E(Exception):
    def __str__(self): raise E
def f(x): raise E

# exceptions in a group
def f(x): raise ExceptionGroup("", [ValueError()])

# no more items
def f(x): raise StopIteration

# no more items, later
def f(x): raise StopAsyncIteration
"""
SEND = """
import os
def send(text):
    os.write(3, len(text).to_bytes(4, "little") + text)
"""


HACKS_BY_NAME = {
    name: SEND + source for name, _, source in (h.partition("\n") for h in HACKS.split("\n# ")[1:])
}
FAILURES = ("wrong answer", "exception", "timeout", "memory", "output limit", "exit code", "no answer")


@pytest.mark.parametrize("response", HACKS_BY_NAME.values(), ids=HACKS_BY_NAME)
@FUNCTIONS
async def test_hacks(sandbox: Sandbox, tests: Any, response: str) -> None:
    """No hack is rewarded, not even for a single case, or causes any other error."""
    grade = await code(item(response, tests), sandbox, case_timeout_s=2.0, timeout_s=4.0)
    assert grade.value == 0.0
    assert grade.reason.partition(":")[0] in FAILURES


async def test_numbers_that_collide_cost_no_more_than_a_call(sandbox: Sandbox) -> None:
    """Building a set of them would take minutes, here or on the host."""
    response = """
import os
def f(x):
    items = ",".join("[%d, 0]" % ((2**61 - 1) * i) for i in range(60_000))
    frame = b'[1, "value", {"dict": [%s]}]' % items.encode()
    frame = memoryview(len(frame).to_bytes(4, "little") + frame)
    while frame:
        frame = frame[os.write(3, frame):]
"""
    async with asyncio.timeout(30):
        called = await code(item(response, SQUARE_CALLS), sandbox, case_timeout_s=1.0, timeout_s=2.0)
        asserted = await code(item(response, SQUARES), sandbox, case_timeout_s=1.0, timeout_s=2.0)
    assert called.value == asserted.value == 0.0


@FUNCTIONS
async def test_expected_values_are_not_where_the_response_runs(sandbox: Sandbox, tests: Any) -> None:
    """Searches all objects, frames and memory that the response can read for the only expected value."""
    secret = 8675309
    tests = {"test_list": [f"assert f() == {secret}"]} if tests is SQUARES else tests
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [secret]} if tests is SQUARE_CALLS else tests
    response = """
import gc, os, sys
def f():
    secret = str(8675310 - int("1"))
    seen, frame = [], sys._getframe(1)
    while frame:
        seen += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
        frame = frame.f_back
    seen += gc.get_objects()
    for thing in seen:
        if type(thing) in (dict, list, tuple, set) and len(thing) < 10_000 and secret in repr(thing):
            return int(secret)
    while True:  # or comes with another frame
        os.set_blocking(3, False)
        return os.read(3, 1 << 20).decode()
"""
    grade = await code(item(response, tests), sandbox)
    assert grade.value == 0.0
    assert grade.reason.startswith("exception: case 1: BlockingIOError")
    honest = await code(item(f"def f(): return {secret}", tests), sandbox)
    assert honest == Grade(1.0, "passed")


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ({"test": "def check(candidate):\n    assert helper(candidate(1))", "entry_point": "f"}, "NameError"),
        (
            {"test": "import nowhere\ndef check(candidate):\n    assert candidate(1)", "entry_point": "f"},
            "nowhere",
        ),
        ({"test": "def check(candidate):\n    assert 1 == 1", "entry_point": "f"}, "never call the response"),
        (
            {
                "test": "def check(candidate):\n    assert candidate(1) in (0, 1) and helper(2)",
                "entry_point": "f",
            },
            "NameError: name 'helper'",  # whatever the response returns
        ),
        ({"test_list": ["assert f(lambda x: x) == 1"]}, "it calls f with builtins.function"),
        ({"test_list": ["assert f(1) == 1"], "test_setup_code": "1 / 0"}, "ZeroDivisionError"),
        ({"fn_name": "f", "inputs": [["a" * 5_000_000]], "outputs": [1]}, "a value of "),
    ],
)
async def test_tests_that_fail_by_themselves_are_errors(sandbox: Sandbox, tests: Any, says: str) -> None:
    for response in ("def f(x): return 1", "def f(x): return 0"):
        with pytest.raises(UserError, match=says):
            await code(item(response, tests), sandbox)


async def test_tests_that_hang_by_themselves_are_errors(sandbox: Sandbox) -> None:
    tests = {"test": "def check(candidate):\n    while True: pass", "entry_point": "f"}
    with pytest.raises(UserError, match="never call the response"):
        await code(item("def f(x): return 1", tests), sandbox, case_timeout_s=0.5, timeout_s=0.5)


async def test_tests_that_choke_on_a_value_are_the_responses_fault(sandbox: Sandbox) -> None:
    tests = {"test_list": ["assert 5 in range(f(1), 10 ** 9) and sum(range(f(1))) == 0"]}
    grade = await code(item("def f(x): return 10 ** 12", tests), sandbox)
    assert grade.reason.startswith("wrong answer: case 1: ")
    tests = {"test_list": ["assert sum(range(f(1))) == 0"]}
    grade = await code(item("def f(x): return 10 ** 12", tests), sandbox, case_timeout_s=2.0, timeout_s=2.0)
    assert grade.value == 0.0
    assert grade.reason.startswith("timeout: case 1: ")
    tests = {"test_list": ["assert len(f(1)) == 3"]}
    grade = await code(item("def f(x): return None", tests), sandbox)
    assert (grade.value, grade.reason.partition(":")[0]) == (0.0, "wrong answer")


@pytest.mark.parametrize(
    ("case", "response"),
    [
        ("assert eval(f(2)) == 4", "def f(x): return 'nothing'"),  # a NameError
        ("exec(f(2))\nassert f(3) == 9", "def f(x): return 'import nothing'"),
        ("assert f([f(2)]) == 4", f"def f(x): return {'[' * 99 + ']' * 99}"),  # nested too deep
        ("assert {}[f(2)] == 4", "def f(x): return x"),
        ("assert all(map(f, [2])) and f(2) == 4", "def f(x): raise StopIteration"),
        ("for n, got in zip([2], map(f, [2])): assert got == n * n", "def f(x): raise StopIteration"),
        ("async def g():\n    async for got in h(): assert got\nasync def h():\n    yield f(2)\n"
         "import asyncio; asyncio.run(g())", "def f(x): raise StopAsyncIteration"),
    ],
)  # fmt: skip
async def test_what_the_response_returned_or_raised_is_never_the_tests_fault(
    sandbox: Sandbox, case: str, response: str
) -> None:
    tests = {"test": f"def check(candidate):\n{textwrap.indent(case, '    ')}", "entry_point": "f"}
    for rows in tests, {"test_list": [case]}:
        grade = await code(item(response, rows), sandbox)
        assert grade.value == 0.0
        assert grade.reason.partition(":")[0] in ("wrong answer", "exception"), grade


async def test_a_response_that_fails_outside_of_all_cases(sandbox: Sandbox) -> None:
    tests = {"test": "first = f(2)\ndef check(candidate):\n    assert first == 4", "entry_point": "f"}
    assert await code(item("def f(x): return x * x", tests), sandbox) == Grade(1.0, "passed")
    grade = await code(item("def f(x): return x / 0", tests), sandbox)
    assert (grade.value, grade.reason) == (0.0, "exception: case 1: ZeroDivisionError: division by zero")


async def test_verdicts_of_a_panel(sandbox: Sandbox) -> None:
    """More hanging responses than slots, and a row without valid tests: an error that is not retryable."""
    config = GraderConfig.model_validate({"name": "code", "weight": 2.0, "case_timeout_s": CASE_S})
    panel = await GraderPanel.start([config], sandbox, PROGRAMS)
    hangs = [item("def f(x):\n    while True: pass", SQUARES)] * (2 * PROGRAMS)
    items = [item("def f(x): return x * x", SQUARES), *hangs, item("def f(x): return 1", {"answer": 4})]
    verdicts: list[Verdict] = []
    async with asyncio.timeout(60):
        async for some in panel.verdicts(
            [one._replace(id=SampleId(one.id.group, i)) for i, one in enumerate(items)]
        ):
            verdicts += some
    verdicts.sort(key=lambda verdict: verdict.id.index)
    assert len(verdicts) == len(items)
    right, *late, broken = verdicts
    assert isinstance(right, Graded)
    assert (right.value, right.components, right.reasons) == (2.0, {"code": 1.0}, {"code": "passed"})
    for verdict in late:
        assert isinstance(verdict, Graded)
        assert (verdict.value, verdict.reasons["code"]) == (0.0, "timeout: case 1: 4 s for one call")
    assert isinstance(broken, GradingError)
    assert "no test cases" in broken.cause
    assert not broken.retryable
