"""Messages and tools of a dataset row, in OpenAI's format.

{"role": "user", "content": "12+34="}
{"role": "assistant", "content": "", "tool_calls": [
    {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": 34}}}]}
{"role": "tool", "tool_call_id": "call_0", "content": "46"}
"""

from typing import Any

from atoll.coordinator.data.dataset_files import excerpt
from atoll.coordinator.data.row_fields import (
    FieldError,
    Fields,
    as_text,
    is_empty,
    json_field,
    optional_field,
    refuse,
    text_field,
    typed_field,
)
from atoll.wire.types import Message, ToolCall

_REASONING = "expected role and content: put it into the content as text"
_CALL = '{"type": "function", "function": {"name": NAME, "arguments": OBJECT}}'
_SCHEMA = '{"type": "function", "function": {"name": NAME, "parameters": SCHEMA}}'


def read_prompt(record: Fields) -> list[Message]:
    """`prompt`: text of the user, or messages."""
    if isinstance(record.get("prompt"), str):
        return [Message("user", text_field(record, "prompt"))]
    return read_messages(record, "prompt")


def read_messages(record: Fields, name: str) -> list[Message]:
    messages = typed_field(record, name, list)
    if not messages:
        raise FieldError(f"field {name}: got an empty list, expected messages with role and content")
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def read_schemas(record: Fields) -> list[dict[str, Any]]:
    """`tools` as a list of schemas; [] if there are none."""
    tools = read_tools(record.get("tools"), "tools")
    for i, tool in enumerate(tools):
        if isinstance(tool, str):
            raise FieldError(f"field tools[{i}]: got {excerpt(tool)}, expected {_SCHEMA}")
    return tools


def read_tools(value: object, place: str) -> list[Any]:
    """Schemas of functions, or names of tools."""
    tools: list[Any] = [] if is_empty(value) else json_field(value, list, place)
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else tool
        if not isinstance(name, str) or not name:
            raise FieldError(f"field {place}[{i}]: got {excerpt(tool)}, expected {_SCHEMA} or a name")
    return tools


def _message(message: object, place: str) -> Message:
    if not isinstance(message, dict):
        raise FieldError(f"field {place}: got {excerpt(message)}, expected an object with role and content")
    refuse(message, "reasoning_content", _REASONING, f"{place}.")
    role = text_field(message, "role", f"{place}.")
    calls = optional_field(message, "tool_calls", list, f"{place}.")
    if calls and role != "assistant":
        raise FieldError(f"field {place}.tool_calls: got role {role!r}, expected them of the assistant only")
    return Message(
        role,
        _content(message, f"{place}.", may_be_empty=bool(calls) or role == "tool"),
        tuple(_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)),
        optional_field(message, "tool_call_id", str, f"{place}."),
    )


def _content(message: Fields, parent: str, *, may_be_empty: bool) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{parent}content[{i}]") for i, part in enumerate(content))
    if may_be_empty and is_empty(content):
        return ""
    return text_field({"content": content}, "content", parent)


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        raise FieldError(f'field {place}: got {excerpt(part)}, expected {{"type": "text", "text": TEXT}}')
    return text_field(part, "text", f"{place}.")


def _call(call: object, place: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise FieldError(f"field {place}: got {excerpt(call)}, expected {_CALL}")
    name = text_field(function, "name", f"{place}.function.")
    arguments = function.get("arguments")
    tree = json_field({} if arguments is None else arguments, dict, f"{place}.function.arguments")
    text = arguments if isinstance(arguments, str) else as_text(tree)
    return ToolCall(optional_field(call, "id", str, f"{place}."), name, text)
