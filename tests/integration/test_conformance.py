"""`atoll conformance`: the examples pass it, and each check finds the server that it is there for."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from mcp.server.lowlevel import Server
from mcp.server.mcpserver import MCPServer
from mcp_types import (
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
)

from atoll.cli.main import main
from atoll.external.conformance import Check, conformance
from atoll.runtime.ports import reserve_port
from atoll.wire.types import ExternalServer
from atoll.wire.v1 import reward_pb2, reward_pb2_grpc
from tests.http_servers import served
from tests.openenv_server import openenv_server

pytestmark = [pytest.mark.long, pytest.mark.rerun_once]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/reward_server"
TOKEN = "t0k3n-0f-th3-t3st"
EVERY_REWARD = [
    "answers the probe",
    "grades one item",
    "grades the same item consistently",
    "keeps the order of a batch",
    "grades an empty response",
    "grades a response in Unicode",
    "grades a response of 100 KB",
    "answers 16 calls at once",
    "answers in time",
]
EVERY_TOKEN = ["rejects a wrong token", "rejects a call without token"]
NOT_JSON = "rejects a request that is not JSON"


@contextmanager
def process(arguments: list[str], cwd: Path, port: int) -> Iterator[None]:
    """Someone else's program: it has the token, and nothing of ours on its path."""
    environment = {"PATH": os.environ["PATH"], "REWARD_TOKEN": TOKEN, "PYTHONDONTWRITEBYTECODE": "1"}
    running = subprocess.Popen(arguments, cwd=cwd, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert running.poll() is None, "the example ended"
                assert time.monotonic() < deadline, "the example does not listen"
        yield
    finally:
        running.kill()
        running.wait()


@pytest.fixture(scope="module")
def over_http() -> Iterator[str]:
    arguments = [sys.executable, "-m", "uvicorn", "--log-level", "warning", "server:app", "--port"]
    with reserve_port() as port, process([*arguments, str(port)], EXAMPLES / "fastapi", port):
        yield f"http://127.0.0.1:{port}/reward"


@pytest.fixture(scope="module")
def over_grpc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Built as its README says."""
    folder = tmp_path_factory.mktemp("grpc")
    shutil.copy(EXAMPLES / "grpc/server.py", folder)
    options = [f"-I{ROOT / 'proto/atoll/wire/v1'}", "--python_out=.", "--grpc_python_out=."]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *options, "reward.proto"],
        cwd=folder,
        check=True,
        timeout=60,
    )
    with reserve_port() as port, process([sys.executable, "server.py", str(port)], folder, port):
        yield f"127.0.0.1:{port}"


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, tuple[bool, str]]]:
    code = main(["conformance", *arguments, "--json"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return code, {line["check"]: (line["passed"], line["said"]) for line in lines}


@pytest.mark.parametrize("example", ["over_http", "over_grpc"])
def test_the_examples_pass_every_check(
    example: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = request.getfixturevalue(example)
    monkeypatch.setenv("THEIR_TOKEN", TOKEN)
    protocol = example.removeprefix("over_")
    code, checks = ask(capsys, url, "--protocol", protocol, "--auth", "env:THEIR_TOKEN")
    assert code == 0
    http = [NOT_JSON] if protocol == "http" else []
    assert list(checks) == EVERY_REWARD + http + EVERY_TOKEN
    assert all(passed for passed, _ in checks.values())
    assert checks["grades one item"][1] == "1"
    assert checks["keeps the order of a batch"][1] == "[1.0, 0.0, 0.0, 0.0]"
    assert checks["grades an empty response"][1] == "0"
    assert TOKEN not in str(checks)

    monkeypatch.setenv("THEIR_TOKEN", "another")
    code, checks = ask(capsys, url, "--protocol", protocol, "--auth", "env:THEIR_TOKEN")
    assert code == 1
    assert list(checks) == ["answers the probe"]
    assert "token of `auth`" in checks["answers the probe"][1]


def test_items_of_ones_own_are_graded(
    over_grpc: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THEIR_TOKEN", TOKEN)
    rows = [{"prompt": "2 * 3", "response": response, "ground_truth": "6"} for response in ("5", "6")]
    rows[0]["prompt"] = "2\u2028* 3"  # a line separator, which JSON leaves as it is
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "items.jsonl").write_text("\n".join(lines))
    base = [over_grpc, "--protocol", "grpc", "--auth", "env:THEIR_TOKEN", "--items"]
    code, checks = ask(capsys, *base, str(tmp_path / "items.jsonl"))
    assert code == 0
    assert checks["grades one item"][1] == "0"
    assert checks["keeps the order of a batch"][1] == "[0.0, 1.0]"

    (tmp_path / "wrong.jsonl").write_text(json.dumps(rows[0]) + '\n{"prompt": "2"}')
    assert main(["conformance", *base, str(tmp_path / "wrong.jsonl")]) == 2
    assert "line 2: response: Field required" in capsys.readouterr().err
    assert main(["conformance", over_grpc, "--protocol", "grpc", "--option", "preset"]) == 2
    assert "expected KEY=VALUE" in capsys.readouterr().err


def graded(body: dict) -> dict:
    return {"verdicts": [{"value": float(item["response"] == "46")} for item in body["items"]]}


def broken() -> FastAPI:
    """A server of every kind that somebody writes; each is right but for its name."""
    app = FastAPI()
    calls = iter(range(1_000_000))
    running = 0

    @app.post("/{fault}")
    async def reward(fault: str, request: Request):
        nonlocal running
        try:
            body = await request.json()
        except ValueError:
            if fault == "accepts_anything":
                return {"verdicts": [{"value": 0}]}
            raise HTTPException(500 if fault == "fails_on_garbage" else 400) from None
        items = body["items"]
        running += 1
        try:
            is_slow = fault == "slow" and next(calls) % 8 == 0  # one of ten in a row at least
            await asyncio.sleep(4.2 if is_slow else 0.005 if fault != "one_at_a_time" else 0.05)
            busy = running > 1
        finally:
            running -= 1
        answer = graded(body)
        match fault:
            case "page":
                return HTMLResponse("<h1>It works!</h1>")
            case "random":
                answer["verdicts"][0]["value"] += next(calls)
            case "backwards":
                answer["verdicts"].reverse()
            case "drops_one" if len(items) > 1:
                answer["verdicts"].pop()
            case "error_on_empty" if not items[0]["response"]:
                raise HTTPException(500)
            case "ascii" if not items[0]["response"].isascii():
                return {"verdicts": [{"error": "'ascii' codec can't encode"}]}
            case "small" if len(items[0]["response"]) > 65_536:
                raise HTTPException(413)
            case "one_at_a_time" if busy:
                raise HTTPException(429)
            case "token" | "token_unread":
                given = request.headers.get("authorization")
                if given is None or (fault == "token" and given != f"Bearer {TOKEN}"):
                    raise HTTPException(401)
        return answer

    return app


@pytest.fixture(scope="module")
def broken_server() -> Iterator[str]:
    with served(broken()) as url:
        yield url


async def failures(
    url: str, protocol: str = "http", token: str | None = None, deterministic: bool = True, **settings
) -> dict[str, str]:
    server = ExternalServer(settings.pop("kind", "reward"), "theirs", url, protocol, **settings)
    checks: list[Check] = [check async for check in conformance(server, token, [], deterministic)]
    assert checks[0].name == "answers the probe"
    return {check.name: check.said for check in checks if not check.passed}


@pytest.mark.parametrize(
    ("fault", "checks", "said"),
    [
        ("none", [], ""),
        ("page", ["answers the probe"], "got content type 'text/html', expected application/json"),
        (
            "random",
            ["grades the same item consistently", "keeps the order of a batch", "answers 16 calls at once"],
            "",
        ),
        ("backwards", ["keeps the order of a batch"], "expected [1.0, 0.0, 0.0, 0.0] as for single items"),
        ("drops_one", ["keeps the order of a batch"], "got 3 verdicts for 4 items"),
        ("error_on_empty", ["grades an empty response"], "status 500"),
        ("ascii", ["grades a response in Unicode"], "'ascii' codec"),
        ("small", ["grades a response of 100 KB"], "status 413"),
        ("one_at_a_time", ["answers 16 calls at once"], "the server is busy"),
        ("accepts_anything", [NOT_JSON], "expected 400 or 422"),
        ("fails_on_garbage", [NOT_JSON], "status 500"),
    ],
)
async def test_each_check_finds_its_fault(
    broken_server: str, fault: str, checks: list[str], said: str
) -> None:
    found = await failures(f"{broken_server}/{fault}")
    assert list(found) == checks
    assert said in " ".join(found.values())


async def test_a_server_that_is_slow_leaves_no_room(broken_server: str) -> None:
    found = await failures(f"{broken_server}/slow", timeout_s=8.0, concurrency=1)
    assert list(found) == ["answers in time"]
    assert "expected less than half of the limit of 8 s" in found["answers in time"]


async def test_rewards_that_differ_by_themselves_pass_where_that_is_said(broken_server: str) -> None:
    assert await failures(f"{broken_server}/random", deterministic=False) == {}


@pytest.mark.parametrize(
    ("fault", "checks"),
    [
        ("token", []),
        ("token_unread", ["rejects a wrong token"]),
        ("none", ["rejects a wrong token", "rejects a call without token"]),
    ],
)
async def test_a_token_that_is_not_checked_is_found(
    broken_server: str, fault: str, checks: list[str]
) -> None:
    assert list(await failures(f"{broken_server}/{fault}", token=TOKEN)) == checks


def tools(*tools: Tool) -> Server:
    """Answers whatever it is called for."""

    async def listed(context: object, page: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=list(tools))

    async def called(context: object, call: CallToolRequestParams) -> CallToolResult:
        return CallToolResult(content=[TextContent(type="text", text=f"done: {call.name}")])

    return Server("theirs", on_list_tools=listed, on_call_tool=called)


async def test_tools_are_checked_too() -> None:
    good = MCPServer("good")
    good.add_tool(lambda text: text, name="echo", description="Says it again.")
    echo = Tool(name="echo", input_schema={"type": "object"})
    cases = {
        "good": (good, {}),
        "empty": (tools(), {"describes its tools": "at least one", "reports an unknown tool": ""}),
        "twice": (
            tools(echo, echo),
            {"describes its tools": "['echo', 'echo']", "reports an unknown": "done: no_such_tool"},
        ),
        "no schema": (
            tools(
                Tool(name="echo", input_schema={"type": "object", "properties": {"a": {"type": "nothing"}}})
            ),
            {
                "describes its tools": "tool echo: got a schema with",
                "reports an unknown": "done: no_such_tool",
            },
        ),
    }
    for name, (server, expected) in cases.items():
        with served(server.streamable_http_app()) as url:
            found = await failures(f"{url}/mcp", "mcp", kind="tool", concurrency=4)
        assert len(found) == len(expected), name
        for (check, said), (begins, holds) in zip(found.items(), expected.items(), strict=True):
            assert check.startswith(begins), name
            assert holds in said, name


class OneAtATime(reward_pb2_grpc.RewardServicer):
    """Refuses every request while it runs a program."""

    busy = False

    async def Execute(self, request, context):  # noqa: N802  as the protocol calls it
        if self.busy:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "one at a time")
        self.busy = True
        await asyncio.sleep(0.5)
        self.busy = False
        return reward_pb2.ExecuteReply(status="ok", stdout=b"46\n")


async def test_a_tool_that_its_client_knows_is_asked_at_once_too() -> None:
    theirs = grpc.aio.server()
    reward_pb2_grpc.add_RewardServicer_to_server(OneAtATime(), theirs)
    port = theirs.add_insecure_port("127.0.0.1:0")
    await theirs.start()
    found = await failures(f"127.0.0.1:{port}", "grpc", kind="tool", concurrency=2)
    await theirs.stop(None)
    assert list(found) == ["answers 2 calls at once"]
    assert "one at a time" in found["answers 2 calls at once"]


async def test_environments_are_checked_too() -> None:
    async with openenv_server(TOKEN) as (url, theirs):

        async def found() -> dict[str, str]:
            return await failures(url, "openenv", kind="env", concurrency=4)

        assert await found() == {}
        theirs.lenient = True
        assert list(await found()) == ["rejects an invalid action"]
        theirs.lenient, theirs.capacity = False, 2
        full = await found()
        assert list(full) == ["runs 4 episodes at once"]
        assert "CAPACITY_REACHED" in full["runs 4 episodes at once"]
