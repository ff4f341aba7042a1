"""A user's functions as tools of the sandbox: schemas, arguments, workspaces, and untrusted reports.

Calls of a real sandbox are in tests/integration/test_sandbox_tools.py.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from atoll.agents.sandbox_calls import (
    MAX_SHOWN,
    CallResult,
    FunctionTool,
    SandboxTools,
    parse,
    parse_files,
    program,
)
from atoll.agents.tool_program import MAX_FILES, MAX_FILES_BYTES, is_plain
from atoll.config.errors import ConfigError
from atoll.config.schema import SandboxConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import UserError
from atoll.wire.types import Execution, ProgramStatus

TOOLS = '''
from __future__ import annotations
import io
from typing import Literal

def search(query, copy: int = 3, schema: Literal["web", "wiki"] = "web", *, index, depth: int = 1) -> str:
    """Searches an index.

    The second line.
    """

def nothing(): pass
def everything(value: object): pass
def many(*values): pass
def strange(value: Nowhere): pass
def unknown(value: io.StringIO): pass
async def later(): pass
'''
BEFORE = {"a.py": "x = 1\n"}


@pytest.fixture
def tools(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(TOOLS)
    return str(tmp_path / "tools.py")


def test_what_the_policy_is_told_of_a_function(tools: str) -> None:
    tool = FunctionTool(f"{tools}:search").tool
    assert (tool.name, tool.description) == ("search", "Searches an index.\n\nThe second line.")
    assert tool.schema == {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "copy": {"type": "integer", "default": 3},
            "schema": {"type": "string", "enum": ["web", "wiki"], "default": "web"},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
    bare = FunctionTool(f"{tools}:nothing").tool
    assert (bare.description, bare.schema["properties"]) == ("", {})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "many",
            r"agents\.tools\.functions: .*many: ConfigError: parameter \*values: expected one with a name",
        ),
        ("strange", "strange: NameError: name 'Nowhere' is not defined"),
        ("unknown", "unknown: PydanticSchemaGenerationError: Unable to generate pydantic-core schema for "),
        ("later", "expected a plain function, got an async function"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_a_function_that_can_be_no_tool(tools: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionTool(f"{tools}:{name}")


def test_arguments_fit_the_schema_and_defaults_are_the_functions_own(tools: str) -> None:
    tool = FunctionTool(f"{tools}:search")
    assert tool.arguments({"query": "x"}) == {"query": "x"}
    assert tool.arguments({"query": "\0\x1b", "copy": "5"}) == {"query": "\0\x1b", "copy": 5}
    for arguments, message in (
        ({}, "query: Field required"),
        (
            {"query": 5, "copy": "x"},
            "query: Input should be a valid string; copy: Input should be a valid int",
        ),
        ({"query": "x", "index": "secret"}, "index: Extra inputs are not permitted"),
        ({"query": "x", "schema": "net"}, "schema: Input should be 'web' or 'wiki'"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            tool.arguments(arguments)
        assert len(str(raised.value)) <= 500


def test_arguments_that_are_nested_too_deeply_do_not_fit(tools: str) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ValueError, match="Maximum serialization depth exceeded"):
        FunctionTool(f"{tools}:everything").arguments({"value": deep})


def test_hidden_arguments_come_from_the_row(tools: str) -> None:
    tool = FunctionTool(f"{tools}:search")
    assert tool.hidden_arguments({"index": "5", "depth": "7", "level": "x"}) == {"index": "5", "depth": 7}
    assert tool.hidden_arguments({"index": "5"}) == {"index": "5"}
    for extra in {}, {"index": "5", "depth": "x"}:
        with pytest.raises(
            UserError, match=r"tool search: the row's extra fields do not fit: (index|depth): "
        ):
            tool.hidden_arguments(extra)
    _, stdin = program(tool, {"query": "x"}, {"index": "5"}, BEFORE)
    assert json.loads(stdin) == {
        "function": "search",
        "arguments": {"query": "x", "index": "5"},
        "files": BEFORE,
    }


def test_two_tools_of_one_name_are_refused(tools: str) -> None:
    twice = [FunctionTool(f"{tools}:nothing")] * 2
    client: Any = None
    with pytest.raises(ConfigError, match="nothing, nothing: two have the same name: rename one"):
        SandboxTools(client, twice, SandboxConfig(), 1.0)


@pytest.mark.parametrize(
    "path",
    [
        *("", "/a", "/", "..", "../a", "a/../b", "./a", ".", "a//b", "a/"),
        *("a\nb", "a\0", "a\x1b[2J", "\ud800", "x" * 201),
    ],
)
def test_paths_that_lead_elsewhere_or_cannot_be_printed(path: str) -> None:
    assert not is_plain(path)
    with pytest.raises(UserError, match="files of a row, as an object from path to text: "):
        parse_files(json.dumps({path: ""}))


def test_the_files_of_a_row() -> None:
    files = {"a.py": "x\r\n", "tests/größe/.hidden": "", "a..b": "\0"}
    assert parse_files(json.dumps(files)) == files
    full = json.dumps({"a": "ü" * (MAX_FILES_BYTES // 2)})
    assert len(parse_files(full)["a"]) == MAX_FILES_BYTES // 2
    for bad, message in (
        (full.replace('": "', '": "x'), f"expected at most {MAX_FILES_BYTES} bytes"),
        (json.dumps({str(number): "" for number in range(MAX_FILES + 1)}), "at most 256 items"),
        ("[]", "Input should be an object"),
        ('{"a": 5}', "a: Input should be a valid string"),
        ("{", "Invalid JSON"),
    ):
        with pytest.raises(UserError, match=message):
            parse_files(bad)


def ended(stdout: bytes, status: ProgramStatus = ProgramStatus.OK, detail: str = "") -> Execution:
    return Execution(status, detail, stdout, b"", 0.1, 0.1)


def report(**changes: object) -> bytes:
    return json.dumps({"text": "46", "is_error": False, "files": {}, "num_left_out": 0} | changes).encode()


def test_a_report() -> None:
    assert parse(ended(report()), BEFORE) == CallResult("46", False, {})
    assert parse(ended(report(files=None, is_error=True)), BEFORE) == CallResult("46", True, BEFORE)
    left_out = parse(ended(report(num_left_out=2)), BEFORE)
    assert left_out.text == "46\n[2 files that are not text, or have odd names, are not kept]"
    assert len(parse(ended(report(text="x" * MAX_SHOWN + "y")), BEFORE).text) == MAX_SHOWN


FORGED: list[Mapping[str, object]] = [
    {"files": {"../a": ""}},
    {"files": {"/etc/passwd": ""}},
    {"files": {"a": 5}},
    {"files": {"a": "x" * (MAX_FILES_BYTES + 1)}},
    {"files": {str(number): "" for number in range(MAX_FILES + 1)}},
    {"text": None},
    {"text": ["46"]},
    {"is_error": "perhaps"},
    {"num_left_out": -1},
    {"num_left_out": 10**4000},
    {"text": "\ud800"},
]


@pytest.mark.parametrize("stdout", [
    *(report(**changes) for changes in FORGED),
    b"",
    b"46",
    b"null",
    b"\xff" + report(),
    report() + report(),
    report()[:-1],
    b'{"text": ' + b"[" * 100_000,
    os.urandom(1000) + b"\0",
])  # fmt: skip
def test_what_is_no_report_is_an_error_and_changes_no_file(stdout: bytes) -> None:
    assert parse(ended(stdout), BEFORE) == CallResult(
        "The call ended without a result. The files are as they were before the call.", True, BEFORE
    )


def test_a_program_that_did_not_end_by_itself_reports_nothing() -> None:
    assert parse(ended(report(), ProgramStatus.TIMEOUT, "after 2 s"), BEFORE) == CallResult(
        "timeout: after 2 s. The files are as they were before the call.", True, BEFORE
    )
    long = parse(ended(b"", ProgramStatus.EXCEPTION, "x" * 10_000), BEFORE)
    assert len(long.text) < 600
    assert parse(ended(b"", ProgramStatus.SIGNAL), BEFORE).text.startswith("signal. The files")


async def test_calls_that_need_no_program(tools: str) -> None:
    client = RewardClient("127.0.0.1:1", Caller())  # nobody listens
    made = SandboxTools(client, [FunctionTool(f"{tools}:search")], SandboxConfig(), 1.0)
    assert [tool.name for tool in made.tools] == ["search"]
    unknown = await made.call("find\n" * 100, {}, BEFORE)
    assert (unknown.is_error, unknown.files) == (True, BEFORE)
    assert unknown.text.startswith("There is no tool 'find\\nfind")
    assert unknown.text.endswith("; there is search.")
    assert len(unknown.text) < 150
    assert await made.call("search", {"quer": "x"}, BEFORE) == CallResult(
        "Invalid arguments: query: Field required; quer: Extra inputs are not permitted", True, BEFORE
    )
    await client.close()
