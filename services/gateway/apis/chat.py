"""POST /v1/chat/completions. Thinking travels as `reasoning_content`, as vLLM and SGLang have it."""

from collections.abc import Mapping
from typing import Any, Final

from atoll.gateway.apis.base import Api, ApiRequest, Json, data_event, openai_error
from atoll.gateway.apis.fields import (
    check_tool_choice,
    flag,
    function_tool,
    items,
    joined_text,
    json_schema,
    mapping,
    messages_of,
    optional_text,
    positive,
    read_tools,
    refused,
    stop_strings,
    text,
    tool_call,
)
from atoll.gateway.conversation import ChatAnswer, ChatRequest, Demands, Reply, RequestError, Tool
from atoll.wire.types import Message, ToolCall

MAX_REPLIES: Final = 64  # to one request
_DONE: Final = b"data: [DONE]\n\n"


class ChatApi(Api):
    def parse(self, body: Mapping[str, Any]) -> ApiRequest:
        if body.get("functions"):
            raise RequestError(
                400, "invalid_request", "functions: got the form of old clients, expected the same as `tools`"
            )
        tools = read_tools(body.get("tools"), _parse_tools)
        choice, tool_name = _parse_tool_choice(body.get("tool_choice"))
        check_tool_choice(choice, tool_name, tools)
        demands = Demands(
            choice,
            tool_name,
            single_call=not flag(body, "parallel_tool_calls", default=True),
            json_schema=_parse_format(body.get("response_format")),
        )
        chat = ChatRequest(
            messages=tuple([_parse_message(message, at) for at, message in enumerate(messages_of(body))]),
            tools=tools,
            demands=demands,
            max_tokens=positive(body, "max_completion_tokens") or positive(body, "max_tokens"),
            stop=stop_strings(body, "stop"),
            n=positive(body, "n", MAX_REPLIES) or 1,
            logprobs=flag(body, "logprobs"),
        )
        options = mapping(body.get("stream_options") or {}, "stream_options")
        return ApiRequest(
            chat,
            model=optional_text(body, "model", ""),
            stream=flag(body, "stream"),
            include_usage=flag(options, "include_usage"),
        )

    def answer(self, request: ApiRequest, answer: ChatAnswer) -> Json:
        choices = [
            {
                "index": index,
                "message": _message(reply),
                "logprobs": _logprobs(reply) if request.chat.logprobs else None,
                "finish_reason": reply.end,
            }
            for index, reply in enumerate(answer.replies)
        ]
        return {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}

    def events(self, request: ApiRequest, answer: ChatAnswer) -> list[bytes]:
        head = _head(answer, "chat.completion.chunk")
        events = []
        for index, reply in enumerate(answer.replies):
            logprobs = _logprobs(reply) if request.chat.logprobs else None
            for delta in _deltas(reply):
                choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
                events.append(data_event({**head, "choices": [choice]}))
                logprobs = None  # of the whole reply, with its first delta
            choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": reply.end}
            events.append(data_event({**head, "choices": [choice]}))
        if request.include_usage:
            events.append(data_event({**head, "choices": [], "usage": _usage(answer)}))
        events.append(_DONE)
        return events

    def error(self, error: RequestError) -> Json:
        return openai_error(error, "messages")

    def error_event(self, error: RequestError) -> bytes:
        return data_event(self.error(error))


def _parse_message(message: Any, at: int) -> Message:
    role = mapping(message, f"messages[{at}]").get("role")
    content = message.get("content")
    if not isinstance(content, str):
        content = joined_text(content, f"messages[{at}].content")
    if role == "user" or role == "system":
        return Message(role, content)
    if role == "assistant":
        calls = message.get("tool_calls")
        thinking = message.get("reasoning_content")
        return Message(
            "assistant",
            content,
            _parse_calls(calls, f"messages[{at}].tool_calls") if calls else (),
            thinking=text(thinking, f"messages[{at}].reasoning_content") if thinking else "",
        )
    if role == "tool":
        call_id = text(message.get("tool_call_id"), f"messages[{at}].tool_call_id")
        return Message("tool", content, tool_call_id=call_id)
    if role == "developer":
        return Message("system", content)
    raise refused(f"messages[{at}].role", role, "system, developer, user, assistant or tool")


def _parse_calls(calls: Any, field: str) -> tuple[ToolCall, ...]:
    parsed = []
    for index, call in enumerate(items(calls, field)):
        where = f"{field}[{index}]"
        function = mapping(mapping(call, where).get("function"), f"{where}.function")
        parsed.append(tool_call(call, "id", function, where))
    return tuple(parsed)


def _parse_tools(tools: Any) -> tuple[Tool, ...]:
    """Tools of other types are ignored."""
    return tuple(
        function_tool(tool.get("function"), f"tools[{index}].function", "parameters")
        for index, tool in enumerate(items(tools, "tools", may_be_missing=True))
        if mapping(tool, f"tools[{index}]").get("type") == "function"
    )


def _parse_tool_choice(choice: Any) -> tuple[Any, str]:
    if choice is None:
        return "auto", ""
    if choice in ("auto", "none", "required"):
        return choice, ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = mapping(choice.get("function"), "tool_choice.function")
        return "required", text(function.get("name"), "tool_choice.function.name")
    raise refused("tool_choice", choice, 'auto, none, required or {"type": "function", "function": {"name"}}')


def _parse_format(value: Any) -> str | None:
    """`Demands.json_schema`"""
    if value is None:
        return None
    kind = mapping(value, "response_format").get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ""
    if kind == "json_schema":
        given = mapping(value.get("json_schema"), "response_format.json_schema")
        return json_schema(given, "schema", "response_format.json_schema")
    raise refused("response_format.type", kind, "text, json_object or json_schema")


def _head(answer: ChatAnswer, kind: str) -> Json:
    return {
        "id": f"chatcmpl-{answer.name}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }


def _message(reply: Reply) -> Json:
    message = reply.message
    result: Json = {"role": "assistant", "content": message.content, "refusal": None}
    if message.thinking:
        result["reasoning_content"] = message.thinking
    if message.tool_calls:
        result["content"] = message.content or None
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return result


def _deltas(reply: Reply) -> list[Json]:
    """The role first, so that there is one; of a call its id and name, then its arguments."""
    message = reply.message
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    if message.thinking:
        deltas.append({"reasoning_content": message.thinking})
    if message.content:
        deltas.append({"content": message.content})
    for index, (id_, name, arguments) in enumerate(message.tool_calls):
        begin = {
            "index": index,
            "id": id_,
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        deltas.append({"tool_calls": [begin]})
        deltas.append({"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})
    return deltas


def _logprobs(reply: Reply) -> Json:
    content = [
        {"token": token.text, "bytes": list(token.utf8), "logprob": token.logprob, "top_logprobs": []}
        for token in reply.logprobs
    ]
    return {"content": content, "refusal": None}


def _usage(answer: ChatAnswer) -> Json:
    completion_tokens = sum(reply.num_tokens for reply in answer.replies)
    thinking_tokens = sum(reply.num_thinking_tokens for reply in answer.replies)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": answer.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": thinking_tokens},
    }
