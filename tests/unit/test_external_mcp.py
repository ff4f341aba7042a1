"""MCP servers: the `mcp` package's own, of both revisions, and answers that it would not give."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator

import pytest
from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent

from atoll.external.base import ToolResult
from atoll.external.protocols import connect
from atoll.runtime.errors import OverloadedError, ProtocolError, ServiceUnavailableError, UserError
from atoll.wire.types import (
    ExternalServer,
    Graded,
    GradingError,
)
from tests.http_servers import Request, raw_http, reply, served
from tests.score_items import item

TOKEN = "s3cr3t-t0k3n"


def theirs() -> MCPServer:
    server = MCPServer("theirs")

    @server.tool()
    def number(response: str, ground_truth: str, level: int) -> float:
        """One where they are equal."""
        if response == "crash":
            raise ValueError("cannot grade this")
        return level * float(response == ground_truth)

    @server.tool()
    def structured(response: str) -> dict[str, float]:
        return {"score": 0.25, "length": len(response)}

    @server.tool()
    def told(response: str) -> CallToolResult:
        text = {"number": " -2.5", "object": '{"reward": 7}', "words": "good", "nan": "NaN"}[response]
        return CallToolResult(content=[TextContent(type="text", text=text)])

    @server.tool()
    async def hangs(response: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    return server


class Seen:
    """An ASGI app before another: notes the methods that are called, and may know nothing of discovery."""

    def __init__(self, app, sessions: bool) -> None:
        self._app = app
        self._sessions = sessions
        self.methods: list[str] = []
        self.authorizations: set[bytes | None] = set()

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        message = await receive()
        method = json.loads(message["body"])["method"]
        self.methods.append(method)
        self.authorizations.add(dict(scope["headers"]).get(b"authorization"))
        if self._sessions and method == "server/discover":
            await send({"type": "http.response.start", "status": 400, "headers": []})
            return await send({"type": "http.response.body", "body": b""})

        async def again():
            nonlocal message
            given, message = message, None
            return given or await receive()

        return await self._app(scope, again, send)


@pytest.fixture(scope="module", params=[False, True], ids=["stateless", "sessions"])
def seen(request: pytest.FixtureRequest) -> Iterator[tuple[str, Seen]]:
    app = Seen(theirs().streamable_http_app(), sessions=request.param)
    with served(app) as url:
        yield f"{url}/mcp", app


async def test_a_tool_that_grades_gets_the_fields_that_it_names(seen: tuple[str, Seen]) -> None:
    url, app = seen
    judge = connect(ExternalServer("reward", "judge", url, "mcp", {"tool": "number"}), TOKEN)
    verdicts = await judge.score([item(0, level="3"), item(1, "45", level="3"), item(2, "crash", level="3")])
    assert verdicts[:2] == [Graded(item(0).id, 3.0, {}), Graded(item(1).id, 0.0, {})]
    assert isinstance(verdicts[2], GradingError)
    assert "Error executing tool number" in verdicts[2].cause
    assert not verdicts[2].retryable
    await judge.close()
    assert ("initialize" in app.methods) == app._sessions
    assert app.authorizations == {f"Bearer {TOKEN}".encode()}


async def test_the_number_may_be_structured_or_told(seen: tuple[str, Seen]) -> None:
    url, _ = seen
    judge = connect(ExternalServer("reward", "judge", url, "mcp", {"tool": "structured"}), TOKEN)
    assert await judge.probe() == "tool structured: graded the probe 0.25"
    await judge.close()
    judge = connect(ExternalServer("reward", "judge", url, "mcp", {"tool": "told"}), TOKEN)
    verdicts = await judge.score(
        [item(n, said) for n, said in enumerate(["number", "object", "words", "nan"])]
    )
    await judge.close()
    assert verdicts[:2] == [Graded(item(0).id, -2.5, {}), Graded(item(1).id, 7.0, {})]
    assert all(isinstance(verdict, GradingError) and not verdict.retryable for verdict in verdicts[2:])
    assert "the response was 'good'" in verdicts[2].cause
    assert "finite" in verdicts[3].cause


async def test_tools_are_listed_and_called(seen: tuple[str, Seen]) -> None:
    url, _ = seen
    tools = connect(ExternalServer("tool", "theirs", url, "mcp"), TOKEN)
    assert await tools.probe() == "tools number, structured, told, hangs"
    async with tools.session() as session:
        assert (await session.tools())[0].description == "One where they are equal."
        assert await session.call("told", {"response": "words"}) == ToolResult("good")
        assert (await session.call("told", {"answer": "words"})).is_error
        unknown = await session.call("nothing", {})
    assert unknown.is_error
    assert "nothing" in unknown.text
    await tools.close()


async def test_a_call_that_hangs_is_given_up(seen: tuple[str, Seen]) -> None:
    url, _ = seen
    tools = connect(ExternalServer("tool", "theirs", url, "mcp", timeout_s=0.3), TOKEN)
    with pytest.raises(ServiceUnavailableError, match=r"no answer within 0\.3 s"):
        async with tools.session() as session:
            await session.call("hangs", {"response": ""})
    await tools.close()


async def test_a_session_with_a_server_that_hangs_ends_too() -> None:
    """Its end is a call of its own, which is not answered either."""
    methods: list[str] = []

    async def answer(request: Request) -> AsyncIterator[bytes]:
        message = request.json if request.body else {}
        methods.append(message.get("method", request.method))
        match methods[-1]:
            case "server/discover":
                yield reply({}, "400 Bad")
            case "initialize":
                info = {"serverInfo": {"name": "theirs", "version": "1"}, "capabilities": {"tools": {}}}
                result = {"protocolVersion": "2025-06-18", **info}
                session = reply({"jsonrpc": "2.0", "id": message["id"], "result": result}, mcp_session_id="1")
                yield session
            case "notifications/initialized":
                yield reply(b"", "202 Accepted")
            case _:
                await asyncio.Event().wait()

    async with raw_http(answer) as raw:
        tools = connect(ExternalServer("tool", "theirs", raw.url, "mcp", timeout_s=3), TOKEN)
        async with asyncio.timeout(30):
            with pytest.raises(ServiceUnavailableError, match="no answer within 3 s"):
                async with tools.session() as session:
                    await session.call("hangs", {})
        await tools.close()
    assert "DELETE" in methods


async def test_a_call_that_is_cancelled_at_any_moment_is_cancelled(seen: tuple[str, Seen]) -> None:
    """The client's own tasks may fail of it, which is no failure of the server."""
    url, _ = seen
    judge = connect(ExternalServer("reward", "judge", url, "mcp", {"tool": "structured"}), TOKEN)
    await judge.probe()
    begun = asyncio.get_running_loop().time()
    await judge.score([item(n) for n in range(4)])
    took = asyncio.get_running_loop().time() - begun
    for moment in range(40):
        call = asyncio.create_task(judge.score([item(n) for n in range(4)]))
        await asyncio.wait([call], timeout=took * moment / 40)
        if call.cancel():
            with pytest.raises(asyncio.CancelledError):
                await call
    await judge.close()


async def test_a_tool_that_is_not_there_is_named(seen: tuple[str, Seen]) -> None:
    url, _ = seen
    judge = connect(ExternalServer("reward", "judge", url, "mcp", {"tool": "grade"}), TOKEN)
    with pytest.raises(UserError, match="the server has number, structured, told, hangs"):
        await judge.probe()
    await judge.close()


@pytest.mark.parametrize(
    ("content", "error", "problem"),
    [
        (reply({}, "401 No"), UserError, "the token of `auth`"),
        (reply({}, "429 Busy", retry_after="2"), OverloadedError, "asks to retry"),
        (reply({}, "500 Oops"), ServiceUnavailableError, "status 500"),
        (reply({}, "307 Moved", location="http://other/mcp"), ProtocolError, "not followed"),
        (reply(b"<html>", content_type="text/html"), ProtocolError, "text/html"),
        (reply(b"{"), ProtocolError, "parse"),
        (reply({"jsonrpc": "2.0", "id": 1, "result": TOKEN}), ProtocolError, "parse"),
        (b"", ServiceUnavailableError, "connection failed"),
    ],
)
async def test_what_is_no_answer_says_what_it_was(
    content: bytes, error: type[Exception], problem: str
) -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        yield content
        yield b""

    async with raw_http(answer) as raw:
        tools = connect(ExternalServer("tool", "theirs", raw.url, "mcp", timeout_s=5), TOKEN)
        with pytest.raises(error, match=problem) as caught:
            await tools.probe()
        await tools.close()
    assert type(caught.value) is error
    assert raw.url in str(caught.value)
    assert TOKEN not in str(caught.value)
