"""The agent function that examples/agents.toml names: sums, with a tool that adds."""

import json
from typing import Any

from atoll import AgentSession

MAX_TURNS = 4
ADD: Any = {
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


async def calculator(session: AgentSession) -> float:
    """1 for the right sum, whether the policy called the tool or not."""
    messages: list[Any] = list(session.messages)
    for _ in range(MAX_TURNS):
        answer = await session.client.chat.completions.create(
            model=session.model, messages=messages, tools=[ADD]
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return float(message.content == session.ground_truth)
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = add(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def add(name: str, arguments: str) -> str:
    """The sum, or what is wrong with the call: the policy may write anything."""
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) + int(numbers["b"])) if name == "add" else f"no tool {name}"
    except (ValueError, KeyError, TypeError):
        return "error"
