"""One turn of a built-in loop."""

from collections.abc import Sequence
from typing import Any

from openai.types.chat import ChatCompletion

from atoll.agents.session import AgentSession


async def complete(
    session: AgentSession, messages: Sequence[Any], tools: Sequence[Any] = ()
) -> ChatCompletion:
    """The policy's reply. Posts the request as it is: `chat.completions.create` looks through all messages by
    their types, which takes three times as much CPU time.

    Raises openai.PermissionDeniedError once a rule has ended the session, and other openai.APIErrors.
    """
    body = {"model": session.model, "messages": messages}
    if tools:
        body["tools"] = tools
    return await session.client.post("/chat/completions", body=body, cast_to=ChatCompletion)
