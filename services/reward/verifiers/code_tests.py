"""Test cases in the formats of code datasets.

A row's fields are read from `ground_truth` if it is a JSON object, and from `extra`:

* HumanEval: `test` defines check(candidate), `entry_point` names the function, `prompt` is its beginning
* MBPP: `test_list` of statements, `test_setup_code`, `test_imports`
* KodCode, as verl has it: `assert_case`, a list like MBPP's
* APPS, TACO, code contests, verl: `inputs` and `outputs`; with `fn_name` one call each, otherwise one program
  run each. A call has a list of arguments and a result, or both as text with one JSON value per line
* LiveCodeBench: `test_cases`, a list of {input, output, testtype, metadata: {func_name}}

A `ground_truth` that is a JSON list is MBPP's `test_list`, or LiveCodeBench's `test_cases`.
"""

import ast
import builtins
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field, Json, ValidationError

from atoll.runtime.errors import UserError


@dataclass(frozen=True, slots=True)
class OutputTests:
    """The program is run once for each case."""

    cases: tuple[tuple[str, str], ...]  # stdin, expected stdout

    @property
    def num_cases(self) -> int:
        return len(self.cases)


@dataclass(frozen=True, slots=True)
class CallTests:
    """The function is called once for each case."""

    function: str
    cases: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...]  # arguments, accepted results

    @property
    def num_cases(self) -> int:
        return len(self.cases)


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Code that calls the response's functions."""

    prompt: str  # code that the response continues
    setup: str
    source: str  # each case in a `with __case__(text):`
    functions: tuple[str, ...]  # of the response
    num_cases: int


Tests = OutputTests | CallTests | AssertTests


class _HumanEval(BaseModel):
    test: str
    entry_point: str
    prompt: str = ""

    def tests(self) -> AssertTests:
        tree = ast.parse(self.test)
        check = next((n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
        if check is None:
            raise ValueError("test: it defines no function check(candidate)")
        cases = _cases(check.body)
        check.body = [_as_case(case) for case in cases]
        source = f"{ast.unparse(ast.fix_missing_locations(tree))}\ncheck({self.entry_point})"
        setup = self.prompt if is_python(self.prompt) else ""  # helpers that tests call as well
        return AssertTests(self.prompt, setup, source, (self.entry_point,), len(cases))


class _Mbpp(BaseModel):
    test_list: Json[list[str]] | list[str] = Field(validation_alias=AliasChoices("test_list", "assert_case"))
    test_setup_code: str = ""
    test_imports: Json[list[str]] | list[str] = []

    def tests(self) -> AssertTests:
        setup = "\n".join([*self.test_imports, self.test_setup_code])
        cases = [ast.parse(test) for test in self.test_list]
        names = _unbound_names([ast.parse(setup)])
        if names:
            raise ValueError(f"test_setup_code: it needs {', '.join(sorted(names))}; expected only its own")
        module = ast.Module([_as_case(case.body) for case in cases], [])
        functions = _unbound_names([ast.parse(setup), *cases]) or _called_builtins(cases)
        source = ast.unparse(ast.fix_missing_locations(module))
        return AssertTests("", setup, source, tuple(sorted(functions)), len(cases))


class _InputsOutputs(BaseModel):
    inputs: Json[list[Any]] | list[Any]
    outputs: Json[list[Any]] | list[Any]
    fn_name: str | None = None

    def tests(self) -> OutputTests | CallTests:
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"got {len(self.inputs)} inputs and {len(self.outputs)} outputs")
        if not self.fn_name:
            pairs = zip(self.inputs, self.outputs, strict=True)
            return OutputTests(
                tuple(("" if given is None else _lines(given), _lines(expected)) for given, expected in pairs)
            )
        arguments = [_with_int_keys(_arguments(given)) for given in self.inputs]
        results = [
            _json(output) if isinstance(given, str) and isinstance(output, str) else output
            for given, output in zip(self.inputs, self.outputs, strict=True)
        ]
        # APPS wraps most of them in a list; as in APPS and verl, [x] expects [x] or x
        expected = [(r, r[0]) if isinstance(r, list) and len(r) == 1 else (r,) for r in results]
        return CallTests(self.fn_name, tuple(zip(arguments, expected, strict=True)))


class _Metadata(BaseModel):
    func_name: str | None = None


class _LiveCase(BaseModel):
    input: str
    output: str
    testtype: Literal["stdin", "functional"] = "stdin"
    metadata: _Metadata = _Metadata()


class _LiveCodeBench(BaseModel):
    test_cases: Json[list[_LiveCase]] | list[_LiveCase]
    metadata: Json[_Metadata] | _Metadata = _Metadata()  # of all cases that have none of their own

    def tests(self) -> OutputTests | CallTests:
        if all(case.testtype == "stdin" for case in self.test_cases):
            return OutputTests(tuple((case.input, case.output) for case in self.test_cases))
        function = self.test_cases[0].metadata.func_name or self.metadata.func_name
        if function is None:
            raise ValueError("metadata.func_name: missing, expected the function that the cases call")
        return CallTests(
            function, tuple((_arguments(case.input), (_json(case.output),)) for case in self.test_cases)
        )


_FORMATS: Mapping[str, type[_HumanEval | _Mbpp | _InputsOutputs | _LiveCodeBench]] = {  # by a field of each
    "test": _HumanEval,
    "test_list": _Mbpp,
    "assert_case": _Mbpp,  # before `inputs`: verl adds empty ones
    "inputs": _InputsOutputs,
    "test_cases": _LiveCodeBench,
}


def read_tests(ground_truth: str, extra: Mapping[str, str]) -> Tests:
    """Raises UserError if a row has no test cases of a known format, or invalid ones."""
    return _read_tests(ground_truth, tuple(extra.items()))


@lru_cache(maxsize=32)  # a group's responses share their tests, which may be megabytes of code
def _read_tests(ground_truth: str, extra: Sequence[tuple[str, str]]) -> Tests:
    row = {**dict(extra), **_ground_truth(ground_truth)}
    known = [field for field in _FORMATS if field in row]
    if not known:
        raise UserError(
            f"no test cases for the grader code: got the fields {', '.join(sorted(row)) or 'none'}, expected "
            f"one of {', '.join(_FORMATS)} in ground_truth (a JSON object) or extra_info"
        )
    try:
        tests = _FORMATS[known[0]].model_validate(row).tests()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise UserError(f"test cases: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, SyntaxError, RecursionError) as error:
        raise UserError(f"test cases: {known[0]}: {error}") from None
    if tests.num_cases == 0:
        raise UserError(f"test cases: {known[0]}: got none, expected at least one")
    return tests


def _ground_truth(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}  # text with another meaning; the cases are in extra
    match value:
        case dict():
            return value
        case [str(), *_]:
            return {"test_list": value}
        case list():
            return {"test_cases": value}
    return {}


def is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _lines(value: object) -> str:
    """What a program reads or prints, as one text or as its lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(
            f"got {type(value).__name__} {json.dumps(value)[:80]}, expected text or lines of text"
        )
    return value


def _arguments(value: object) -> tuple[Any, ...]:
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, str):
        raise ValueError(f"got {type(value).__name__}, expected a list of arguments or JSON lines")
    return tuple(_json(line) for line in value.split("\n"))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"got {text[:80]!r}, expected JSON: {error}") from None


def _with_int_keys(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Converts keys of a first argument that is an object to integers if possible, as APPS means them and
    verl does."""
    match arguments:
        case (dict(first), *others) if all(key.removeprefix("-").isdecimal() for key in first):
            return ({int(key): value for key, value in first.items()}, *others)
    return arguments


def _cases(statements: Sequence[ast.stmt]) -> list[list[ast.stmt]]:
    """Groups of statements, each ending with an assertion."""
    cases: list[list[ast.stmt]] = [[]]
    for statement in statements:
        cases[-1].append(statement)
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            cases.append([])
    rest = cases.pop()
    if not cases:  # the assertions are in a function of the tests
        return [rest]
    cases[-1] += rest
    return cases


def _as_case(statements: list[ast.stmt]) -> ast.With:
    text = ast.unparse(statements[-1]) if statements else ""
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    call = ast.Call(ast.Name("__case__", ast.Load()), [ast.Constant(shown)], [])
    return ast.With([ast.withitem(call)], statements or [ast.Pass()])


def _unbound_names(trees: Sequence[ast.AST]) -> set[str]:
    """Names that the code uses but does not bind."""
    used, bound = set(), set(vars(builtins))
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.alias(name=name, asname=asname):
                bound.add(asname or name.partition(".")[0])
    return used - bound


def _called_builtins(trees: Sequence[ast.AST]) -> set[str]:
    """MBPP has functions named `sum` and the like."""
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
