"""Parses tool calls in a reply's text, in the models' own formats. Pure."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]
from typing import Any

from atoll.gateway.conversation import Tool


@dataclass(slots=True)
class CallsFound:
    """A reply's text, taken apart. What is malformed stays in `content`, as the policy wrote it."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, and arguments as JSON text
    num_malformed: int = 0


def no_calls(text: str, tools: Sequence[Tool] = ()) -> CallsFound:
    return CallsFound(text.strip())


def hermes_calls(text: str, tools: Sequence[Tool] = ()) -> CallsFound:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
    return _tagged(text, lambda body: _json_call(body, ("arguments",)))


def xml_calls(text: str, tools: Sequence[Tool] = ()) -> CallsFound:
    """`<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>`

    Values are text: a parameter's schema says if it stands for anything else than a string; without one,
    what is JSON is taken as such.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}

    def read(body: str) -> tuple[str, str] | None:
        function = _XML_FUNCTION.fullmatch(body)
        if function is None:
            return None
        name, parameters = function.groups()
        if _XML_PARAMETER.sub("", parameters).strip():
            return None
        schema = schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        arguments = {
            key: _typed(value, properties.get(key) if isinstance(properties, Mapping) else None)
            for key, value in _XML_PARAMETER.findall(parameters)
        }
        return name, json.dumps(arguments, ensure_ascii=False)

    return _tagged(text, read)


def llama_calls(text: str, tools: Sequence[Tool] = ()) -> CallsFound:
    """`{"name": ..., "parameters": {...}}`, several separated by `;`, with or without `<|python_tag|>`

    A reply is calls from its beginning, or from the tag on. JSON that does not begin with a name is content.
    """
    before, tag, body = text.partition("<|python_tag|>")
    if not tag:
        before, body = "", text
    if not tag and not _LLAMA_START.match(body):
        return CallsFound(text.strip())
    found = CallsFound(before.strip())
    at = 0
    while True:
        start = _blank(body, at)
        try:
            value, end = _JSON.raw_decode(body, start)
        except (ValueError, RecursionError):
            break
        call = _json_call(body[start:end], _LLAMA_KEYS)
        if call is None:
            if not (tag or found.calls or value.keys() & _LLAMA_KEYS):
                return CallsFound(text.strip())  # JSON about something that has a name
            break
        found.calls.append(call)
        at = _blank(body, end)
        if at == len(body):
            return found
        if body[at] != ";":
            break
        at += 1
        if not body[at:].strip():
            return found
    rest = body[at:].strip() if found.calls else (tag + body).strip()
    found.num_malformed += not found.calls or rest.startswith(("{", ";"))
    found.content = "\n".join(part for part in (found.content, rest) if part)
    return found


TOOL_FORMATS: Mapping[str, Callable[[str, Sequence[Tool]], CallsFound]] = {
    "hermes": hermes_calls,
    "qwen_xml": xml_calls,
    "llama": llama_calls,
    "none": no_calls,
}

_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_XML_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_LLAMA_KEYS = ("parameters", "arguments")
_LLAMA_START = re.compile(r'\s*\{\s*"name"')


def _tagged(text: str, read: Callable[[str], tuple[str, str] | None]) -> CallsFound:
    found = CallsFound()
    kept = []  # of the text, what is no call
    end = 0
    for block in _TAGGED.finditer(text):
        kept.append(text[end : block.start()])
        end = block.end()
        call = read(block.group(1))
        if call is None:
            found.num_malformed += 1
            kept.append(block.group())
        else:
            found.calls.append(call)
    rest = text[end:]
    found.num_malformed += "<tool_call>" in rest  # unclosed
    found.content = "".join([*kept, rest]).strip()
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_call(text: str, keys: Sequence[str]) -> tuple[str, str] | None:
    """Name and arguments, the latter unparsed; None if `text` is not exactly one call."""
    try:
        members = {key: (raw, value) for key, raw, value in _members(text)}
        name = members["name"][1]
        raw, arguments = next(members[key] for key in keys if key in members)
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        name.encode()  # refuses half a surrogate pair, which JSON can spell
    except (ValueError, KeyError, StopIteration, RecursionError):
        return None
    return name, raw


def _members(text: str) -> Iterator[tuple[str, str, Any]]:
    """Key, text and value of each member of the JSON object that `text` is. Raises ValueError otherwise."""
    at = _blank(text, 0)
    separator = "{"
    while text[at : at + 1] == separator:
        at = _blank(text, at + 1)
        if text[at : at + 1] != '"':
            raise ValueError("no key")
        key, at = scanstring(text, at + 1)
        at = _blank(text, at)
        if text[at : at + 1] != ":":
            raise ValueError("no value")
        start = _blank(text, at + 1)
        value, at = _JSON.raw_decode(text, start)
        yield key, text[start:at], value
        at = _blank(text, at)
        separator = ","
    if text[at : at + 1] != "}" or text[at + 1 :].strip():
        raise ValueError("no object")


def _blank(text: str, at: int) -> int:
    """Where the whitespace at `at` ends."""
    return int(WHITESPACE.match(text, at).end())


def _typed(value: str, schema: object) -> object:
    type_ = schema.get("type") if isinstance(schema, Mapping) else None
    if type_ == "string":
        return value
    try:
        return _JSON.decode(value)
    except (ValueError, RecursionError):
        return value
