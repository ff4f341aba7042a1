"""Responses that try to be rewarded without solving their task, and rows of each kind of tests.

The task is to double a number, by the function `double` or from stdin to stdout.
"""

import json
from dataclasses import dataclass

from atoll.wire.types import FinishReason, GroupId, SampleId, ScoreItem

SOLUTION = "def double(n):\n    return n + n\n"
PROGRAM = "print(2 * int(input()))\n"

_CHECK = "def check(candidate):\n    assert candidate(21) == 42\n    assert candidate(-3) == -6\n"
ASSERTS = {"test": _CHECK, "entry_point": "double"}
CALLS = {"inputs": [[21], [-3]], "outputs": [42, -6], "fn_name": "double"}
OUTPUTS = {"inputs": ["21\n", "-3\n"], "outputs": ["42\n", "-6\n"]}

# Responses for the function, graded by ASSERTS and by CALLS.
FUNCTIONS = {
    "empty": "",
    "nothing_but_text": "print('42')",
    "empty_body": "def double(n):\n    pass\n",
    "exit_at_once": "import sys\nsys.exit(0)\n",
    "exit_of_os_at_once": "import os\nos._exit(0)\n",
    "exit_when_called": "import sys\ndef double(n):\n    sys.exit(0)\n",
    "exit_of_os_when_called": "import os\ndef double(n):\n    os._exit(0)\n",
    "exit_from_a_thread": """
import os, threading
threading.Timer(0.05, os._exit, (0,)).start()
def double(n):
    threading.Event().wait(5)
""",
    "exit_at_exit": "import atexit, os\natexit.register(os._exit, 0)\ndef double(n):\n    return 0\n",
    "prints_that_it_passed": """
print("OK\\nall tests passed\\n1.0")
def double(n):
    print("OK")
    return 0
""",
    "equal_to_everything": """
class Equal:
    def __eq__(self, other): return True
    def __hash__(self): return 42
def double(n):
    return Equal()
""",
    "number_equal_to_everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def double(n):
    return Equal(0)
""",
    "text_equal_to_everything": """
class Equal(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def double(n):
    return Equal("")
""",
    "class_that_lies": """
class Equal:
    __class__ = int
    def __eq__(self, other): return True
def double(n):
    return Equal()
""",
    "mock_of_anything": "from unittest.mock import ANY\ndef double(n):\n    return ANY\n",
    "class_in_a_list": """
class Equal(list):
    def __eq__(self, other): return True
def double(n):
    return [Equal()]
""",
    "not_a_number": "def double(n):\n    return float('nan')\n",
    "infinite": "def double(n):\n    return float('inf')\n",
    "ellipsis": "def double(n):\n    return ...\n",
    "not_implemented": "def double(n):\n    return NotImplemented\n",
    "raises_assertion": "def double(n):\n    raise AssertionError\n",
    "raises_system_exit": "def double(n):\n    raise SystemExit(0)\n",
    "raises_interrupt": "def double(n):\n    raise KeyboardInterrupt\n",
    "raises_generator_exit": "def double(n):\n    raise GeneratorExit\n",
    "raises_stop_iteration": "def double(n):\n    raise StopIteration(2 ** n)\n",
    "raises_skip": "import unittest\ndef double(n):\n    raise unittest.SkipTest('passed')\n",
    "raises_a_class_of_its_own": """
class Passed(BaseException):
    def __str__(self): return "passed"
def double(n):
    raise Passed
""",
    "raises_with_a_text_that_raises": """
class Bad(Exception):
    def __str__(self): raise SystemExit(0)
def double(n):
    raise Bad
""",
    "builtins_are_replaced": """
import builtins
for name in "isinstance issubclass all any len sorted abs repr type compare eval".split():
    setattr(builtins, name, lambda *_, **__: True)
def double(n):
    return 0
""",
    "assertion_is_replaced": """
import builtins
builtins.AssertionError = SystemExit
builtins.BaseException = builtins.Exception = SystemExit
def double(n):
    return 0
""",
    "json_is_replaced": """
import json
json.dumps = lambda value, **_: '[1, "value", 42]'
json.loads = lambda *_, **__: (1, "double", (21,), {})
json.JSONEncoder = json.JSONDecoder = None
def double(n):
    return 0
""",
    "modules_are_replaced": """
import sys, types
class Anything(types.ModuleType):
    def __getattr__(self, name): return lambda *_, **__: True
for name in list(sys.modules):
    if name not in ("sys", "builtins"):
        sys.modules[name] = Anything(name)
def double(n):
    return 0
""",
    "check_is_defined_here": """
def check(candidate): return True
candidate = lambda n: 42
def judge(*_): return True
def double(n):
    return 0
""",
    "harness_is_replaced": """
import sys
main = sys.modules["__main__"]
def passed(*_, **__): return "passed", ""
for name in ("_call", "_find", "_encode_value", "Judge", "judge", "read_answer", "equals", "_load"):
    setattr(main, name, passed)
def double(n):
    return 0
""",
    "harness_encodes_what_it_likes": """
import sys
sys.modules["__main__"].encode = lambda value: b'[1, "passed", ""]'
def double(n):
    return 0
""",
    "frames_are_walked": """
import sys
def values():
    frame = sys._getframe()
    while frame:
        yield from list(frame.f_locals.values())
        yield from list(frame.f_globals.values())
        frame = frame.f_back
def double(n):
    wanted = {"expected", "outputs", "cases", "tests", "answer"}
    for value in values():
        if isinstance(value, dict):
            for key in wanted & set(value):
                return value[key]
    return 0
""",
    "memory_is_searched": """
import gc
def double(n):
    for thing in gc.get_objects():
        if isinstance(thing, (list, tuple)) and len(thing) == 2 and thing[0] in ([n], n, (n,)):
            if isinstance(thing[1], int):
                return thing[1]
        if isinstance(thing, dict) and "outputs" in thing:
            return thing["outputs"][0]
    return 0
""",
    "text_is_searched": """
import gc, re, sys
def double(n):
    texts = [t for t in gc.get_objects() if isinstance(t, (str, dict))]
    texts += vars(sys.modules["__main__"]).values()
    for text in texts:
        found = re.search(r"candidate\\(%d\\) == (-?\\d+)" % n, str(text))
        if found:
            return int(found[1])
    return 0
""",
    "files_are_searched": """
import glob, os
def double(n):
    for path in glob.glob("/**/*test*", recursive=False) + glob.glob("/tmp/*") + glob.glob("*"):
        try:
            if "42" in open(path).read():
                return 42
        except OSError:
            pass
    return 0
""",
    "trace_function": """
import sys
def trace(frame, event, argument):
    for name in ("kind", "failed", "value", "verdicts"):
        if name in frame.f_locals:
            frame.f_locals[name] = "passed"
    return trace
sys.settrace(trace)
def double(n):
    return 0
""",
    "forged_answers": """
import json, os
def send(value):
    frame = json.dumps(value).encode()
    os.write(3, len(frame).to_bytes(4, "little") + frame)
for number in range(10):
    for kind in ("passed", "value", "ok", "r", "report"):
        send([number, kind, "passed"])
def double(n):
    return 0
""",
    "forged_report": """
import json, os
def send(data):
    os.write(3, len(data).to_bytes(4, "little") + data)
for kind in (b"r", b"a", b""):
    send(kind + json.dumps([["passed", ""], ["passed", ""]]).encode())
    send(kind + json.dumps({"tuple": [{"tuple": ["passed", ""]}] * 2}).encode())
def double(n):
    return 0
""",
    "duplicate_answer": """
import json, os
def double(n):
    for value in (0, 41, 42, -6, 0):
        frame = json.dumps({"tuple": [1, "value", value]}).encode()
        os.write(3, len(frame).to_bytes(4, "little") + frame)
    return 0
""",
    "truncated_frame": "import os\nos.write(3, b'\\x10\\x00\\x00\\x00passed')\nos._exit(0)\n",
    "half_a_length": "import os\nos.write(3, b'\\x10\\x00')\nos._exit(0)\n",
    "huge_length": "import os\nos.write(3, b'\\xff\\xff\\xff\\xffpassed')\ndef double(n):\n    return 0\n",
    "empty_frame": "import os\nos.write(3, bytes(4))\ndef double(n):\n    return 0\n",
    "frame_of_garbage": """
import os
os.write(3, b'\\x04\\x00\\x00\\x00\\xff\\xfe\\x00{')
def double(n):
    return 0
""",
    "deep_frame": """
import os
frame = b"[" * 100000 + b"]" * 100000
os.write(3, len(frame).to_bytes(4, "little") + frame)
def double(n):
    return 0
""",
    "big_number_in_a_frame": """
import os
frame = b'[1, "value", ' + b"9" * 1000000 + b"]"
os.write(3, len(frame).to_bytes(4, "little") + frame)
def double(n):
    return 0
""",
    "tagged_nonsense_in_a_frame": """
import os
for frame in (b'{"tuple": [1, "value", {"set": [[1]]}]}', b'{"tuple": [1, "value", {"dict": [[[1], 2]]}]}',
              b'{"tuple": [1, "value", {"int": "zz"}]}', b'{"tuple": [1, "value", {"__import__": "os"}]}',
              b'{"tuple": [1, "value", NaN]}', b'{"tuple": [1, "value", {"dict": 3}]}'):
    os.write(3, len(frame).to_bytes(4, "little") + frame)
def double(n):
    return 0
""",
    "set_of_collisions": """
import os
numbers = ", ".join(str(k * (2**61 - 1)) for k in range(150_000))
for kind in ("set", "frozenset"):
    frame = ('{"tuple": [1, "value", {"%s": [%s]}]}' % (kind, numbers)).encode()
    os.write(3, len(frame).to_bytes(4, "little"))
    while frame:
        frame = frame[os.write(3, frame):]
def double(n):
    return 0
""",
    "dict_of_collisions": """
import os
items = ", ".join("[%d, 0]" % (k * (2**61 - 1)) for k in range(120_000))
frame = ('{"tuple": [1, "value", {"dict": [%s]}]}' % items).encode()
os.write(3, len(frame).to_bytes(4, "little"))
while frame:
    frame = frame[os.write(3, frame):]
def double(n):
    return 0
""",
    "frame_in_drops": """
import os, time
os.write(3, (1 << 20).to_bytes(4, "little"))
while True:
    os.write(3, b" ")
    time.sleep(0.01)
""",
    "frames_without_end": """
import os
while True:
    os.write(3, b"\\x05\\x00\\x00\\x00[1,2]")
""",
    "channel_is_closed": "import os\nos.close(3)\ndef double(n):\n    return 0\n",
    "channel_is_answered_by_a_thread": """
import json, os, threading
def answer():
    for number in range(1, 1000):
        frame = json.dumps([number, "value", True]).encode()
        os.write(3, len(frame).to_bytes(4, "little") + frame)
threading.Thread(target=answer).start()
def double(n):
    return 0
""",
    "report_is_forged": "import os\nos.write(4, b'SSSS\\x00ok')\nos._exit(0)\n",
    "hangs": "def double(n):\n    while True:\n        pass\n",
    "sleeps": "import time\ndef double(n):\n    time.sleep(60)\n",
    "stops": """
import os, signal
def double(n):
    os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()
""",
    "hangs_while_loaded": "while True:\n    pass\n",
    "huge_value": "def double(n):\n    return 'x' * (100 << 20)\n",
    "huge_number": "def double(n):\n    return 1 << 10_000_000\n",
    "endless_value": "def double(n):\n    values = []\n    values.append(values)\n    return values\n",
    "deep_value": "def double(n):\n    v = []\n    for _ in range(100_000):\n        v = [v]\n    return v\n",
    "memory": "def double(n):\n    return len([0] * (1 << 34))\n",
    "crash": "import ctypes\ndef double(n):\n    ctypes.string_at(8)\n",
    "flood": "def double(n):\n    while True:\n        print('x' * 65536)\n",
    "no_python": "double(n) -> n + n",
    "null_in_the_source": "def double(n):\n    return 0\0\n",
    "surrogate_as_value": "def double(n):\n    return '\\ud800'\n",
    "raises_with_a_surrogate": "def double(n):\n    raise ValueError('\\ud800')\n",
    "raises_with_terminal_codes": "def double(n):\n    raise ValueError('\\x1b[2J\\x00\\r\\n')\n",
    "unhashable_set": "def double(n):\n    return {frozenset([1]): {1, (2,)}}\n",
    "generator": "def double(n):\n    yield n + n\n",
    "coroutine": "async def double(n):\n    return n + n\n",
    "function_of_a_function": "def double(n):\n    return lambda: n + n\n",
}

# Programs, graded by OUTPUTS.
PROGRAMS = {
    "prints_nothing": "",
    "prints_the_input": "print(input())",
    "prints_ok": "print('OK')\nprint('passed')\nimport sys\nsys.exit(0)",
    "prints_everything": "for n in range(-100, 100):\n    print(n)",
    "prints_not_a_number": "print('nan')",
    "prints_infinity": "print('inf')",
    "prints_blank": "print(' \\n' * 10)",
    "prints_without_end": "while True:\n    print(42)",
    "prints_zeros": "import os\nos.write(1, b'\\x00' * 100)",
    "prints_no_text": "import os\nos.write(1, b'\\xff\\xfe4\\x002\\x00')",
    "right_and_then_fails": "print(2 * int(input()))\nraise SystemExit(1)",
    "right_and_then_hangs": "print(2 * int(input()), flush=True)\nwhile True:\n    pass",
    "right_and_then_crashes": "print(2 * int(input()), flush=True)\nimport ctypes\nctypes.string_at(8)",
    "right_on_stderr": "import sys\nprint(2 * int(input()), file=sys.stderr)",
    "right_in_one_case": "print(42)",
    "exit_of_os": "import os\nos._exit(0)",
    "forged_report": "import os\nos.write(4, b'ok')\nos.write(3, b'passed')\nos._exit(0)",
    "remembers": """
try:
    seen = open("/tmp/atoll-attack").read()
except OSError:
    seen = ""
import contextlib
with contextlib.suppress(OSError):
    open("/tmp/atoll-attack", "w").write("42")
print(seen or 0)
""",
}


@dataclass(frozen=True)
class Cheat:
    name: str
    item: ScoreItem


def item(response: str, row: dict[str, object]) -> ScoreItem:
    return ScoreItem(
        id=SampleId(GroupId("run", 0, 0), 0),
        prompt="Double the number.",
        response=f"```python\n{response}\n```",
        ground_truth=json.dumps(row),
        data_source="",
        finish_reason=FinishReason.STOP,
        response_length=100,
    )


CHEATS = tuple(
    Cheat(f"{kind}.{name}", item(response, row))
    for kind, row, responses in (
        ("asserts", ASSERTS, FUNCTIONS),
        ("calls", CALLS, FUNCTIONS),
        ("outputs", OUTPUTS, PROGRAMS),
    )
    for name, response in responses.items()
)
HONEST = {
    "asserts": item(SOLUTION, ASSERTS),
    "calls": item(SOLUTION, CALLS),
    "outputs": item(PROGRAM, OUTPUTS),
}
