"""Tools of MCP servers over streamable HTTP, and tools that grade.

The `mcp` client asks for the stateless revision of 2026-07-28 and falls back to the sessions of 2025-11-25.
Each call is a session of its own over connections that are kept: a failure touches no other call, and a
server may restart between two.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS, CallToolResult, TextContent
from pydantic import Field, TypeAdapter, ValidationError

from atoll.external.answers import (
    Options,
    RefusedError,
    each,
    number_under,
    read_answer,
    read_options,
    shown,
)
from atoll.external.base import MAX_ANSWER_BYTES, Json, Tool, ToolResult, item_fields
from atoll.external.channel import Channel
from atoll.external.probes import probe_reward
from atoll.runtime.errors import AtollError, BadAnswerError, ServiceUnavailableError, UserError
from atoll.wire.types import ExternalServer, Graded, ScoreItem, Verdict

MAX_PAGES = 100  # of a list of tools
FAREWELL_S = 1.0  # to end the session of a call whose time is up

_REWARD = number_under("reward", "value", "score", "result")  # result: what `mcp` wraps a plain number in


class McpTool:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        read_options(server, TypeAdapter(Options))
        self.server = server
        self._channel = Channel(server, token)

    async def probe(self) -> str:
        return f"tools {', '.join(tool.name for tool in await self.tools()) or '(none)'}"

    async def tools(self) -> tuple[Tool, ...]:
        return await _tools(self._channel)

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        try:
            async with _session(self._channel) as client:
                result = await client.call_tool(name, dict(arguments))
        except RefusedError as refused:
            return ToolResult(str(refused), is_error=True)
        return ToolResult(_text(result), result.is_error)

    async def close(self) -> None:
        await self._channel.close()


class RewardOptions(Options):
    tool: str = Field(min_length=1)  # that grades


class McpReward:
    """A tool is given those of an item's fields that its schema names, and answers with a number, or with an
    object that holds one as "reward", "value" or "score": structured, or as its only text."""

    def __init__(self, server: ExternalServer, token: str | None) -> None:
        self.server = server
        self._channel = Channel(server, token)
        self._name = read_options(server, TypeAdapter(RewardOptions)).tool
        self._fields: frozenset[str] = frozenset()  # once the tools were listed

    async def probe(self) -> str:
        self._fields = await self._find_fields()
        return f"tool {self._name}: {await probe_reward(self)}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        self._fields = self._fields or await self._find_fields()
        return await each(self.server, items, self._grade)

    async def close(self) -> None:
        await self._channel.close()

    async def _grade(self, item: ScoreItem) -> Verdict:
        known: dict[str, Json] = {**item.extra, **item_fields(item)}
        arguments = {name: value for name, value in known.items() if name in self._fields}
        async with _session(self._channel) as client:
            result = await client.call_tool(self._name, arguments)
        where = f"{self._channel.where}: tool {self._name}"
        if result.is_error:
            raise BadAnswerError(f"{where} failed: {shown(_text(result), self._channel.token)}")
        structured = result.structured_content
        said = _text(result) if structured is None else json.dumps(structured)
        return Graded(item.id, read_answer(where, said, _REWARD, self._channel.token), {})

    async def _find_fields(self) -> frozenset[str]:
        tools = {tool.name: tool for tool in await _tools(self._channel)}
        if self._name not in tools:
            raise UserError(
                f"{self._channel.where}: option tool = {self._name!r}; "
                f"the server has {', '.join(tools) or 'none'}"
            )
        properties = tools[self._name].schema.get("properties")
        fields = frozenset(properties if isinstance(properties, dict) else ())
        if "response" not in fields:
            raise UserError(
                f"{self._channel.where}: tool {self._name} takes {', '.join(sorted(fields)) or 'nothing'}; "
                "one that grades takes response, and what it needs of the item's other fields"
            )
        return fields


@asynccontextmanager
async def _session(channel: Channel) -> AsyncIterator[Client]:
    async with channel.call():
        transport = streamable_http_client(
            channel.address(""), http_client=channel.http, max_sse_event_size=MAX_ANSWER_BYTES
        )
        farewell = asyncio.timeout(channel.server.timeout_s + FAREWELL_S)  # asked of whoever has just hung
        try:
            async with farewell, Client(transport, cache=None) as client:
                yield client
        except Exception as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the client's own tasks may fail of it
                raise asyncio.CancelledError from None
            raise _translated(channel, error) from None


async def _tools(channel: Channel) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    cursor = None
    async with _session(channel) as client:
        for _ in range(MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += [Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor
            if cursor is None:
                return tuple(tools)
    raise BadAnswerError(f"{channel.where}: got more than {MAX_PAGES} pages of tools, expected an end")


def _translated(channel: Channel, error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):  # of the tasks of one session, where the first failure ends all
        error = error.exceptions[0]
    if isinstance(error, AtollError | TimeoutError | httpx2.HTTPError):
        return error
    text = f"{channel.where}: got {shown(str(error), channel.token)}"
    if isinstance(error, MCPError):
        if error.code == CONNECTION_CLOSED:
            return ServiceUnavailableError(text)
        return (RefusedError if error.code == INVALID_PARAMS else BadAnswerError)(text)
    if isinstance(error, ValidationError | RuntimeError):  # the client's, of an answer against its schema
        return BadAnswerError(text)
    return error


def _text(result: CallToolResult) -> str:
    """What the tool answers as text; what it answers in structure else; other contents are named."""
    texts = [part.text if isinstance(part, TextContent) else f"[{part.type}]" for part in result.content]
    return "\n".join(texts) if texts else json.dumps(result.structured_content)
