"""POST /v1/responses of OpenAI, without state: the input holds the whole history."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from atoll.gateway.apis.base import Api, ApiRequest, Json, named_event, openai_error
from atoll.gateway.apis.fields import (
    check_tool_choice,
    flag,
    function_tool,
    items,
    joined_text,
    json_schema,
    mapping,
    optional_text,
    positive,
    read_tools,
    refused,
    text,
    tool_call,
)
from atoll.gateway.conversation import ChatAnswer, ChatRequest, Demands, Reply, RequestError, Tool
from atoll.wire.types import Message, ToolCall

_STATEFUL: Final = ("previous_response_id", "conversation", "prompt", "background")
_FAILED: Final = {"rate_limit": "rate_limit_exceeded", "context_overflow": "context_length_exceeded"}


class ResponsesApi(Api):
    def parse(self, body: Mapping[str, Any]) -> ApiRequest:
        for key in _STATEFUL:
            if body.get(key):
                raise refused(key, body[key], "none: the gateway keeps no responses, send the whole history")
        tools = read_tools(body.get("tools"), _parse_tools)
        choice, tool_name = _parse_tool_choice(body.get("tool_choice"))
        check_tool_choice(choice, tool_name, tools)
        demands = Demands(
            choice,
            tool_name,
            single_call=not flag(body, "parallel_tool_calls", default=True),
            json_schema=_parse_format(body.get("text")),
        )
        instructions = optional_text(body, "instructions", "")
        system = [Message("system", instructions)] if instructions else []
        chat = ChatRequest(
            messages=(*system, *_parse_input(body.get("input"))),
            tools=tools,
            demands=demands,
            max_tokens=positive(body, "max_output_tokens"),
        )
        return ApiRequest(chat, model=optional_text(body, "model", ""), stream=flag(body, "stream"))

    def answer(self, request: ApiRequest, answer: ChatAnswer) -> Json:
        reply = answer.replies[0]
        is_cut = reply.end == "length"
        return {
            **_head(request, answer),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _output(answer, reply),
            "usage": _usage(answer, reply),
        }

    def events(self, request: ApiRequest, answer: ChatAnswer) -> list[bytes]:
        whole = self.answer(request, answer)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        datas: list[Json] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(whole["output"]):
            datas += _item_events(index, item)
        datas.append({"type": f"response.{whole['status']}", "response": whole})
        for number, data in enumerate(datas):
            data["sequence_number"] = number
        return [named_event(data) for data in datas]

    def error(self, error: RequestError) -> Json:
        return openai_error(error, "input")

    def error_event(self, error: RequestError) -> bytes:
        """Twice: OpenAI's own clients raise at the first form, Codex looks for the second."""
        said = self.error(error)["error"]
        flat = {"code": said["code"], "message": said["message"], "param": said["param"]}
        first = {"type": "error", **flat, "sequence_number": 0, "error": said}
        failed = {
            **_response("resp_failed", 0, ""),
            "status": "failed",
            "error": {"code": _FAILED.get(error.kind, "server_error"), "message": said["message"]},
            "output": [],
        }
        last = {"type": "response.failed", "response": failed, "sequence_number": 1}
        return named_event(first) + named_event(last)


@dataclass(slots=True)
class _TurnItems:
    """Items that one turn produced: reasoning, then a message, then calls."""

    thinking: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def takes(self, kind: str) -> bool:
        """False: an item of this kind begins the next turn."""
        return kind == "function_call" or not (self.texts or self.calls)

    def add(self, kind: str, item: Mapping[str, Any], where: str) -> None:
        if kind == "function_call":
            self.calls.append(tool_call(item, "call_id", item, where))
        elif kind == "message":
            self.texts.append(joined_text(item.get("content"), f"{where}.content"))
        else:
            key = "content" if item.get("content") else "summary"
            for index, part in enumerate(items(item.get(key), f"{where}.{key}", may_be_missing=True)):
                place = f"{where}.{key}[{index}]"
                self.thinking.append(text(mapping(part, place).get("text"), f"{place}.text"))

    def message(self) -> Message:
        texts, thinking = "\n".join(self.texts), "\n".join(self.thinking)
        return Message("assistant", texts, tuple(self.calls), thinking=thinking)


def _parse_input(given: Any) -> list[Message]:
    if isinstance(given, str):
        return [Message("user", given)]
    messages: list[Message] = []
    turn: _TurnItems | None = None
    for index, item in enumerate(items(given, "input")):
        where = f"input[{index}]"
        kind = mapping(item, where).get("type") or "message"
        is_message = kind == "message" and item.get("role") == "assistant"
        is_produced = is_message or kind in ("reasoning", "function_call")
        if turn and not (is_produced and turn.takes(kind)):
            messages.append(turn.message())
            turn = None
        if kind == "function_call" and turn is None and (place := _turn_of_call(messages, item)) is not None:
            calls = messages[place].tool_calls
            messages[place] = messages[place]._replace(
                tool_calls=(*calls, tool_call(item, "call_id", item, where))
            )
        elif is_produced:
            turn = turn or _TurnItems()
            turn.add(kind, item, where)
        else:
            messages.append(_parse_item(kind, item, where))
    if turn:
        messages.append(turn.message())
    if not messages:
        raise RequestError(400, "invalid_request", "input: got an empty list, expected a message")
    return messages


def _turn_of_call(messages: Sequence[Message], item: Mapping[str, Any]) -> int | None:
    """Position of the assistant's message that a call belongs to, although outputs of other calls came in
    between; None: there is none. Ids tell: "call_NAME_BRANCH_NUMBER", of one turn and branch."""
    prefix = str(item.get("call_id")).rpartition("_")[0]
    position = len(messages) - 1
    while position >= 0 and messages[position].role == "tool":
        position -= 1
    calls = messages[position].tool_calls if position >= 0 else ()
    is_ours = prefix.count("_") == 2 and calls and calls[-1].id.rpartition("_")[0] == prefix
    return position if is_ours and position < len(messages) - 1 else None


def _parse_item(kind: Any, item: Mapping[str, Any], where: str) -> Message:
    if kind == "function_call_output":
        call_id = text(item.get("call_id"), f"{where}.call_id")
        return Message("tool", joined_text(item.get("output"), f"{where}.output"), tool_call_id=call_id)
    if kind != "message":
        expected = "message, function_call, function_call_output or reasoning, each in full"
        raise refused(f"{where}.type", kind, expected)
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        raise refused(f"{where}.role", role, "user, assistant, system or developer")
    content = joined_text(item.get("content"), f"{where}.content")
    return Message("user" if role == "user" else "system", content)


def _parse_tools(tools: Any) -> tuple[Tool, ...]:
    """Tools of other types, such as web_search, are ignored."""
    return tuple(
        function_tool(tool, f"tools[{index}]", "parameters")
        for index, tool in enumerate(items(tools, "tools", may_be_missing=True))
        if mapping(tool, f"tools[{index}]").get("type") == "function"
    )


def _parse_tool_choice(choice: Any) -> tuple[Any, str]:
    if choice is None:
        return "auto", ""
    if choice in ("auto", "none", "required"):
        return choice, ""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return "required", text(choice.get("name"), "tool_choice.name")
    raise refused("tool_choice", choice, 'auto, none, required or {"type": "function", "name"}')


def _parse_format(value: Any) -> str | None:
    """`Demands.json_schema`"""
    form = mapping(mapping(value or {}, "text").get("format") or {"type": "text"}, "text.format")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return ""
    if kind == "json_schema":
        return json_schema(form, "schema", "text.format")
    raise refused("text.format.type", kind, "text, json_object or json_schema")


def _head(request: ApiRequest, answer: ChatAnswer) -> Json:
    demands = request.chat.demands
    choice: Any = demands.tool_choice
    if demands.tool_name:
        choice = {"type": "function", "name": demands.tool_name}
    return {
        **_response(f"resp_{answer.name}", answer.created, answer.model),
        "tool_choice": choice,
        "parallel_tool_calls": not demands.single_call,
        "max_output_tokens": request.chat.max_tokens,
    }


def _response(id_: str, created: int, model: str) -> Json:
    """Tools and instructions, tens of kilobytes, are not sent back."""
    return {
        "id": id_,
        "object": "response",
        "created_at": created,
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "tool_choice": "auto",
        "tools": [],
        "parallel_tool_calls": True,
    }


def _output(answer: ChatAnswer, reply: Reply) -> list[Json]:
    """Reasoning, a message (also an empty one, if nothing else came), then calls."""
    message, output = reply.message, list[Json]()
    if message.thinking:
        content = [{"type": "reasoning_text", "text": message.thinking}]
        id_ = f"rs_{answer.name}_0"
        output.append({"id": id_, "type": "reasoning", "summary": [], "content": content})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        output.append(
            {
                "id": f"msg_{answer.name}_{len(output)}",
                "type": "message",
                "role": "assistant",
                "status": "incomplete" if reply.end == "length" else "completed",
                "content": [part],
            }
        )
    for id_, name, arguments in message.tool_calls:
        output.append(
            {
                "id": f"fc_{answer.name}_{len(output)}",
                "type": "function_call",
                "status": "completed",
                "call_id": id_,
                "name": name,
                "arguments": arguments,
            }
        )
    return output


def _item_events(index: int, item: Json) -> list[Json]:
    where = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        begun, what = {**item, "status": "in_progress", "arguments": ""}, "response.function_call_arguments"
        arguments = item["arguments"]
        inner = [
            {"type": f"{what}.delta", **where, "delta": arguments},
            {"type": f"{what}.done", **where, "arguments": arguments},
        ]
    else:
        part, where = item["content"][0], {**where, "content_index": 0}
        begun, what = {**item, "content": []}, "response.reasoning_text"
        more: Json = {}
        if item["type"] == "message":
            begun, what, more = {**begun, "status": "in_progress"}, "response.output_text", {"logprobs": []}
        inner = [
            {"type": "response.content_part.added", **where, "part": {**part, "text": ""}},
            {"type": f"{what}.delta", **where, "delta": part["text"], **more},
            {"type": f"{what}.done", **where, "text": part["text"], **more},
            {"type": "response.content_part.done", **where, "part": part},
        ]
    return [
        {"type": "response.output_item.added", "output_index": index, "item": begun},
        *inner,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def _usage(answer: ChatAnswer, reply: Reply) -> Json:
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.num_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.num_thinking_tokens},
        "total_tokens": answer.prompt_tokens + reply.num_tokens,
    }
