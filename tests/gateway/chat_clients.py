"""The real clients of three chat APIs, served from memory with what an Api makes of a ChatAnswer."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import httpx2
import openai
import orjson
import pydantic

from atoll.gateway.apis.base import Api, ApiRequest
from atoll.gateway.apis.json_body import parse_json
from atoll.gateway.conversation import ChatAnswer, Reply, RequestError
from atoll.wire.types import Message, ToolCall

CREATED = 1_790_000_000


def make_reply(
    num_calls: int = 0, *, content: str = "", thinking: str = "", end: str = "", name: str = "0_3"
):
    calls = tuple(
        ToolCall(f"call_{name}_{index}", "add", f'{{"a": {index},\n "b": [{index}, "\\n é"]}}')
        for index in range(num_calls)
    )
    message = Message("assistant", content, calls, thinking=thinking)
    return Reply(message, end or ("tool_calls" if calls else "stop"), 20 + num_calls, 7 if thinking else 0)


def make_answer(*replies: Reply) -> ChatAnswer:
    return ChatAnswer("0_3", CREATED, "policy", 100, 64, replies)


class _Chunks(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A body whose chunks end anywhere, as they do on a network."""

    def __init__(self, content: bytes) -> None:
        self._chunks = [content[start : start + 37] for start in range(0, len(content), 37)]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


class Served:
    """Answers each request with `answer`, after two signs of life if it streams; an error at once, or, with
    `late`, once the stream has begun."""

    def __init__(self, api: Api, answer: ChatAnswer | RequestError, *, late: bool = False) -> None:
        self._api = api
        self._answer = answer
        self._late = late
        self.requests: list[ApiRequest] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        try:
            asked = self._api.parse(parse_json(request.content))
        except RequestError as error:
            return self._refuse(error)
        self.requests.append(asked)
        if isinstance(self._answer, RequestError):
            if not self._late:
                return self._refuse(self._answer)
            events = [self._api.error_event(self._answer)]
        elif not asked.stream:
            return _json_response(200, self._api.answer(asked, self._answer))
        else:
            events = self._api.events(asked, self._answer)
        stream = _Chunks(b"".join([self._api.keep_alive * 2, *events]))
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)

    def _refuse(self, error: RequestError) -> httpx2.Response:
        return _json_response(error.status, self._api.error(error))

    async def answer_async(self, request: httpx2.Request) -> httpx2.Response:
        return self(request)

    def openai_client(self) -> openai.OpenAI:
        http_client = httpx2.Client(transport=httpx2.MockTransport(self))
        return openai.OpenAI(
            base_url="http://gateway/v1", api_key="key", http_client=http_client, max_retries=0
        )

    def async_openai_client(self) -> openai.AsyncOpenAI:
        http_client = httpx2.AsyncClient(transport=httpx2.MockTransport(self.answer_async))
        return openai.AsyncOpenAI(
            base_url="http://gateway/v1", api_key="key", http_client=http_client, max_retries=0
        )

    def anthropic_client(self) -> anthropic.Anthropic:
        http_client = httpx2.Client(transport=httpx2.MockTransport(self))
        return anthropic.Anthropic(
            base_url="http://gateway", api_key="key", http_client=http_client, max_retries=0
        )

    def async_anthropic_client(self) -> anthropic.AsyncAnthropic:
        http_client = httpx2.AsyncClient(transport=httpx2.MockTransport(self.answer_async))
        return anthropic.AsyncAnthropic(
            base_url="http://gateway", api_key="key", http_client=http_client, max_retries=0
        )


def _json_response(status: int, content: Any) -> httpx2.Response:
    headers = {"content-type": "application/json"}
    return httpx2.Response(status, headers=headers, content=orjson.dumps(content))


def sse_datas(events: list[bytes]) -> Iterator[dict[str, Any]]:
    """Data of each event; its name, if it has one, is the data's type."""
    for event in b"".join(events).split(b"\n\n"):
        if event in (b"", b"data: [DONE]"):
            continue
        *name, data = event.split(b"\n")
        parsed = orjson.loads(data.removeprefix(b"data: "))
        assert name == ([b"event: " + parsed["type"].encode()] if name else [])
        yield parsed


def check_type(kind: Any, value: Any, *, allowed: frozenset[str] = frozenset()) -> Any:
    """`value` as a pydantic `kind`, without fields that it does not know."""
    parsed = pydantic.TypeAdapter(kind).validate_python(value)
    unknown = set(_unknown_fields(parsed)) - allowed
    assert not unknown, f"{kind}: {unknown}"
    return parsed


def _unknown_fields(value: Any) -> Iterator[str]:
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown_fields(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _unknown_fields(item)


def same_message(got: Message, expected: Message, *, thinking: bool = True) -> bool:
    """Equal, with arguments compared as JSON."""
    if not thinking:
        expected = expected._replace(thinking="")
    return _parsed(got) == _parsed(expected)


def _parsed(message: Message) -> tuple[Any, ...]:
    calls = [(call.id, call.name, orjson.loads(call.arguments)) for call in message.tool_calls]
    return *message._replace(tool_calls=()), calls
