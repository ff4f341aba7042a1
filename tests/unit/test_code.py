"""The code grader without a sandbox: encoded values, code in responses, test cases, comparisons."""

import ast
import asyncio
import json
import math
import threading
from collections import Counter, OrderedDict, defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.reward.verifiers import code as code_module
from atoll.reward.verifiers.code_compare import equals, output_difference, read_json
from atoll.reward.verifiers.code_harness import (
    MAX_FRAME_BYTES,
    _call,
    _load,
    decode,
    encode,
    read_answer,
)
from atoll.reward.verifiers.code_program import extract_code, program
from atoll.reward.verifiers.code_tests import AssertTests, CallTests, OutputTests, read_tests
from atoll.runtime.errors import UserError
from atoll.wire.types import Execution, Grade, ProgramStatus, ScoreItem

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=()))  # surrogates, too
    | st.binary()
)
KEYS = st.recursive(
    SCALARS, lambda keys: st.tuples(keys, keys) | st.frozensets(keys, max_size=3), max_leaves=4
)
VALUES = st.recursive(
    SCALARS | st.sets(KEYS, max_size=3),
    lambda values: (
        st.lists(values, max_size=4)
        | st.tuples(values, values)
        | st.dictionaries(KEYS, values, max_size=3)
        | st.frozensets(KEYS, max_size=3)
    ),
    max_leaves=12,
)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_values_keep_their_content_and_their_types(value: Any) -> None:
    returned = decode(encode(value))
    assert returned == value
    if not any(isinstance(node, ast.Set) for node in ast.walk(ast.parse(ascii(value)))):
        assert "frozenset" in ascii(value) or ascii(returned) == ascii(value)  # 1, 1.0, True and -0.0 differ


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, -1.5, "a", None, True], '[1, -1.5, "a", null, true]'),
        ((1,), '{"tuple": [1]}'),
        ({1: b"\x00\xff"}, '{"dict": [[1, {"bytes": "00ff"}]]}'),
        ({"tuple": []}, '{"dict": [["tuple", []]]}'),  # an ordinary object never looks like a tag
        (1 << 70, '{"int": "0x400000000000000000"}'),
        (-(1 << 63), '{"int": "-0x8000000000000000"}'),
        ((1 << 63) - 1, "9223372036854775807"),
        (float("-inf"), "-Infinity"),
        (3j, '{"complex": [0.0, 3.0]}'),
        (Counter("aa"), '{"dict": [["a", 2]]}'),
        (defaultdict(list, a=[1]), '{"dict": [["a", [1]]]}'),
        (OrderedDict(b=1), '{"dict": [["b", 1]]}'),
    ],
)
def test_encoding(value: Any, text: str) -> None:
    assert encode(value).decode() == text
    assert decode(text.encode()) == value


def test_nan_and_integers_longer_than_python_prints() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert decode(encode(10**5000)) == 10**5000


class Sly(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


class Point(NamedTuple):
    x: int


class Lying:
    __class__ = int  # type: ignore[assignment]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Sly(3), "test_code.Sly"),
        ([{"a": (Sly(3),)}], "test_code.Sly"),
        ({Sly(3): 1}, "test_code.Sly"),
        (Point(1), "test_code.Point"),
        (Lying(), "test_code.Lying"),
        (range(3), "builtins.range"),
        ((i for i in "ab"), "builtins.generator"),
        (bytearray(b"a"), "builtins.bytearray"),
        (int, "builtins.type"),
        (nested(100), "nested more than 100 deep"),
        ("a" * MAX_FRAME_BYTES, f"a value of {MAX_FRAME_BYTES + 2} bytes"),
    ],
)
def test_only_plain_data_crosses(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        encode(value)
    assert decode(encode(nested(99))) == nested(99)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"[1", b"\xff", b'{"list": []}', b'{"tuple": 1}', b'{"int": 5}', b'{"int": "0x1", "set": []}'),
        *(b"{}", b'{"set": [[]]}', b'{"dict": [1]}', b'{"dict": [[[], 1]]}', b'{"bytes": "0"}'),
        *(b'{"complex": [1, 2]}', b"1" * 5000, b"[" * 100_000, b'{"tuple": ' * 5000 + b"[]" + b"}" * 5000),
    ],
)
def test_what_is_no_encoded_value(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - some of them come from json
        decode(data)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (b'[7, "value", {"tuple": [1]}]', ("value", (1,))),
        (b'[7, "memory", ""]', ("memory", "")),
        (b'[7, "exception", "KeyError: 1"]', ("exception", "KeyError: 1")),
        (b'[6, "value", 1]', None),  # of another call
        (b'[7, "passed", ""]', None),  # a response cannot report a verdict
        (b'[7, "broken", ""]', None),  # nor one on the tests
        (b'[7, "memory", 1]', None),
        (b'{"tuple": []}', None),
        (b"7", None),
        (b'[[7, "passed", ""]]', None),
        (b"garbage", None),
    ],
)
def test_what_a_programs_answer_can_say(frame: bytes, said: tuple[str, Any] | None) -> None:
    kind, content = read_answer(frame, 7)
    if said is None:
        assert kind == "wrong answer"
        assert content.startswith("its program sent ")
    else:
        assert (kind, content) == said


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("print(1)\n", "print(1)\n"),
        ("    return 1\n", "    return 1\n"),  # indentation is kept
        ("It is\n```python\na\n```\nor better\n```python\nb\n```\nDone.", "b\n"),
        ("```python\na\n```\nwhich prints\n```\n7\n```", "a\n"),  # marked as Python
        ("```\na\n```\n```text\nb\n```", "a\n"),
        ("```Py\na\n```", "a\n"),
        ("```python3\na\n", "a\n"),  # cut off
        ("  ```python\n  a\n  ```\n", "  a\n"),
        ("<think>\n```python\nno\n```\n</think>\nprint(2)", "\nprint(2)"),
        ("<think>no</think>```python\nyes\n```", "yes\n"),
        ("x = '```'\nprint(x)", "x = '```'\nprint(x)"),  # no fence begins within a line
        ("```python\nprint(1)```\nwhich prints\n```\n1\n```", "print(1)\n"),  # but one may end there
        ("It is:```\na\n```", "a\n"),
        ("```python\nprint(1)\n```\nwhere `print` is a ```function```", "print(1)\n"),
        ("```python\n```", None),
        ("```bash\nls\n```", None),
        (" \n", None),
        ("", None),
    ],
)
def test_code_in_a_response(response: str, code: str | None) -> None:
    assert extract_code(response) == code


PROMPT = 'import math\n\n\ndef area(r):\n    """Of a circle."""\n'
TEST = (
    "def check(candidate):\n    assert candidate(0) == 0\n    x = candidate(1)\n    assert 3.14 < x < 3.15\n"
)
HUMANEVAL = json.dumps({"prompt": PROMPT, "entry_point": "area", "test": TEST})


@pytest.mark.parametrize(
    "response", ["    return math.pi * r * r\n", "def area(r):\n    return math.pi * r * r\n"]
)
def test_humaneval_prompts_are_continued_or_go_before(response: str) -> None:
    names: dict[str, Any] = {}
    source = program(response, read_tests(HUMANEVAL, {}))
    assert source is not None
    exec(source, names)
    assert names["area"](2) == pytest.approx(12.566370614359172)


def test_programs_of_stdin_have_the_fields_imports_and_keep_their_future() -> None:
    names: dict[str, Any] = {}
    tests = read_tests('{"inputs": ["1"], "outputs": ["1"]}', {})
    source = program(
        "from __future__ import annotations\nx = deque([gcd(4, 6)])\ndef f(a: Nowhere): ...", tests
    )
    assert source is not None
    exec(source, names)
    assert list(names["x"]) == [2]
    assert names["pow"] is pow  # of the builtins, not of math
    assert names["datetime"].datetime is not None  # the module


def test_humaneval() -> None:
    tests = read_tests(HUMANEVAL, {})
    assert isinstance(tests, AssertTests)
    assert (tests.prompt, tests.setup, tests.functions, tests.num_cases) == (PROMPT, PROMPT, ("area",), 2)
    assert read_tests("", json.loads(HUMANEVAL)) == tests  # fields in extra_info
    assert read_tests("some text", json.loads(HUMANEVAL)) == tests


def test_mbpp() -> None:
    rows = {
        "test_list": ["assert set(similar((3, 4), (4,))) == {4}", "assert math.isclose(f(x for x in []), 1)"],
        "test_imports": ["import math"],
        "test_setup_code": "unused = 1",
    }
    tests = read_tests(json.dumps(rows), {})
    assert isinstance(tests, AssertTests)
    assert tests.functions == ("f", "similar")
    assert (tests.setup, tests.num_cases) == ("import math\nunused = 1", 2)
    as_list = read_tests(json.dumps(rows["test_list"]), {"test_imports": '["import math"]'})
    assert isinstance(as_list, AssertTests)
    assert as_list.functions == ("f", "similar")


def test_kodcode() -> None:
    cases = ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]
    tests = read_tests(json.dumps({"assert_case": cases}), {})
    assert isinstance(tests, AssertTests)
    assert (tests.functions, tests.num_cases) == (("add",), 2)
    assert tests == read_tests(json.dumps(cases), {})  # as MBPP's
    with_verls_fields = {"inputs": ["", ""], "outputs": [None, None], "assert_case": cases}
    assert read_tests(json.dumps(with_verls_fields), {}) == tests


def test_mbpp_functions_that_are_called_like_builtins() -> None:
    tests = read_tests('["assert sum(10, 15) == 6"]', {})
    assert isinstance(tests, AssertTests)
    assert tests.functions == ("sum",)
    tests = read_tests('["assert sum(f(10)) == 6"]', {})  # here it is Python's
    assert isinstance(tests, AssertTests)
    assert tests.functions == ("f",)


def test_calls_of_apps_and_verl() -> None:
    apps = {"fn_name": "f", "inputs": [[[1, 2], "a"], [[], ""]], "outputs": [["x"], "y"]}
    assert read_tests(json.dumps(apps), {}) == CallTests(
        "f", ((([1, 2], "a"), (["x"], "x")), (([], ""), ("y",)))
    )
    verl = {"fn_name": "f", "inputs": ['[1, 2]\n"a"', '{"1": 2}'], "outputs": ['["x", "y"]', "null"]}
    assert read_tests(json.dumps(verl), {}) == CallTests(
        "f", ((([1, 2], "a"), (["x", "y"],)), (({1: 2},), (None,)))
    )


def test_programs_of_apps_and_livecodebench() -> None:
    apps = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7", "8"]], "fn_name": None}
    assert read_tests(json.dumps(apps), {}) == OutputTests((("1 2\n", "3\n"), ("3\n4", "7\n8")))
    no_stdin = {"inputs": [None], "outputs": ["7"]}
    assert read_tests(json.dumps(no_stdin), {}) == OutputTests((("", "7"),))
    live = [{"input": "1 2", "output": "3", "testtype": "stdin"}]
    assert read_tests(json.dumps(live), {}) == OutputTests((("1 2", "3"),))


def test_calls_of_livecodebench() -> None:
    cases = [{"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional"}]
    expected = CallTests("f", ((([1, 2], "a"), ([3],)),))  # no unpacking of lists of one
    assert read_tests(json.dumps(cases), {"metadata": '{"func_name": "f"}'}) == expected
    named = [{**cases[0], "metadata": {"func_name": "f"}}]
    assert read_tests(json.dumps(named), {}) == expected


@pytest.mark.parametrize(
    ("ground_truth", "says"),
    [
        ("", "no test cases .* got the fields none"),
        (
            '{"answer": 1}',
            "got the fields answer, expected one of test, test_list, assert_case, inputs, test_cases",
        ),
        ('{"inputs": ["1"]}', "outputs: Field required"),
        ('{"inputs": ["1"], "outputs": []}', "got 1 inputs and 0 outputs"),
        ('{"inputs": [], "outputs": []}', "got none, expected at least one"),
        ('{"inputs": [1], "outputs": ["1"]}', "expected text or lines of text"),
        ('{"fn_name": "f", "inputs": ["[1"], "outputs": ["1"]}', r"got '\[1', expected JSON"),
        ('{"fn_name": "f", "inputs": ["1"], "outputs": ["yes"]}', "got 'yes', expected JSON"),
        ('{"test": "assert f(1)", "entry_point": "f"}', "defines no function check"),
        ('{"test": "def check(", "entry_point": "f"}', "test: '\\(' was never closed"),
        ('{"test": "def check(c): pass"}', "entry_point: Field required"),
        ('["assert f(1) =="]', "invalid syntax"),
        ('{"test_list": ["assert depth(root) == 1"], "test_setup_code": "root = Node(1)"}', "it needs Node"),
        ('[{"input": "1", "output": "1", "testtype": "functional"}]', "func_name: missing"),
        ("[]", "got none"),
    ],
)
def test_broken_test_cases_are_errors(ground_truth: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_tests(ground_truth, {})


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [
        ("1 2\n3\n", "1 2\n3", None),
        ("1 2  \n  3\r\n\n", "1 2\n3\n", None),
        ("1  2", "1 2", None),
        ("a  b", "a b", None),
        ("YES", "yes", "line 1: got YES, expected yes"),
        ("1\n2", "1\n3", "line 2: got 2, expected 3"),
        ("1\n2\n3", "1\n2", "got 3 lines, expected 2"),
        ("1\n\n2", "1\n2", "line 2: got , expected 2"),
        ("2 1", "1 2", "line 1: got 2 1, expected 1 2"),  # no sets
        ("", "1", "line 1: got , expected 1"),
        ("5.0", "5", None),  # the same number
        ("05", "5", None),
        ("50000000000000001", "50000000000000000", "line 1"),  # where floats are equal
        ("4.9999999", "5", "line 1"),  # an integer is exact
        ("0.333333", "0.3333333333", None),
        ("0.33333", "0.3333333333", None),  # off by 3.3e-6; allowed are 1e-8 + 3.3e-6
        ("0.33332", "0.3333333333", "line 1"),
        ("1e-9", "0.0", None),
        ("1e-7", "0.0", "line 1"),
        ("1e3", "1000.0", None),
        ("nan", "nan", None),  # the same token
        ("nan", "1.0", "line 1"),
        ("inf", "1.0", "line 1"),
        ("1_0", "10", "line 1"),
        ("٣", "3", "line 1"),
        ("1e999999999", "1.0", "line 1"),
        ("9" * 1_000_000 + "x", "1.0", "line 1"),
        ("9" * 1_000_000, "1.0", "line 1"),
        ("9" * 1_000_000, "9" * 1_000_000, None),
        ("[1, 2]", "[1, 2]", None),
    ],
)
def test_outputs(got: str, expected: str, difference: str | None) -> None:
    said = output_difference(got, expected)
    if difference is None:
        assert said is None
    else:
        assert said is not None
        assert said.startswith(difference)


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ([1, 2], [1, 2], True),
        ((1, 2), [1, 2], True),
        ([(1, [2]), (3, ())], [[1, [2]], [3, []]], True),
        ([1, 2], [2, 1], False),
        ([1], [1, 2], False),
        ({1, 2}, [1, 2], False),
        (1.0, 1, True),
        (True, 1, True),  # as Python's ==
        ("1", 1, False),
        (0.1 + 0.2, 0.3, False),
        (math.nan, math.nan, False),
        (None, None, True),
        (None, 0, False),
        ("a", "a", True),
        (b"a", "a", False),
        ({"a": 1}, {"a": 1}, True),
        ({1: (2,)}, {"1": [2]}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ({(1,): 1}, {"(1,)": 1}, False),
        ({}, [], False),
        ([], {}, False),
        (1 << 80, 1 << 80, True),
        (1 << 80, (1 << 80) + 1, False),
        (5, {"int": "0x5"}, False),
    ],
)
def test_returned_values(got: Any, expected: Any, same: bool) -> None:
    assert equals(read_json(encode(got)), expected) is same


def test_a_returned_value_cannot_make_the_host_hash_numbers_that_collide() -> None:
    keys = b",".join(b"[%d,0]" % ((2**61 - 1) * i) for i in range(3))
    assert equals(read_json(b'{"dict": [%s]}' % keys), {"0": 0}) is False
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(b"[" * 100_000)


@pytest.mark.parametrize(
    "frame", [b'{"dict": [1]}', b'{"dict": [[1, 2, 3]]}', b'{"dict": [[]]}', b'{"dict": ["ab"]}']
)
def test_what_only_looks_like_a_dict_is_a_wrong_answer_and_no_error(frame: bytes) -> None:
    assert equals(read_json(frame), {}) is False


def test_a_method_of_the_solution_comes_before_the_preludes_function_of_that_name() -> None:
    tests = read_tests('{"inputs": [[[4, 2, 9], 2]], "outputs": [1], "fn_name": "search"}', {})
    source = program(
        "class Solution:\n"
        "    calls = 0\n"
        "    def search(self, numbers, target):\n"
        "        self.calls += 1\n"
        "        return numbers.index(target), self.calls\n"
        "def shuffle(numbers):\n"
        "    return numbers[::-1]\n",
        tests,
    )
    assert source is not None
    module = ModuleType("response")
    assert _load(source, module) is None
    assert _call(module, "search", ([4, 2, 9], 2), {}) == ("value", (1, 1))
    assert _call(module, "search", ([4, 2, 9], 9), {}) == ("value", (2, 2))  # of one object
    assert _call(module, "shuffle", ([1, 2],), {}) == ("value", [2, 1])  # not of the class
    assert _call(module, "absent", (), {})[0] == "exception"


async def test_outputs_are_compared_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison that ends only once the loop has told it to."""
    loop, began, go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def compare(got: str, expected: str) -> None:
        loop.call_soon_threadsafe(began.set)
        assert go.wait(60)

    async def run(*_: object) -> Execution:
        return Execution(ProgramStatus.OK, "", b"46\n", b"", 0.1, 0.1)

    monkeypatch.setattr(code_module, "output_difference", compare)
    item = ScoreItem(response="print(46)", ground_truth='{"inputs": ["1"], "outputs": ["46"]}')
    sandbox: Any = SimpleNamespace(run=run)
    grading = asyncio.create_task(code_module.code(item, sandbox))
    await began.wait()
    go.set()
    assert await grading == Grade(1.0, "passed")
