"""POST /v1/messages and /v1/messages/count_tokens of Anthropic."""

from collections.abc import Mapping
from typing import Any, ClassVar, Final

import orjson

from atoll.gateway.apis.base import Api, ApiRequest, Json, named_event
from atoll.gateway.apis.fields import (
    check_tool_choice,
    dump,
    flag,
    function_tool,
    items,
    joined_text,
    json_schema,
    mapping,
    messages_of,
    optional_text,
    part_text,
    positive,
    read_tools,
    refused,
    refused_part,
    stop_strings,
    text,
)
from atoll.gateway.conversation import ChatAnswer, ChatRequest, Demands, Reply, RequestError, Tool
from atoll.wire.types import Message, ToolCall

_CHOICES: Final = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
_ERRORS: Final = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "context_overflow": "invalid_request_error",
    "rate_limit": "rate_limit_error",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


class MessagesApi(Api):
    keep_alive: ClassVar[bytes] = named_event({"type": "ping"})

    def parse(self, body: Mapping[str, Any]) -> ApiRequest:
        tools = read_tools(body.get("tools"), _parse_tools)
        demands = _parse_demands(body)
        check_tool_choice(demands.tool_choice, demands.tool_name, tools)
        system = joined_text(body.get("system"), "system")
        messages = [Message("system", system)] if system else []
        for at, message in enumerate(messages_of(body)):
            role, content = mapping(message, f"messages[{at}]").get("role"), message.get("content")
            if isinstance(content, str) and role in ("user", "assistant", "system"):
                messages.append(Message(role, content))
            else:
                messages += _parse_blocks(role, content, f"messages[{at}]")
        chat = ChatRequest(
            messages=tuple(messages),
            tools=tools,
            demands=demands,
            max_tokens=positive(body, "max_tokens"),
            stop=stop_strings(body, "stop_sequences"),
        )
        thinking = mapping(body.get("thinking") or {}, "thinking")
        return ApiRequest(
            chat,
            model=optional_text(body, "model", ""),
            stream=flag(body, "stream"),
            show_thinking=thinking.get("type") not in (None, "disabled"),
        )

    def answer(self, request: ApiRequest, answer: ChatAnswer) -> Json:
        reply = answer.replies[0]
        return {
            **_head(answer),
            "content": _blocks(request, answer, reply),
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop_sequence or None,
            "usage": {**_input_usage(answer), **_output_usage(reply)},
        }

    def events(self, request: ApiRequest, answer: ChatAnswer) -> list[bytes]:
        reply = answer.replies[0]
        start = {
            **_head(answer),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_input_usage(answer), "output_tokens": 0},
        }
        events = [named_event({"type": "message_start", "message": start})]
        for index, block in enumerate(_blocks(request, answer, reply)):
            empty, deltas = _begin(block)
            events.append(
                named_event({"type": "content_block_start", "index": index, "content_block": empty})
            )
            events += [
                named_event({"type": "content_block_delta", "index": index, "delta": delta})
                for delta in deltas
            ]
            events.append(named_event({"type": "content_block_stop", "index": index}))
        delta = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence or None}
        events.append(named_event({"type": "message_delta", "delta": delta, "usage": _output_usage(reply)}))
        events.append(named_event({"type": "message_stop"}))
        return events

    def error(self, error: RequestError) -> Json:
        message = str(error)
        if error.kind == "context_overflow":  # clients know it by these words
            got, limit = error.overflow
            message = f"prompt is too long: {got} tokens > {limit} maximum"
        return {"type": "error", "error": {"type": _ERRORS[error.kind], "message": message}}

    def error_event(self, error: RequestError) -> bytes:
        return named_event(self.error(error))


class CountTokensApi(MessagesApi):
    """The same requests, answered with {"input_tokens"} instead of a turn."""


def _parse_blocks(role: Any, content: Any, field: str) -> list[Message]:
    where = f"{field}.content"
    if role == "user":
        return _parse_user(content, where)
    if role == "assistant":
        return [_parse_assistant(content, where)]
    if role == "system":
        return [Message("system", joined_text(content, where))]
    raise refused(f"{field}.role", role, "user, assistant or system")


def _parse_user(content: Any, field: str) -> list[Message]:
    """A message for each tool result, then one of the texts, if there are any."""
    results, texts = [], []
    for index, block in enumerate(items(content, field, may_be_missing=True)):
        if mapping(block, f"{field}[{index}]").get("type") == "tool_result":
            call_id = text(block.get("tool_use_id"), f"{field}[{index}].tool_use_id")
            result = joined_text(block.get("content"), f"{field}[{index}].content")
            results.append(Message("tool", result, tool_call_id=call_id))
        else:
            texts.append(part_text(block, field, index))
    return [*results, Message("user", "\n".join(texts))] if texts or not results else results


def _parse_assistant(content: Any, field: str) -> Message:
    texts, thinking, calls = [], [], []
    for index, block in enumerate(items(content, field, may_be_missing=True)):
        kind, where = mapping(block, f"{field}[{index}]").get("type"), f"{field}[{index}]"
        if kind == "text":
            texts.append(text(block.get("text"), f"{where}.text"))
        elif kind == "thinking":
            thinking.append(text(block.get("thinking"), f"{where}.thinking"))
        elif kind == "tool_use":
            call_id, name = text(block.get("id"), f"{where}.id"), text(block.get("name"), f"{where}.name")
            arguments = mapping(block.get("input"), f"{where}.input")
            calls.append(ToolCall(call_id, name, dump(arguments, f"{where}.input")))
        elif kind != "redacted_thinking":
            raise refused_part(kind, field, index)
    return Message("assistant", "\n".join(texts), tuple(calls), thinking="\n".join(thinking))


def _parse_tools(tools: Any) -> tuple[Tool, ...]:
    """Tools of Anthropic's own, which have another type, are ignored."""
    return tuple(
        function_tool(tool, f"tools[{index}]", "input_schema")
        for index, tool in enumerate(items(tools, "tools", may_be_missing=True))
        if mapping(tool, f"tools[{index}]").get("type") in (None, "custom")
    )


def _parse_demands(body: Mapping[str, Any]) -> Demands:
    choice = mapping(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    kind = choice.get("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise refused("tool_choice.type", kind, "auto, any, tool or none")
    form = mapping(mapping(body.get("output_config") or {}, "output_config").get("format") or {}, "format")
    return Demands(
        _CHOICES[kind],  # type: ignore[arg-type]
        tool_name=text(choice.get("name"), "tool_choice.name") if kind == "tool" else "",
        single_call=flag(choice, "disable_parallel_tool_use"),
        json_schema=json_schema(form, "schema", "output_config.format") if form else None,
    )


def _head(answer: ChatAnswer) -> Json:
    return {"id": f"msg_{answer.name}", "type": "message", "role": "assistant", "model": answer.model}


def _blocks(request: ApiRequest, answer: ChatAnswer, reply: Reply) -> list[Json]:
    message = reply.message
    blocks: list[Json] = []
    if message.thinking and request.show_thinking:
        blocks.append({"type": "thinking", "thinking": message.thinking, "signature": answer.name})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for id_, name, arguments in message.tool_calls:
        blocks.append({"type": "tool_use", "id": id_, "name": name, "input": _input(arguments)})
    return blocks


def _input(arguments: str) -> orjson.Fragment:
    """Arguments go out as the policy wrote them, long integers too; what is no object, inside of one."""
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        is_object = False
    return orjson.Fragment(arguments if is_object else orjson.dumps({"arguments": arguments}))


def _begin(block: Json) -> tuple[Json, list[Json]]:
    """A block as it starts, and the deltas that fill it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    arguments = orjson.dumps(block["input"]).decode()
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _stop_reason(reply: Reply) -> str:
    if reply.end == "tool_calls":
        return "tool_use"
    if reply.end == "length":
        return "max_tokens"
    return "stop_sequence" if reply.stop_sequence else "end_turn"


def _input_usage(answer: ChatAnswer) -> Json:
    """Anthropic counts cached tokens apart."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
    }


def _output_usage(reply: Reply) -> Json:
    details = {"thinking_tokens": reply.num_thinking_tokens}
    return {"output_tokens": reply.num_tokens, "output_tokens_details": details}
