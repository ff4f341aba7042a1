"""MCP servers over streamable HTTP: tools, and tools used as graders.

The `mcp` client asks for the stateless revision of 2026-07-28 and falls back to the sessions of 2025-11-25.
An agent's calls share a session; a grading call is its own session over kept-alive connections, so that
failures do not affect other calls, and a server may restart between two.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, CallToolResult, TextContent
from pydantic import Field, TypeAdapter, ValidationError

from atoll.external.base import MAX_ANSWER_BYTES, Json, Tool, ToolResult, item_fields
from atoll.external.channel import Channel
from atoll.external.probes import probe_reward
from atoll.external.responses import (
    OptionsModel,
    RefusedError,
    excerpt,
    grade_each,
    number_field,
    parse_options,
    parse_response,
)
from atoll.runtime.errors import AtollError, ProtocolError, ServiceUnavailableError, UserError
from atoll.wire.types import ExternalServer, Graded, ScoreItem, Verdict

MAX_PAGES = 100  # of a list of tools
CLOSE_TIMEOUT_S = 1.0  # to close the session of a call that timed out

_REWARD = number_field("reward", "value", "score", "result")  # result: what `mcp` wraps a plain number in


class McpTool:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        parse_options(server, TypeAdapter(OptionsModel))
        self.server = server
        self._channel = Channel(server, token)

    async def probe(self) -> str:
        async with _call(self._channel) as client:
            tools = await _tools(self._channel, client)
        return f"tools {', '.join(tool.name for tool in tools) or '(none)'}"

    @asynccontextmanager
    async def session(self) -> AsyncIterator["McpToolSession"]:
        async with _session(self._channel) as client:
            yield McpToolSession(self._channel, client)

    async def close(self) -> None:
        await self._channel.close()


class McpToolSession:
    """Each call has `server.timeout_s`, and takes one of the server's slots."""

    def __init__(self, channel: Channel, client: Client) -> None:
        self._channel = channel
        self._client = client

    async def tools(self) -> tuple[Tool, ...]:
        async with self._channel.call(), _translating(self._channel):
            return await _tools(self._channel, self._client)

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        try:
            async with self._channel.call(), _translating(self._channel):
                result = await self._client.call_tool(name, dict(arguments))
        except RefusedError as refused:
            return ToolResult(str(refused), is_error=True)
        return ToolResult(_text(result), result.is_error)


class McpRewardOptions(OptionsModel):
    tool: str = Field(min_length=1)  # that grades


class McpReward:
    """Calls a tool with the item fields in its schema; it returns a number, or an object with "reward",
    "value" or "score", as structured output or as its only text.
    """

    def __init__(self, server: ExternalServer, token: str | None) -> None:
        self.server = server
        self._channel = Channel(server, token)
        self._name = parse_options(server, TypeAdapter(McpRewardOptions)).tool
        self._fields: frozenset[str] = frozenset()  # once the tools were listed

    async def probe(self) -> str:
        self._fields = await self._find_fields()
        return f"tool {self._name}: {await probe_reward(self)}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        self._fields = self._fields or await self._find_fields()
        return await grade_each(self.server, items, self._grade)

    async def close(self) -> None:
        await self._channel.close()

    async def _grade(self, item: ScoreItem) -> Verdict:
        known: dict[str, Json] = {**item.extra, **item_fields(item)}
        arguments = {name: value for name, value in known.items() if name in self._fields}
        async with _call(self._channel) as client:
            result = await client.call_tool(self._name, arguments)
        where = f"{self._channel.where}: tool {self._name}"
        if result.is_error:
            raise ProtocolError(f"{where} failed: {excerpt(_text(result), self._channel.token)}")
        structured = result.structured_content
        said = _text(result) if structured is None else json.dumps(structured)
        return Graded(item.id, parse_response(where, said, _REWARD, self._channel.token), {})

    async def _find_fields(self) -> frozenset[str]:
        async with _call(self._channel) as client:
            tools = {tool.name: tool for tool in await _tools(self._channel, client)}
        if self._name not in tools:
            raise UserError(
                f"{self._channel.where}: option tool = {self._name!r}; the server has "
                f"{', '.join(tools) or 'none'}"
            )
        properties = tools[self._name].schema.get("properties")
        fields = frozenset(properties if isinstance(properties, dict) else ())
        if "response" not in fields:
            raise UserError(
                f"{self._channel.where}: tool {self._name} takes {', '.join(sorted(fields)) or 'nothing'}; "
                "a grading tool needs a parameter response, and may take other fields of the item"
            )
        return fields


@asynccontextmanager
async def _call(channel: Channel) -> AsyncIterator[Client]:
    """A session of one call: the body has `server.timeout_s`, the opening included."""
    async with channel.call(), _session(channel) as client, _translating(channel):
        yield client


@asynccontextmanager
async def _session(channel: Channel) -> AsyncIterator[Client]:
    transport = streamable_http_client(
        channel.address(""), http_client=channel.http, max_sse_event_size=MAX_ANSWER_BYTES
    )
    farewell = asyncio.timeout(None)
    failure: Exception | None = None  # raised by the caller's body
    try:
        async with farewell, AsyncExitStack() as stack:
            async with channel.deadline():
                client = await stack.enter_async_context(Client(transport, cache=None))
            try:
                yield client
            except Exception as error:
                failure = error
                raise
            finally:  # a server that just hung may hang again
                farewell.reschedule(asyncio.get_running_loop().time() + CLOSE_TIMEOUT_S)
    except Exception as error:
        if farewell.expired() and failure is None:
            return  # every call was answered
        raise (failure or _translate(channel, error)) from None


@asynccontextmanager
async def _translating(channel: Channel) -> AsyncIterator[None]:
    try:
        yield
    except Exception as error:
        raise _translate(channel, error) from None


async def _tools(channel: Channel, client: Client) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    cursor = None
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += [Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return tuple(tools)
    raise ProtocolError(f"{channel.where}: got more than {MAX_PAGES} pages of tools, expected an end")


def _translate(channel: Channel, error: Exception) -> BaseException:
    task = asyncio.current_task()
    if task is not None and task.cancelling():  # the client's own tasks may fail
        return asyncio.CancelledError()
    while isinstance(error, ExceptionGroup):  # of one session's tasks, of which the first failure ends all
        error = error.exceptions[0]
    if isinstance(error, AtollError | TimeoutError):
        return error
    text = f"{channel.where}: got {excerpt(str(error), channel.token)}"
    if isinstance(error, httpx2.HTTPError):
        return ServiceUnavailableError(f"{text}: the connection failed")
    if isinstance(error, MCPError):
        if error.code == CONNECTION_CLOSED:
            return ServiceUnavailableError(text)
        return (RefusedError if error.code == INVALID_PARAMS else ProtocolError)(text)
    if isinstance(
        error, ValidationError | RuntimeError
    ):  # raised by the client for a response that does not match its schema
        return ProtocolError(text)
    return error


def _text(result: CallToolResult) -> str:
    """The tool's text, otherwise its structured output; other contents are only named."""
    texts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    return "\n".join(texts) if texts else json.dumps(result.structured_content)
