"""The programs that run inside a sandbox when code is graded, and the encoding of values sent to and from
them.

This file's source begins two programs, so it imports only the standard library. The response's program ends
with `serve(...)` and answers calls. The tests' program ends with `judge(...)`; there the response's functions
are proxies, whose calls the host forwards to the response's program. Expected values are in the tests'
program or on the host, never in the response's program.

Plain data is sent as JSON. A value of a type that JSON lacks is an object with one key, its type: {"tuple":
[1, 2]}, {"dict": [["a", 1]]}, {"set": []}, {"bytes": "00ff"}, {"int": "0x1fffffffffffffffff"}. A frame on the
channel is one value after a 4-byte little-endian length; frames from and to the tests begin with their kind.
"""

import builtins
import json
import os
import reprlib
import sys
import traceback
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

CHANNEL_FD = 3
MAX_FRAME_BYTES = 4 << 20
MAX_DEPTH = 100
_MAX_TEXT = 200
MAX_JSON_INT = 1 << 63  # larger ones are sent in base 16, which takes linear time

CALL, REPORT = b"c", b"r"  # from the tests: (number, function, arguments, keywords); verdicts
ANSWER, FAILURE = b"a", b"f"  # to the tests: [number, "value" or a failure's kind, content]; (kind, detail)

_DICTS = (dict, Counter, OrderedDict, defaultdict)  # equal under ==

SETUP, TESTS = "setup.py", "tests.py"  # the tests' own text, in tracebacks

FAILURES = ("compile error", "exception", "memory", "wrong answer")  # as the response's program reports them

Verdict = tuple[str, str]  # on one case: "passed", "broken" or a kind of failure; and its detail


def encode(value: object) -> bytes:
    """Raises ValueError for anything but plain data, subclasses included: their == may return True for
    anything."""
    data = json.dumps(_encode_value(value, MAX_DEPTH)).encode()
    if len(data) >= MAX_FRAME_BYTES:
        raise ValueError(f"a value of {len(data)} bytes, expected at most {MAX_FRAME_BYTES}")
    return data


def decode(data: bytes) -> Any:
    """Raises ValueError for anything that `encode` does not write."""
    try:
        return json.loads(data, object_hook=_decode_value)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"not an encoded value: {error}") from None


def _encode_value(value: Any, depth: int) -> Any:
    kind = type(value)  # not __class__, which may lie
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        return value if -MAX_JSON_INT < value < MAX_JSON_INT else {"int": hex(value)}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if depth == 0:
        raise ValueError(f"a value nested more than {MAX_DEPTH} deep")
    if kind is list:
        return [_encode_value(element, depth - 1) for element in value]
    if kind in (tuple, set, frozenset):
        return {kind.__name__: [_encode_value(element, depth - 1) for element in value]}
    if kind in _DICTS:
        return {
            "dict": [[_encode_value(key, depth - 1), _encode_value(value[key], depth - 1)] for key in value]
        }
    raise ValueError(f"{kind.__module__}.{kind.__qualname__}")


def _decode_value(tagged: dict[str, Any]) -> Any:
    match [*tagged.items()]:
        case [("int", str(text))]:
            return int(text, 16)
        case [("bytes", str(text))]:
            return bytes.fromhex(text)
        case [("complex", [float(real), float(imaginary)])]:
            return complex(real, imaginary)
        case [("tuple", list(elements))]:
            return tuple(elements)
        case [("set", list(elements))]:
            return set(elements)
        case [("frozenset", list(elements))]:
            return frozenset(elements)
        case [("dict", list(items))]:
            return dict(items)
    raise ValueError(f"not an encoded value: {reprlib.repr(tagged)}")


def receive() -> bytes | None:
    """None: the host has closed the channel."""
    head = _read(4)
    return _read(int.from_bytes(head, "little")) if head else None


def send(frame: bytes) -> None:
    left = memoryview(len(frame).to_bytes(4, "little") + frame)
    while left:
        left = left[os.write(CHANNEL_FD, left) :]


def _read(size: int) -> bytes:
    """Fewer bytes if the channel ends."""
    parts = []
    while size and (part := os.read(CHANNEL_FD, min(size, 1 << 16))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve(program: str) -> None:
    """The response's side: waits for a call, answers it; ends when the host closes the channel."""
    module = ModuleType("response")
    sys.modules["response"] = module  # dataclasses look their module up
    failure = _load(program, module)
    while frame := receive():
        number, function, arguments, keywords = decode(frame)
        send(encode([number, *(failure or _call(module, function, arguments, keywords))]))


def _load(program: str, module: ModuleType) -> tuple[str, str] | None:
    try:
        compiled = compile(program, "response.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        return "compile error", f"{type(error).__name__}: {error}"
    try:
        exec(compiled, vars(module))
    except MemoryError:
        return "memory", "while it was loaded"
    except BaseException as error:  # including sys.exit: there is nothing left to call
        return "exception", f"{type(error).__name__}: {error}, while it was loaded"
    return None


def _call(
    module: ModuleType, function: str, arguments: Sequence[Any], keywords: dict[str, Any]
) -> tuple[str, Any]:
    try:
        value = _find(module, function)(*arguments, **keywords)
    except MemoryError:
        return "memory", ""
    except BaseException as error:
        return "exception", f"{type(error).__name__}: {error}"
    try:
        encode(value)
    except ValueError as error:
        return "wrong answer", f"got {error}, expected plain data"
    return "value", value


def _find(module: ModuleType, function: str) -> Any:
    """A method of the module's class Solution, of which all calls share one object, or a function.

    The class comes first, since a prelude also has functions named `search`, `shuffle` or `compress`.
    """
    names = vars(module)
    if "Solution" in names and (hasattr(names["Solution"], function) or function not in names):
        return getattr(_object_of(names["Solution"]), function)
    if function not in names:
        raise NameError(f"name {function!r} is not defined")
    return names[function]


@cache
def _object_of(kind: Callable[[], Any]) -> Any:
    return kind()


class Failed(BaseException):
    """The response returned no value. Not an Exception, so that tests that expect one do not catch it."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


class Judge:
    """The tests' view of the response, and their verdicts on it."""

    def __init__(self, keep_going: bool) -> None:
        self._keep_going = keep_going
        self._num_calls = 0
        self._got = ""  # the last value, for the reason
        self._raised: BaseException | None = None  # by the response's last call
        self._raised_text = ""
        self.verdicts: list[Verdict] = []

    def function(self, name: str) -> Any:
        def stand_in(*arguments: object, **keywords: object) -> Any:
            return self._ask(name, arguments, keywords)

        return stand_in

    @contextmanager
    def case(self, text: str) -> Iterator[None]:
        self._got, self._raised = "", None
        try:
            yield
        except (Exception, Failed) as error:
            self.verdicts.append(self.failure(error, text))
            if not self._keep_going:
                raise
        else:
            self.verdicts.append(("passed", ""))

    def _ask(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
        self._num_calls += 1
        try:
            call = encode((self._num_calls, name, arguments, keywords))
        except ValueError as error:
            kind = "wrong answer" if self._got else "broken"  # it may pass on what the response returned
            raise Failed(kind, f"it calls {name} with {error}, expected plain data") from None
        send(CALL + call)
        frame = receive()
        if frame is None:
            raise SystemExit("the host has closed the channel")
        if frame[:1] == FAILURE:
            raise Failed(*decode(frame[1:]))
        kind, content = read_answer(frame[1:], self._num_calls)
        if kind == "value":
            self._got = f", got {_excerpt(content)}"
            return content
        if kind == "exception":
            self._raised, self._raised_text = _exception(content), content
            raise self._raised
        raise Failed(kind, content)

    def failure(self, error: BaseException, text: str) -> Verdict:
        """Tests are broken if they fail before they call the response, or lack a name or a module. Any other
        error may be due to what the response returned."""
        if isinstance(error, Failed):
            return error.kind, error.detail
        if error is self._raised:
            return "exception", self._raised_text
        described = _describe_exception(error)
        if self._num_calls == 0 or (_lacks_a_name(error) and not self.failed):
            return "broken", f"{text} raised {described}"
        if isinstance(error, AssertionError):
            return "wrong answer", f"{text}{self._got}"
        return "wrong answer", f"{text} raised {described}{self._got}"

    @property
    def failed(self) -> bool:
        return any(kind != "passed" for kind, _ in self.verdicts)


def judge(setup: str, tests: str, functions: Sequence[str], keep_going: bool) -> None:
    """The tests' side: reports a verdict for each case that was run, up to the first failure unless
    `keep_going`. "broken" means that the tests themselves failed."""
    receive()  # the signal to begin
    state = Judge(keep_going)
    namespace: dict[str, Any] = {"__name__": "tests"}
    try:
        exec(compile(setup, SETUP, "exec"), namespace)
        namespace |= {name: state.function(name) for name in functions} | {"__case__": state.case}
        exec(compile(tests, TESTS, "exec"), namespace)
    except (Exception, Failed) as error:
        if not state.failed:
            state.verdicts.append(state.failure(error, "the code around the cases"))
    send(REPORT + encode(state.verdicts))


def read_answer(frame: bytes, number: int, decode: Callable[[bytes], Any] = decode) -> tuple[str, Any]:
    """The answer of the response's program, which is untrusted, to call `number`: "value" and the value, or a
    kind of failure and its text."""
    try:
        match decode(frame):
            case (int(answered), "value", content) if answered == number:
                return "value", content
            case (int(answered), str(kind), str(text)) if answered == number and kind in FAILURES:
                return kind, text
            case answer:
                return (
                    "wrong answer",
                    f"its program sent {_excerpt(answer)}, expected an answer to call {number}",
                )
    except ValueError as error:
        return "wrong answer", f"its program sent {error}"


def _lacks_a_name(error: BaseException) -> bool:
    """Whether the tests' own text lacks it, not text that the response returned and the tests execute."""
    if not isinstance(error, NameError | ImportError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].f_code.co_filename in (SETUP, TESTS)


# StopIteration would end `all(map(candidate, ...))` as if all were well.
_NOT_PASSED_ON = (BaseExceptionGroup, StopIteration, StopAsyncIteration)


def _exception(text: str) -> BaseException:
    """The response's exception as the tests may expect it: a built-in one, found by its name."""
    name, _, message = text.partition(": ")
    kind = vars(builtins).get(name)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_PASSED_ON):
        return kind.__new__(kind, message)  # not its constructor: some take more than a message
    return Failed("exception", text)


def _describe_exception(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:_MAX_TEXT]
    except ValueError:  # its repr has an int of more digits than Python prints
        return type(error).__name__


def _excerpt(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"{type(value).__name__} of many digits"
