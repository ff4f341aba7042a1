"""Answers and streams of the three chat APIs, by their clients' own types and by the clients themselves."""

import inspect
from typing import Any

import anthropic
import anthropic.types
import openai
import openai.types.chat
import openai.types.responses
import orjson
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent

from atoll.gateway.apis.base import Api
from atoll.gateway.apis.chat import ChatApi
from atoll.gateway.apis.messages import MessagesApi
from atoll.gateway.apis.models import describe_model, list_models
from atoll.gateway.apis.responses import ResponsesApi
from atoll.gateway.conversation import Reply, RequestError, TokenLogprob
from atoll.wire.types import Message
from tests.gateway.chat_clients import (
    CREATED,
    Served,
    check_type,
    make_answer,
    make_reply,
    same_message,
    sse_datas,
)

USER = [{"role": "user", "content": "12+34?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
RESPONSE_TOOLS: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}]
MESSAGE_TOOLS: Any = [{"name": "add", "input_schema": PARAMETERS}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
ASK_CHAT: Any = {"model": "policy", "messages": USER, "tools": CHAT_TOOLS}
ASK_RESPONSE: Any = {"model": "policy", "input": "12+34?", "tools": RESPONSE_TOOLS}
ASK_MESSAGE: Any = {
    "model": "policy",
    "messages": USER,
    "max_tokens": 9,
    "tools": MESSAGE_TOOLS,
    "thinking": THINKING,
}
REASONING = frozenset({"reasoning_content"})  # the one field that OpenAI's types do not know

REPLIES = {
    "text": make_reply(content='It is "46".\n\ndata: é'),
    "empty": make_reply(),
    "cut": make_reply(content="It", end="length"),
    "thought": make_reply(content="46", thinking="Add.\n"),
    "one call": make_reply(1),
    "two calls": make_reply(2, content="I add."),
    "three calls": make_reply(3, content="I add.", thinking="Thrice."),
}
every_reply = pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
ENDS = {  # in the three APIs
    "stop": ("stop", "end_turn", "completed"),
    "length": ("length", "max_tokens", "incomplete"),
    "tool_calls": ("tool_calls", "tool_use", "completed"),
}


def written(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value))


# Types ----------------------------------------------------------------------------------------------------


@every_reply
def test_chat_keeps_to_openai_types(reply: Reply) -> None:
    api = ChatApi()
    request = api.parse({**ASK_CHAT, "stream_options": {"include_usage": True}})
    whole = written(api.answer(request, make_answer(reply)))
    completion = check_type(openai.types.chat.ChatCompletion, whole, allowed=REASONING)
    assert completion.choices[0].finish_reason == ENDS[reply.end][0]
    usage = completion.usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (100, 64)
    assert usage.completion_tokens == reply.num_tokens
    assert usage.completion_tokens_details.reasoning_tokens == reply.num_thinking_tokens
    events = api.events(request, make_answer(reply))
    assert events[-1] == b"data: [DONE]\n\n"
    for data in sse_datas(events):
        check_type(openai.types.chat.ChatCompletionChunk, data, allowed=REASONING)


@every_reply
def test_responses_keep_to_openai_types(reply: Reply) -> None:
    api = ResponsesApi()
    request = api.parse(ASK_RESPONSE)
    response = check_type(openai.types.responses.Response, written(api.answer(request, make_answer(reply))))
    assert response.status == ENDS[reply.end][2]
    assert response.usage.input_tokens_details.cached_tokens == 64
    datas = list(sse_datas(api.events(request, make_answer(reply))))
    for data in datas:
        check_type(ResponseStreamEvent, data)
    assert [data["sequence_number"] for data in datas] == list(range(len(datas)))
    assert datas[-1]["type"] == f"response.{response.status}"
    items = [data["output_index"] for data in datas if data["type"] == "response.output_item.added"]
    assert items == list(range(len(response.output)))


@every_reply
def test_messages_keep_to_anthropic_types(reply: Reply) -> None:
    api = MessagesApi()
    request = api.parse(ASK_MESSAGE)
    message = check_type(anthropic.types.Message, written(api.answer(request, make_answer(reply))))
    assert message.stop_reason == ENDS[reply.end][1]
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (36, 64)
    datas = list(sse_datas(api.events(request, make_answer(reply))))
    for data in datas:
        check_type(RawMessageStreamEvent, data)
    starts = [data["index"] for data in datas if data["type"] == "content_block_start"]
    assert starts == list(range(len(message.content)))


def test_stop_sequence_is_named() -> None:
    reply = Reply(Message("assistant", "It is"), "stop", 3, stop_sequence="46")
    api = MessagesApi()
    whole = api.answer(api.parse(ASK_MESSAGE), make_answer(reply))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "46")


@pytest.mark.parametrize("text", ['{"a": 123456789012345678901234567890}', "{}", "[1]", "{"])
def test_tool_input_is_what_the_policy_wrote_or_an_object_around_it(text: str) -> None:
    reply = make_reply(1)
    call = reply.message.tool_calls[0]._replace(arguments=text)
    reply = Reply(Message("assistant", "", (call,)), "tool_calls", 3)
    api = MessagesApi()
    content = orjson.dumps(api.answer(api.parse(ASK_MESSAGE), make_answer(reply)))
    expected = text.encode() if text.startswith("{") and text != "{" else orjson.dumps({"arguments": text})
    assert b'"input":' + expected in content


def test_models_are_listed_in_both_forms() -> None:
    check_type(openai.types.Model, describe_model("policy", CREATED, anthropic=False))
    listed = list_models("policy", CREATED, anthropic=True)
    model = check_type(anthropic.types.ModelInfo, listed["data"][0])
    assert model.created_at.timestamp() == CREATED
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "policy", "policy")


# Clients, and their echoes --------------------------------------------------------------------------------


def echoes(api: Api, history: dict[str, Any], reply: Reply, *, thinking: bool = True) -> bool:
    """The client's own objects, sent back, are the reply."""
    *_, message = api.parse(written(history)).chat.messages
    return same_message(message, reply.message, thinking=thinking)


async def final_completion(stream: Any) -> Any:
    """Of a sync or an async stream. The helper raises at a reply that was cut, and has it in the error."""
    try:
        final = stream.get_final_completion()
        return await final if inspect.isawaitable(final) else final
    except openai.LengthFinishReasonError as error:
        return error.completion


@every_reply
async def test_openai_client_reads_chat(reply: Reply) -> None:
    api = ChatApi()
    client = Served(api, make_answer(reply)).openai_client()
    whole = client.chat.completions.create(**ASK_CHAT).choices[0].message
    with client.chat.completions.stream(**ASK_CHAT, stream_options={"include_usage": True}) as stream:
        streamed = await final_completion(stream)
    assert streamed.usage is not None
    assert streamed.choices[0].finish_reason == reply.end
    assert echoes(api, {"messages": [*USER, whole.model_dump(exclude_none=True)]}, reply)
    assert echoes(api, {"messages": [*USER, whole.model_dump()]}, reply)
    echo = streamed.choices[0].message.model_dump(exclude_none=True)
    assert echoes(api, {"messages": [*USER, echo]}, reply)


@every_reply
async def test_async_openai_client_reads_chat(reply: Reply) -> None:
    client = Served(ChatApi(), make_answer(reply)).async_openai_client()
    whole = (await client.chat.completions.create(**ASK_CHAT)).choices[0].message
    assert echoes(ChatApi(), {"messages": [*USER, whole.model_dump(exclude_none=True)]}, reply)
    async with client.chat.completions.stream(**ASK_CHAT) as stream:
        streamed = (await final_completion(stream)).choices[0].message
    assert echoes(ChatApi(), {"messages": [*USER, streamed.model_dump(exclude_none=True)]}, reply)


@every_reply
def test_openai_client_reads_responses(reply: Reply) -> None:
    api = ResponsesApi()
    client = Served(api, make_answer(reply)).openai_client()
    user = {"role": "user", "content": "12+34?"}
    whole = client.responses.create(**ASK_RESPONSE)
    assert whole.output_text == reply.message.content
    assert echoes(api, {"input": [user, *(item.model_dump() for item in whole.output)]}, reply)
    with client.responses.stream(**ASK_RESPONSE) as stream:
        events = list(stream)
    output = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in output] == [item.to_dict() for item in whole.output]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    sent_back = [item.model_dump(exclude_none=True) for item in last.response.output]
    assert echoes(api, {"input": [user, *sent_back]}, reply)


@every_reply
async def test_async_openai_client_reads_responses(reply: Reply) -> None:
    client = Served(ResponsesApi(), make_answer(reply)).async_openai_client()
    whole = await client.responses.create(**ASK_RESPONSE)
    async with client.responses.stream(**ASK_RESPONSE) as stream:
        events = [event async for event in stream]
    done = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
    assert done == [item.to_dict() for item in whole.output]


@every_reply
def test_anthropic_client_reads_messages(reply: Reply) -> None:
    api = MessagesApi()
    client = Served(api, make_answer(reply)).anthropic_client()
    whole = client.messages.create(**ASK_MESSAGE)
    with client.messages.stream(**ASK_MESSAGE) as stream:
        streamed = stream.get_final_message()
    assert (streamed.id, streamed.stop_reason) == (whole.id, whole.stop_reason)
    assert streamed.usage == whole.usage
    for message in (whole, streamed):
        echo = {"role": "assistant", "content": [block.model_dump() for block in message.content]}
        assert echoes(api, {"messages": [*USER, echo]}, reply)


@every_reply
async def test_async_anthropic_client_reads_messages(reply: Reply) -> None:
    client = Served(MessagesApi(), make_answer(reply)).async_anthropic_client()
    asked = {**ASK_MESSAGE, "thinking": {"type": "disabled"}}
    whole = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        echo = {"role": "assistant", "content": [block.to_dict() for block in message.content]}
        assert echoes(MessagesApi(), {"messages": [*USER, echo]}, reply, thinking=False)


def test_several_replies_come_by_index() -> None:
    replies = [make_reply(index, name=f"0_3_{index}", content="x") for index in range(4)]
    client = Served(ChatApi(), make_answer(*replies)).openai_client()
    whole = client.chat.completions.create(**ASK_CHAT, n=4)
    with client.chat.completions.stream(**ASK_CHAT, n=4) as stream:
        streamed = stream.get_final_completion()
    for completion in (whole, streamed):
        for reply, choice in zip(replies, completion.choices, strict=True):
            echo = choice.message.model_dump(exclude_none=True)
            assert echoes(ChatApi(), {"messages": [*USER, echo]}, reply)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(reply.num_tokens for reply in replies)


def test_logprobs_come_whole_and_streamed() -> None:
    tokens = [TokenLogprob("�", b"\xc3", -0.5), TokenLogprob("a", b"a", -1.0)]
    reply = Reply(Message("assistant", "a"), "stop", 2, logprobs=tokens)
    client = Served(ChatApi(), make_answer(reply)).openai_client()
    whole = client.chat.completions.create(**ASK_CHAT, logprobs=True)
    with client.chat.completions.stream(**ASK_CHAT, logprobs=True) as stream:
        streamed = stream.get_final_completion()
    for completion in (whole, streamed):
        logprobs = completion.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        got = [(token.token, bytes(token.bytes or ()), token.logprob) for token in logprobs.content]
        assert got == [("�", b"\xc3", -0.5), ("a", b"a", -1.0)]


# Errors, as clients see them ------------------------------------------------------------------------------

OVERFLOW = RequestError.of_overflow(5000, 4096)


def test_openai_client_knows_an_overflow() -> None:
    chat, responses = (
        Served(ChatApi(), OVERFLOW).openai_client(),
        Served(ResponsesApi(), OVERFLOW).openai_client(),
    )
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096 tokens") as chat_error:
        chat.chat.completions.create(**ASK_CHAT)
    with pytest.raises(openai.BadRequestError, match="resulted in 5000 tokens") as response_error:
        responses.responses.create(**ASK_RESPONSE)
    for raised, param in ((chat_error, "messages"), (response_error, "input")):
        error = raised.value
        assert (error.code, error.param, error.type) == (
            "context_length_exceeded",
            param,
            "invalid_request_error",
        )


def test_anthropic_client_knows_an_overflow() -> None:
    client = Served(MessagesApi(), OVERFLOW).anthropic_client()
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**ASK_MESSAGE)
    assert raised.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: 5000 tokens > 4096 maximum",
        },
    }


KINDS = {
    "invalid_request": 400,
    "authentication": 401,
    "permission": 403,
    "not_found": 404,
    "too_large": 413,
    "rate_limit": 429,
    "unavailable": 503,
    "internal": 500,
}


@pytest.mark.parametrize(("kind", "status"), KINDS.items())
def test_clients_raise_each_kind_of_error(kind: str, status: int) -> None:
    error = RequestError(status, kind, "no such thing")
    with pytest.raises(openai.APIStatusError, match="no such thing") as chat:
        Served(ChatApi(), error).openai_client().chat.completions.create(**ASK_CHAT)
    with pytest.raises(anthropic.APIStatusError, match="no such thing") as messages:
        Served(MessagesApi(), error).anthropic_client().messages.create(**ASK_MESSAGE)
    assert (chat.value.status_code, messages.value.status_code) == (status, status)
    if kind != "too_large":  # "request_too_large" is in Anthropic's documentation, not in its types
        check_type(anthropic.types.ErrorResponse, messages.value.body)


def test_clients_raise_errors_in_mid_stream() -> None:
    error = RequestError(503, "unavailable", "the engine is gone")
    chat = Served(ChatApi(), error, late=True).openai_client()
    with (
        pytest.raises(openai.APIError, match="the engine is gone"),
        chat.chat.completions.stream(**ASK_CHAT) as s,
    ):
        s.until_done()
    responses = Served(ResponsesApi(), error, late=True).openai_client()
    with (
        pytest.raises(openai.APIError, match="the engine is gone"),
        responses.responses.stream(**ASK_RESPONSE) as r,
    ):
        r.until_done()
    messages = Served(MessagesApi(), error, late=True).anthropic_client()
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine is gone"),
        messages.messages.stream(**ASK_MESSAGE) as m,
    ):
        m.until_done()


def test_failed_response_keeps_to_openai_types() -> None:
    error, failed = sse_datas([ResponsesApi().error_event(RequestError(429, "rate_limit", "wait"))])
    check_type(ResponseStreamEvent, error, allowed=frozenset({"error"}))
    check_type(ResponseStreamEvent, failed)
