"""An agent function that tells a test what it is told: a line on the Unix socket GATEWAY_WITNESS for each
turn that it asks for, and for each answer."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from atoll import AgentSession
from tests.gateway.agents import ADD, add

SOCKET = "GATEWAY_WITNESS"


async def witnessed_chat(session: AgentSession) -> None:
    """Answers calls until there are none. A gateway that is away for long is asked again and again."""
    client = session.client.with_options(max_retries=100)
    messages: list[Any] = [{"role": "system", "content": "You add numbers."}, *session.messages]
    async with _witness(session) as tell:
        while True:
            tell(asks=len(messages))
            answer = await client.chat.completions.create(
                model=session.model, messages=messages, tools=[ADD], logprobs=True
            )
            [choice] = answer.choices
            sampled = (choice.logprobs and choice.logprobs.content) or []
            tell(answer=answer.id, tokens=[[token.bytes, token.logprob] for token in sampled])
            messages.append(choice.message.model_dump(exclude_none=True))
            if not choice.message.tool_calls:
                return
            for call in choice.message.tool_calls:
                assert call.type == "function"
                messages.append(
                    {"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)}
                )


@asynccontextmanager
async def _witness(session: AgentSession) -> AsyncIterator[Callable[..., None]]:
    _, writer = await asyncio.open_unix_connection(os.environ[SOCKET])

    def tell(**fields: Any) -> None:
        line = {"session": session.id, "url": session.anthropic_url, **fields}
        writer.write(json.dumps(line).encode() + b"\n")

    try:
        yield tell
    finally:
        writer.close()
        await writer.wait_closed()
