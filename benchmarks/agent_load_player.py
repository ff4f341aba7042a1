"""The agent of benchmarks/agent_load.py: asks for a turn, takes a step that lasts STEP_S, and so on.

It posts its requests as JSON: `chat.completions.create`, which looks through all messages by their types,
takes three times as much CPU time.
"""

import asyncio
from typing import Any, Final

from openai.types.chat import ChatCompletion

from atoll import AgentSession

STEP_S: Final = 0.05
OBSERVED: Final = "Nothing has changed. What do you do next?"


async def play(session: AgentSession) -> float:
    """Plays as many turns as its row says; returns their number."""
    messages: list[Any] = [*session.messages]
    for _ in range(int(session.extra["turns"])):
        request = {"model": session.model, "messages": messages}
        answer = await session.client.post("/chat/completions", body=request, cast_to=ChatCompletion)
        await asyncio.sleep(STEP_S)
        messages += [
            {"role": "assistant", "content": answer.choices[0].message.content},
            {"role": "user", "content": OBSERVED},
        ]
    return float(session.extra["turns"])
