"""Validates request fields by hand, for speed: a history may have thousands of messages."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import orjson

from atoll.gateway.conversation import ChatRequest, RequestError, Tool
from atoll.wire.types import ToolCall

MAX_MESSAGES: Final = 20_000  # and tool calls in them
MAX_TOOLS: Final = 2_000
MAX_TOOLS_LENGTH: Final = 1 << 20  # as JSON
MAX_STOPS: Final = 64
MAX_STOP_LENGTH: Final = 1_000
_SHOWN: Final = 60  # characters of a refused value that its error shows
_NAMES: Final = {dict: "an object", list: "a list", type(None): "null"}
_TEXT_PARTS: Final = ("text", "input_text", "output_text")


def refused(field: str, value: Any, expected: str) -> RequestError:
    """Says which field, what it got and what it expected."""
    if isinstance(value, str):
        got = repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    elif isinstance(value, bool | int | float):
        got = orjson.dumps(value).decode()
    else:
        got = _NAMES[type(value)]
    return RequestError(400, "invalid_request", f"{field}: got {got}, expected {expected}")


def check_size(chat: ChatRequest) -> None:
    """Raises RequestError for so many messages, calls, tools or stop strings that each step from here to the
    tokens would take long."""
    for field, number, most in (
        ("messages", sum(1 + len(message.tool_calls) for message in chat.messages), MAX_MESSAGES),
        ("tools", len(chat.tools), MAX_TOOLS),
        ("stop strings", len(chat.stop), MAX_STOPS),
        ("characters of a stop string", max(map(len, chat.stop), default=0), MAX_STOP_LENGTH),
    ):
        if number > most:
            raise RequestError(400, "invalid_request", f"got {number:,} {field}, expected at most {most:,}")


def text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise refused(field, value, "a string")
    return value


def optional_text(values: Mapping[str, Any], key: str, field: str) -> str:
    """Missing and null are ""."""
    value = values.get(key)
    return "" if value is None else text(value, f"{field}{key}")


def mapping(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refused(field, value, "an object")
    return value


def flag(body: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise refused(key, value, "a boolean")
    return value


def positive(body: Mapping[str, Any], key: str, most: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise refused(key, value, f"an integer from 1{'' if most is None else f' to {most}'}")
    return value


def items(value: Any, field: str, *, may_be_missing: bool = False) -> list[Any]:
    if value is None and may_be_missing:
        return []
    if not isinstance(value, list):
        raise refused(field, value, "a list")
    if len(value) > MAX_MESSAGES:
        raise refused(field, value, f"one of at most {MAX_MESSAGES:,}")
    return value


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    messages = items(body.get("messages"), "messages")
    if not messages:
        raise RequestError(400, "invalid_request", "messages: got an empty list, expected a message")
    return messages


def stop_strings(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A string or a list of them; missing and null are none."""
    value = body.get(key)
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else items(value, key)
    for index, string in enumerate(strings):
        if not isinstance(string, str) or not string:
            raise refused(f"{key}[{index}]", string, "a string that is not empty")
    return tuple(strings)


def joined_text(content: Any, field: str) -> str:
    """Content as text: a string, or parts of text, joined by newlines. Null is ""."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise refused(field, content, "a string or a list of text parts")
    return "\n".join([part_text(part, field, index) for index, part in enumerate(content)])


def part_text(part: Any, field: str, index: int) -> str:
    kind = mapping(part, f"{field}[{index}]").get("type")
    if kind not in _TEXT_PARTS:
        raise refused_part(kind, field, index)
    return text(part.get("text"), f"{field}[{index}].text")


def refused_part(kind: Any, field: str, index: int) -> RequestError:
    return refused(f"{field}[{index}].type", kind, "text: the gateway takes no images, audio or files")


def dump(value: Any, field: str) -> str:
    """Compact JSON. Raises RequestError for more than 254 levels."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as error:
        raise RequestError(400, "invalid_request", f"{field}: {error}, expected at most 254 levels") from None


def tool_call(call: Mapping[str, Any], id_key: str, function: Mapping[str, Any], field: str) -> ToolCall:
    return ToolCall(
        text(call.get(id_key), f"{field}.{id_key}"),
        text(function.get("name"), f"{field}.name"),
        optional_text(function, "arguments", f"{field}."),
    )


def function_tool(function: Any, field: str, parameters_key: str) -> Tool:
    """With only the keys that the client gave."""
    given = mapping(function, field)
    tool: dict[str, Any] = {"name": text(given.get("name"), f"{field}.name")}
    if given.get("description") is not None:
        tool["description"] = text(given["description"], f"{field}.description")
    if given.get(parameters_key) is not None:
        tool["parameters"] = mapping(given[parameters_key], f"{field}.{parameters_key}")
    return {"type": "function", "function": tool}


def read_tools(tools: Any, read: Callable[[Any], tuple[Tool, ...]]) -> tuple[Tool, ...]:
    """`read(tools)`, once for all requests with these tools: agents send the same ones with every turn."""
    content = dump(tools, "tools")
    if len(content) > MAX_TOOLS_LENGTH:
        raise RequestError(400, "invalid_request", f"tools: expected at most {MAX_TOOLS_LENGTH:,} characters")
    return _read_once(read, content)


@lru_cache(16)
def _read_once(read: Callable[[Any], tuple[Tool, ...]], content: str) -> tuple[Tool, ...]:
    return read(orjson.loads(content))


def check_tool_choice(choice: str, tool_name: str, tools: Sequence[Tool]) -> None:
    """The tool that must be called is among the tools."""
    if choice != "required":
        return
    names = [tool["function"]["name"] for tool in tools]
    if not names or (tool_name and tool_name not in names):
        raise refused("tool_choice", tool_name or choice, f"one of the tools ({', '.join(names)})")


def json_schema(value: Mapping[str, Any], key: str, field: str) -> str:
    return dump(mapping(value.get(key), f"{field}.{key}"), f"{field}.{key}")
