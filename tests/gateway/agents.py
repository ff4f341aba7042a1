"""Agent functions for tests: loops of real clients over a tool `add`."""

import json
from typing import Any

from atoll import AgentSession

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def add(arguments: str) -> str:
    numbers = json.loads(arguments)
    return str(numbers["a"] + numbers["b"])


async def openai_chat(session: AgentSession) -> None:
    """Answers calls until there are none."""
    messages: list[Any] = [{"role": "system", "content": "You add numbers."}, *session.messages]
    while True:
        answer = await session.client.chat.completions.create(
            model=session.model, messages=messages, tools=[ADD]
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)}
            )
