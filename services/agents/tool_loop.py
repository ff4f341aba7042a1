"""The built-in tool loop: the policy calls tools until it replies without a call."""

import asyncio
from typing import Any

import openai

from atoll.agents.chat import complete
from atoll.agents.runner import AgentFunction
from atoll.agents.sandbox_calls import FunctionTool
from atoll.agents.server_clients import ServerClients
from atoll.agents.session import AgentSession
from atoll.agents.toolbox import ToolSources
from atoll.config.schema import SandboxConfig, ToolLoopConfig


def tool_loop(settings: ToolLoopConfig, sandbox: SandboxConfig, clients: ServerClients) -> AgentFunction:
    """Raises ConfigError if a function cannot be loaded."""
    sources = ToolSources(clients, [FunctionTool(name) for name in settings.functions], sandbox, settings)

    async def play(session: AgentSession) -> None:
        """Calls of one reply run side by side. Ends quietly if a rule ends the session."""
        async with sources.open(session) as toolbox:
            messages: list[Any] = [*session.messages]
            tools = toolbox.schemas()
            while True:
                try:
                    reply = await complete(session, messages, tools)
                except openai.PermissionDeniedError:
                    return
                message = reply.choices[0].message
                calls: list[Any] = message.tool_calls or []
                if not calls:
                    return
                messages.append(message.model_dump(exclude_none=True))
                results = await asyncio.gather(
                    *(toolbox.call(call.function.name, call.function.arguments) for call in calls)
                )
                messages += [
                    {"role": "tool", "tool_call_id": call.id, "content": result}
                    for call, result in zip(calls, results, strict=True)
                ]

    return play
