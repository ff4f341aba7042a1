"""The tools of one session: those of servers, and functions that run in the sandbox."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from atoll.agents.sandbox_calls import FunctionTool, SandboxTools, parse_files
from atoll.agents.server_clients import ServerClients, choose
from atoll.agents.session import AgentSession, EnvironmentFailedError
from atoll.config.schema import SandboxConfig, ToolLoopConfig
from atoll.external.base import Json, Tool, ToolResult, ToolSession
from atoll.runtime.errors import AtollError
from atoll.wire.types import SANDBOX, ServerAccess

Schema = dict[str, Any]  # of a tool, as the chat API has it


@dataclass(frozen=True, slots=True)
class _Offer:
    tool: Tool
    session: ToolSession


class Toolbox:
    def __init__(self, offers: Mapping[str, _Offer], max_result_chars: int) -> None:
        self._offers = offers
        self._max_result_chars = max_result_chars

    def schemas(self) -> list[Schema]:
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": dict(tool.schema),
                },
            }
            for tool in (offer.tool for offer in self._offers.values())
        ]

    async def call(self, name: str, arguments: str) -> str:
        """What the policy reads: the result, or what is wrong with the call, which it may have written in any
        form. Raises AtollError if the tool's server fails."""
        offer = self._offers.get(name)
        if offer is None:
            return f"error: there is no tool {name}; there is {', '.join(self._offers)}"
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            return f"error: the arguments are not valid JSON: {error}"
        if not isinstance(given, dict):
            return f"error: the arguments are {type(given).__name__}, expected an object"
        result = await offer.session.call(name, given)
        text = f"error: {result.text}" if result.is_error else result.text
        if len(text) <= self._max_result_chars:
            return text
        return f"{text[: self._max_result_chars]}\n[cut: the result has {len(text):,} characters]"


class Workspace:
    """Functions of one session, one call at a time: the files that one leaves are those of the next, and what
    graders read in the end."""

    def __init__(self, session: AgentSession, sandbox: SandboxTools, clients: ServerClients) -> None:
        """Raises UserError for a row whose `files` are none."""
        self._session = session
        self._sandbox = sandbox
        self._clients = clients
        self._turn = asyncio.Lock()
        session.environment.update(parse_files(session.extra.get("files") or "{}"))

    async def tools(self) -> tuple[Tool, ...]:
        return self._sandbox.tools

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        async with self._turn:
            extra = hidden_arguments(self._session.extra, name)
            files = dict(self._session.environment)
            result = await self._clients.at_home(self._sandbox.call, name, arguments, files, extra)
            self._session.environment.clear()
            self._session.environment.update(result.files)
            return ToolResult(result.text, result.is_error)


class ToolSources:
    """Where the tools of an agent's sessions come from."""

    def __init__(
        self,
        clients: ServerClients,
        functions: Sequence[FunctionTool],
        limits: SandboxConfig,
        settings: ToolLoopConfig,
    ) -> None:
        self._clients = clients
        self._functions = functions
        self._limits = limits
        self._settings = settings
        self._sandboxes: dict[str, SandboxTools] = {}  # by address: those in which the functions load
        self._opening = asyncio.Lock()  # of one of them

    @asynccontextmanager
    async def open(self, session: AgentSession) -> AsyncIterator[Toolbox]:
        """With the tools that the session's row names, otherwise all. Raises EnvironmentFailedError if a
        server fails, ValueError if two offer the same tool or none offers one that the row names."""
        by_name = defaultdict(list)
        for access in session.servers:
            by_name[access.server.name].append(access)
        offers: dict[str, _Offer] = {}
        try:
            async with AsyncExitStack() as stack:
                for name, servers in by_name.items():
                    opening = self._open_source(session, choose(servers, session.id))
                    there = await stack.enter_async_context(opening)
                    for tool in await there.tools():
                        if tool.name in offers:
                            raise ValueError(f"{name}: another server offers a tool {tool.name}, too")
                        offers[tool.name] = _Offer(tool, there)
                yield Toolbox(_wanted(session, offers), self._settings.max_result_chars)
        except AtollError as error:
            raise EnvironmentFailedError(str(error)) from error

    @asynccontextmanager
    async def _open_source(self, session: AgentSession, access: ServerAccess) -> AsyncIterator[ToolSession]:
        if access.server.name != SANDBOX:
            async with self._clients.tool_session(access) as there:
                yield there
            return
        yield Workspace(session, await self._sandbox(access), self._clients)

    async def _sandbox(self, access: ServerAccess) -> SandboxTools:
        """Raises UserError if a function does not load there."""
        address = access.server.url
        async with self._opening:
            if address not in self._sandboxes:
                client = await self._clients.sandbox(access)
                tools = SandboxTools(client, self._functions, self._limits, self._settings.timeout_s)
                await self._clients.at_home(tools.check)
                self._sandboxes[address] = tools
        return self._sandboxes[address]


def _wanted(session: AgentSession, offers: Mapping[str, _Offer]) -> Mapping[str, _Offer]:
    names = row_tools(session.extra)
    if missing := [name for name in names if name not in offers]:
        known = ", ".join(offers) or "none"
        raise ValueError(f"the row names the tools {', '.join(missing)}, expected some of {known}")
    return {name: offers[name] for name in names} if names else offers


def hidden_arguments(extra: Mapping[str, str], tool: str) -> Mapping[str, str]:
    """A row's fields, and what verl calls the `create_kwargs` of the tool."""
    kwargs = json.loads(extra.get("tools_kwargs") or "{}").get(tool, {}).get("create_kwargs", {})
    return dict(extra) | {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in kwargs.items()
    }


def row_tools(extra: Mapping[str, str]) -> Sequence[str]:
    """Names in a row's `tools`, which holds names or function schemas."""
    tools = json.loads(extra.get("tools") or "[]")
    return [tool if isinstance(tool, str) else tool["function"]["name"] for tool in tools]
