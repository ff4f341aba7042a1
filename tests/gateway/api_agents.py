"""Agents that call the chat APIs with their own clients; the row names the client and what its user
says next.

Every answer is checked by the API's own pydantic types, streamed or whole: one that does not keep to them
ends its session as failed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import openai
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent

from atoll import AgentSession
from tests.gateway.agents import ADD
from tests.gateway.chat_clients import check_type

FUNCTION = ADD["function"]
RESPONSES_ADD: Any = {"type": "function", "strict": False, **FUNCTION}
MESSAGES_ADD: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
SYSTEM = "You add numbers."
THINKING = frozenset({"reasoning_content"})  # the one field that OpenAI's types do not know
MAX_TOKENS = 1024


def add(numbers: dict[str, Any]) -> str:
    return str(numbers["a"] + numbers["b"])


def strict(answer: Any) -> Any:
    """The answer, if its own type takes it, and knows all of it."""
    check_type(type(answer), answer.model_dump(mode="json", exclude_unset=True), allowed=THINKING)
    return answer


def strict_event(kind: Any, event: Any) -> None:
    check_type(kind, event.model_dump(mode="json", exclude_unset=True), allowed=THINKING)


async def list_async(stream: AsyncIterator[Any]) -> list[Any]:
    return [event async for event in stream]


class Chat:
    """OpenAI's chat completions."""

    def __init__(self, session: AgentSession) -> None:
        self.client = session.client
        self.session = session
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    async def ask(self) -> Any:
        """The policy's message."""
        return strict(await self.client.chat.completions.create(**self.request())).choices[0].message

    def request(self) -> dict[str, Any]:
        return {"model": self.session.model, "messages": self.messages, "tools": [ADD]}

    async def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        while True:
            message = await self.ask()
            self.messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            for call in message.tool_calls or ():
                result = add(json.loads(call.function.arguments))
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not message.tool_calls:
                return


class SyncChat(Chat):
    """The same in a thread."""

    async def ask(self) -> Any:
        http_client = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(
            base_url=self.session.base_url, api_key=self.session.api_key, http_client=http_client
        ) as client:
            answer = await asyncio.to_thread(client.chat.completions.create, **self.request())
        return strict(answer).choices[0].message


class StreamedChat(Chat):
    async def ask(self) -> Any:
        async with self.client.chat.completions.stream(
            **self.request(), stream_options={"include_usage": True}
        ) as stream:
            for event in await list_async(stream):
                if event.type == "chunk":
                    strict_event(ChatCompletionChunk, event.chunk)
            answer = await stream.get_final_completion()
        assert answer.usage is not None
        message = answer.choices[0].message
        for call in message.tool_calls or ():
            call.function.parsed_arguments = None
        return message


class Responses:
    """OpenAI's responses: each request carries all items."""

    def __init__(self, session: AgentSession) -> None:
        self.client = session.client
        self.model = session.model
        self.items: list[Any] = []

    def request(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "input": self.items,
            "tools": [RESPONSES_ADD],
            "instructions": SYSTEM,
            "store": False,
        }

    async def ask(self) -> Any:
        return strict(await self.client.responses.create(**self.request()))

    async def say(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})
        while True:
            output = (await self.ask()).output
            self.items += [item.model_dump(mode="json", exclude_none=True) for item in output]
            calls = [item for item in output if item.type == "function_call"]
            for call in calls:
                result = add(json.loads(call.arguments))
                self.items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
            if not calls:
                return


class StreamedResponses(Responses):
    async def ask(self) -> Any:
        events = await list_async(await self.client.responses.create(**self.request(), stream=True))
        for event in events:
            strict_event(ResponseStreamEvent, event)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        return strict(events[-1].response)


class Messages:
    """Anthropic's messages."""

    def __init__(self, session: AgentSession) -> None:
        self.session = session
        self.messages: list[Any] = []

    def settings(self) -> dict[str, Any]:
        return {"base_url": self.session.anthropic_url, "api_key": self.session.api_key}

    def request(self) -> dict[str, Any]:
        return {
            "model": self.session.model,
            "max_tokens": MAX_TOKENS,
            "system": SYSTEM,
            "messages": self.messages,
            "tools": [MESSAGES_ADD],
        }

    async def ask(self) -> Any:
        http_client = anthropic.DefaultAsyncHttpxClient(trust_env=False)
        async with anthropic.AsyncAnthropic(**self.settings(), http_client=http_client) as client:
            return strict(await client.messages.create(**self.request()))

    async def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        while True:
            answer = await self.ask()
            content = [block.model_dump(mode="json", exclude_none=True) for block in answer.content]
            self.messages.append({"role": "assistant", "content": content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                return
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls
            ]
            self.messages.append({"role": "user", "content": results})


class SyncMessages(Messages):
    async def ask(self) -> Any:
        http_client = anthropic.DefaultHttpxClient(trust_env=False)
        with anthropic.Anthropic(**self.settings(), http_client=http_client) as client:
            return strict(await asyncio.to_thread(client.messages.create, **self.request()))


class StreamedMessages(Messages):
    """With thinking, which comes back as blocks."""

    def request(self) -> dict[str, Any]:
        return {**super().request(), "thinking": {"type": "enabled", "budget_tokens": MAX_TOKENS}}

    async def ask(self) -> Any:
        http_client = anthropic.DefaultAsyncHttpxClient(trust_env=False)
        async with (
            anthropic.AsyncAnthropic(**self.settings(), http_client=http_client) as client,
            client.messages.stream(**self.request()) as stream,
        ):
            return strict(await stream.get_final_message())


CLIENTS: dict[str, type[Chat] | type[Responses] | type[Messages]] = {
    "chat": Chat,
    "chat_sync": SyncChat,
    "chat_stream": StreamedChat,
    "responses": Responses,
    "responses_stream": StreamedResponses,
    "messages": Messages,
    "messages_sync": SyncMessages,
    "messages_stream": StreamedMessages,
}


def task_and_more(session: AgentSession) -> tuple[str, Sequence[str]]:
    """The row's question, and what its user says after the first answers."""
    return session.messages[-1]["content"], json.loads(session.extra["more"])


async def api_agent(session: AgentSession) -> None:
    client = CLIENTS[session.extra["client"]](session)
    task, more = task_and_more(session)
    for text in (task, *more):
        await client.say(text)
