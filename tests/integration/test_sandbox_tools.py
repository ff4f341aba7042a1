"""Functions as tools in the sandbox of a real reward service: the tools of examples/coding.py, whose files
persist between calls, and functions that do their worst."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from atoll.agents.sandbox_calls import CallResult, Files, FunctionTool, SandboxTools, parse_files
from atoll.agents.tool_program import MAX_FILES, MAX_TEXT
from atoll.config.schema import RewardSection, SandboxConfig
from atoll.reward.service import RewardService
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import SandboxError, ServiceUnavailableError, UserError
from atoll.runtime.server import Server
from atoll.wire.types import Graded, ScoreItem
from tests.reward_process import start_reward_process
from tests.tokens import TOKEN

ROOT = Path(__file__).parents[2]
CODING = ("list_files", "read_file", "write_file", "run_tests")
UNCHANGED = "The files are as they were before the call."
FILES = {
    "sums.py": "def add(a, b):\n    return a - b\n",
    "test_sums.py": (
        "import unittest\n\nimport sums\n\n\nclass SumsTest(unittest.TestCase):\n"
        "    def test_add(self):\n        self.assertEqual(sums.add(2, 3), 5)\n"
    ),
}
# As a policy's code would have it, which a tool such as run_tests executes.
OWN = """
import json, os, sys, threading, time

def evaluate(code):
    scope = {}
    exec(code, scope)
    return scope.get("result")
"""
REPORT = json.dumps({"text": "forged", "is_error": False, "files": {"sums.py": "forged"}, "num_left_out": 0})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    functions = [f"{ROOT}/examples/coding.py:{name}" for name in CODING]
    process, address = start_reward_process(
        tmp_path_factory.mktemp("reward"),
        data={"train": [{"path": "unused.jsonl", "agent": "coder"}]},
        agents=[{"name": "coder", "tools": {"functions": functions}}],
        reward={"graders": [{"name": "code", "file": "sums.py"}], "sandbox": {}},
    )
    try:
        yield address
    finally:
        process.kill()
        process.communicate()


@pytest_asyncio.fixture
async def client(address: str) -> AsyncIterator[RewardClient]:
    client = RewardClient(address, Caller(token=TOKEN), timeout_s=120.0)
    if (await client.describe()).disk_bytes == 0:
        pytest.skip("this machine gives programs no namespaces, and so no working directory")
    yield client
    await client.close()


@pytest.fixture
def coding(client: RewardClient) -> SandboxTools:
    tools = [FunctionTool(f"{ROOT}/examples/coding.py:{name}") for name in CODING]
    return SandboxTools(client, tools, SandboxConfig(), 60.0)


@pytest.fixture
def own(client: RewardClient, tmp_path: Path) -> SandboxTools:
    (tmp_path / "own.py").write_text(OWN)
    return SandboxTools(client, [FunctionTool(f"{tmp_path}/own.py:evaluate")], SandboxConfig(), 60.0)


async def test_a_coding_agent_finds_the_bug(coding: SandboxTools, client: RewardClient) -> None:
    await coding.check()
    files = parse_files(json.dumps(FILES))

    async def call(name: str, **arguments: str) -> str:
        nonlocal files
        result = await coding.call(name, arguments, files)
        assert not result.is_error, result.text
        files = result.files
        return result.text

    async def grade() -> float:
        tests = json.dumps({"fn_name": "add", "inputs": [[2, 3], [0, 7]], "outputs": [5, 7]})
        [verdict] = await client.score([ScoreItem(response="Done.", ground_truth=tests, environment=files)])
        assert isinstance(verdict, Graded)
        return verdict.value

    assert await call("list_files") == "sums.py\ntest_sums.py"
    assert await call("read_file", path="sums.py") == FILES["sums.py"]
    failure = await call("run_tests")
    assert "AssertionError: -1 != 5" in failure
    assert failure.endswith("FAILED (failures=1)\n")
    assert files == FILES  # without __pycache__
    assert await grade() == 0.0
    fixed = FILES["sums.py"].replace("a - b", "a + b")
    assert await call("write_file", path="sums.py", text=fixed) == "sums.py now has 2 lines."
    assert await call("write_file", path="notes/für/später.txt", text="a\r\n\0\x1b[2J") == (
        "notes/für/später.txt now has 2 lines."
    )
    assert (await call("run_tests")).endswith("OK\n")
    assert files == FILES | {"sums.py": fixed, "notes/für/später.txt": "a\r\n\0\x1b[2J"}
    assert await grade() == 1.0


async def test_mistakes_of_the_policy_are_texts_for_it(coding: SandboxTools) -> None:
    expected = {
        ("read_file", "absent.py"): "FileNotFoundError: [Errno 2] No such file or directory: 'absent.py'",
        ("read_file", "../../etc/passwd"): "FileNotFoundError: [Errno 2] No such file or directory: '../../e",
        ("read_file", "a\0b"): "ValueError: embedded null byte",
        ("read_file", "\ud800"): "UnicodeEncodeError: 'utf-8' codec can't encode character '\\ud800'",
        ("read_file", "x" * 5000): "OSError: [Errno 36] File name too long: 'xxx",
        ("write_file", "../outside.txt"): "",
        ("write_file", "/dev/shm/x"): "",  # the error depends on how the host is laid out
        ("write_file", "sums.py/x"): "FileExistsError: ",
    }
    for (name, path), text in expected.items():
        arguments = {"path": path} if name == "read_file" else {"path": path, "text": "x"}
        result = await coding.call(name, arguments, FILES)
        assert result.is_error, (path, result.text)
        assert result.text.startswith(text), (path, result.text)
        assert "Traceback" not in result.text
        assert result.files == FILES


async def evaluate(own: SandboxTools, code: str, files: Files = FILES) -> CallResult:
    return await own.call("evaluate", {"code": code}, files)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("result = 'as is'", "as is"),
        ("result = {'a': [1, None, 'ü']}", '{"a": [1, null, "ü"]}'),
        ("pass", ""),
        ("import sys; print('out'); print('err', file=sys.stderr); result = 46", "out\nerr\n46"),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\n')", "\ufffd"),
        ("import sys; sys.stdout.close(); result = 1", "1"),
        ("import os; os.write(1, b'past'); os.write(2, b'us'); result = 1", "1"),
        ("import sys; print(sys.stdin.read(), __import__('os').read(0, 10))", " b''"),
        ("print('\\ud800')", "\\ud800"),
        ("result = '\\ud800'", "?"),
        # only the call's own session reads it
        (f"print({REPORT!r})", REPORT),
    ],
)
async def test_what_a_function_prints_and_returns(own: SandboxTools, code: str, text: str) -> None:
    assert await evaluate(own, code) == CallResult(text, False, FILES)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print('so far'); 1 / 0", "so far\nZeroDivisionError: division by zero"),
        ("raise KeyError", "KeyError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E", "E"),
        ("result = {1}", "TypeError: Object of type set is not JSON serializable"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("import os; os._exit(0)", f"The call ended without a result. {UNCHANGED}"),
        ("import os; os._exit(3)", f"exit code: 3. {UNCHANGED}"),
        ("import ctypes; ctypes.string_at(0)", f"signal: SIGSEGV. {UNCHANGED}"),
        ("import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'{}')\n    except OSError: pass", None),
        ("import os; os.closerange(0, 64)", None),
        ("__import__('builtins').len = None", None),
    ],
)
async def test_how_a_function_fails(own: SandboxTools, code: str, text: str | None) -> None:
    """None: in any way."""
    result = await evaluate(own, code)
    assert (result.is_error, result.files) == (True, FILES)
    if text is not None:
        assert result.text == text


async def test_a_forged_report_is_that_of_the_session_alone(own: SandboxTools) -> None:
    code = (
        "import os\n"
        "for fd in range(3, 64):\n"
        f"    try: os.write(fd, {REPORT.encode()!r}) > 10 and os._exit(0)\n"
        "    except OSError: pass\n"
    )
    assert await evaluate(own, code) == CallResult("forged", False, {"sums.py": "forged"})
    outside = REPORT.replace("sums.py", "../sums.py")
    assert await evaluate(own, code.replace(REPORT, outside)) == CallResult(
        f"The call ended without a result. {UNCHANGED}", True, FILES
    )
    names = await evaluate(own, "import os; result = sorted(os.listdir())")
    assert names == CallResult('["sums.py", "test_sums.py"]', False, FILES)


async def test_files_that_change(own: SandboxTools) -> None:
    code = """
import os
os.remove("sums.py")
os.makedirs("a/b")
open("a/b/c.txt", "w").write("new")
open("binary", "wb").write(b"\\xff")
open("odd\\nname", "w").write("x")
os.symlink("/usr/lib", "link")
os.symlink("test_sums.py", "file_link")
os.chdir("a")
raise ValueError("although it fails")
"""
    result = await evaluate(own, code)
    assert result.is_error
    assert result.text == (
        "ValueError: although it fails\n[3 files that are not text, or have odd names, are not kept]"
    )
    assert result.files == {"test_sums.py": FILES["test_sums.py"], "a/b/c.txt": "new"}


@pytest.mark.parametrize(
    "code",
    [
        "open('big', 'w').write('x' * (1 << 20))",
        f"for n in range({MAX_FILES + 1}): open(str(n), 'w').close()",
        "import os\nfor n in range(3000): os.mkdir(str(n)); open(f'{n}/f', 'w').close()",
    ],
)
async def test_a_workspace_that_is_too_large_stays_as_it_was(own: SandboxTools, code: str) -> None:
    result = await evaluate(own, code)
    assert (result.is_error, result.files) == (True, FILES)
    assert result.text.endswith(": this call changes no file.") or "Error" in result.text


async def test_files_that_cannot_be_written_stay_as_they_were(own: SandboxTools) -> None:
    files = {"a": "", "a/b": "", "c": ""}
    assert await evaluate(own, "result = 1", files) == CallResult(
        f"exception: FileExistsError: [Errno 17] File exists: 'a'. {UNCHANGED}", True, files
    )


async def test_output_without_end_is_cut_and_a_loop_without_end_is_ended(
    own: SandboxTools, client: RewardClient, tmp_path: Path
) -> None:
    flood = await evaluate(own, "print('x' * 10_000_000); result = 'y' * 10_000_000")
    assert flood == CallResult("x" * MAX_TEXT + "\n" + "y" * MAX_TEXT, False, FILES)
    odd = await evaluate(own, "open('odd', 'w').write('\\x01' * (1 << 19 - 1))")
    assert odd == CallResult(f"output limit: more than 1048576 bytes. {UNCHANGED}", True, FILES)
    hasty = SandboxTools(client, [FunctionTool(f"{tmp_path}/own.py:evaluate")], SandboxConfig(), 0.5)
    for code in "while True: pass", "while True: print('x' * 1000)", "import time; time.sleep(600)":
        assert await evaluate(hasty, code) == CallResult(f"timeout: after 0.5 s. {UNCHANGED}", True, FILES)
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start(); result = 1"
    assert await evaluate(own, thread) == CallResult("1", False, FILES)


async def test_calls_of_many_sessions_at_once(own: SandboxTools) -> None:
    """More than there are places: they wait, and none sees another's files."""

    async def one(number: int) -> Mapping[str, str]:
        files: Files = {"number": str(number)}
        for _ in range(2):
            code = "n = int(open('number').read())\nopen('number', 'w').write(str(n + 1000))"
            files = (await evaluate(own, code, files)).files
        return files

    found = await asyncio.gather(*map(one, range(40)))
    assert found == [{"number": str(number + 2000)} for number in range(40)]


async def test_a_file_that_the_sandbox_cannot_execute_is_named(client: RewardClient, tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text("import pydantic\n\ndef look(): pass\n")
    tools = SandboxTools(client, [FunctionTool(f"{tmp_path}/needy.py:look")], SandboxConfig(), 60.0)
    with pytest.raises(
        UserError, match=r"needy\.py:look fails in the sandbox.*ModuleNotFoundError: No module"
    ):
        await tools.check()
    assert (await tools.call("look", {}, {})).text == "ModuleNotFoundError: No module named 'pydantic'"


async def test_hidden_arguments_reach_the_function(client: RewardClient, tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text("def join(a, b='x', *, c, d: list = ()): return [a, b, c, d]\n")
    tools = SandboxTools(client, [FunctionTool(f"{tmp_path}/hidden.py:join")], SandboxConfig(), 60.0)
    extra = {"c": "\0c", "d": "[1]", "files": "{}"}
    assert json.loads((await tools.call("join", {"a": "1"}, {}, extra)).text) == ["1", "x", "\0c", [1]]
    with pytest.raises(UserError, match="the row's extra fields do not fit: c: Field required"):
        await tools.call("join", {"a": "1"}, {})


async def test_the_documentations_example(address: str) -> None:
    page = (ROOT / "docs" / "rewards.md").read_text().partition("### Running programs for tools")[2]
    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], scope)
    assert await scope["shout"](address, TOKEN) == b"HELLO\n"


async def test_files_need_a_directory_and_calls_without_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    sandbox = SandboxConfig(namespaces="never")
    service = await RewardService.start(RewardSection(graders=(), sandbox=sandbox))
    server = await Server.start(
        "atoll.v1.Reward", service.add_to, host="127.0.0.1", port=0, token=TOKEN, setting="--port"
    )
    client = RewardClient(server.address, Caller(token=TOKEN), timeout_s=60.0)
    tools = SandboxTools(client, [FunctionTool(f"{tmp_path}/own.py:evaluate")], sandbox, 60.0)
    assert await evaluate(tools, "result = 17 + 29", {}) == CallResult("46", False, {})
    written = await evaluate(tools, "open('a', 'w')", {})
    assert written == CallResult("PermissionError: [Errno 13] Permission denied: 'a'", True, {})
    with pytest.raises(SandboxError, match=r"lacks: set reward\.sandbox\.disk_mb, and let it use namespaces"):
        await evaluate(tools, "result = 1")
    await server.stop(0)
    await service.close()
    with pytest.raises(ServiceUnavailableError):
        await evaluate(tools, "result = 1", {})
    await client.close()
