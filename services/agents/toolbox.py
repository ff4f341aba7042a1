"""The tools of one session: those of servers, each in a session of its own there."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from atoll.agents.server_clients import ServerClients, choose
from atoll.agents.session import AgentSession, EnvironmentFailedError
from atoll.external.base import Tool, ToolSession
from atoll.runtime.errors import AtollError

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


@asynccontextmanager
async def open_toolbox(
    session: AgentSession, clients: ServerClients, max_result_chars: int
) -> AsyncIterator[Toolbox]:
    """With the tools that the session's row names, otherwise all. Raises EnvironmentFailedError if a server
    fails, ValueError if two offer the same tool or none offers one that the row names."""
    by_name = defaultdict(list)
    for access in session.servers:
        if access.server.kind == "tool":
            by_name[access.server.name].append(access)
    offers: dict[str, _Offer] = {}
    try:
        async with AsyncExitStack() as stack:
            for name, servers in by_name.items():
                server = clients.tools(choose(servers, session.id))
                there = await stack.enter_async_context(server.session())
                for tool in await there.tools():
                    if tool.name in offers:
                        raise ValueError(f"tool server {name}: another one offers a tool {tool.name}, too")
                    offers[tool.name] = _Offer(tool, there)
            yield Toolbox(_wanted(session, offers), max_result_chars)
    except AtollError as error:
        raise EnvironmentFailedError(str(error)) from error


def _wanted(session: AgentSession, offers: Mapping[str, _Offer]) -> Mapping[str, _Offer]:
    names = row_tools(session.extra)
    if missing := [name for name in names if name not in offers]:
        known = ", ".join(offers) or "none"
        raise ValueError(f"the row names the tools {', '.join(missing)}, expected some of {known}")
    return {name: offers[name] for name in names} if names else offers


def row_tools(extra: Mapping[str, str]) -> Sequence[str]:
    """Names in a row's `tools`, which holds names or function schemas."""
    tools = json.loads(extra.get("tools") or "[]")
    return [tool if isinstance(tool, str) else tool["function"]["name"] for tool in tools]
