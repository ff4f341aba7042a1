"""How the three chat APIs refuse bad requests."""

from contextlib import suppress
from typing import Any

import pytest

from atoll.gateway.apis.base import Api
from atoll.gateway.apis.chat import ChatApi
from atoll.gateway.apis.json_body import parse_json
from atoll.gateway.apis.messages import MessagesApi
from atoll.gateway.apis.responses import ResponsesApi
from atoll.gateway.conversation import RequestError

CHAT, RESPONSES, MESSAGES = ChatApi(), ResponsesApi(), MessagesApi()
USER = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add"}}
NO_IMAGES = "expected text: the gateway takes no images, audio or files"
STATELESS = "expected none: the gateway keeps no responses, send the whole history"

CHAT_BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "messages: got null, expected a list"),
    ({"messages": []}, "messages: got an empty list, expected a message"),
    ({"messages": ["hi"]}, "messages[0]: got 'hi', expected an object"),
    (
        {"messages": [{"content": "hi"}]},
        "messages[0].role: got null, expected system, developer, user, assistant or tool",
    ),
    (
        {"messages": [{"role": "user", "content": 3}]},
        "messages[0].content: got 3, expected a string or a list of text parts",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        f"messages[0].content[0].type: got 'image_url', {NO_IMAGES}",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text: got null, expected a string",
    ),
    (
        {"messages": [{"role": "tool", "content": ""}]},
        "messages[0].tool_call_id: got null, expected a string",
    ),
    (
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {}}}]}
            ]
        },
        "messages[0].tool_calls[0].arguments: got an object, expected a string",
    ),
    ({"messages": USER, "n": 65}, "n: got 65, expected an integer from 1 to 64"),
    ({"messages": USER, "n": True}, "n: got true, expected an integer from 1 to 64"),
    ({"messages": USER, "max_tokens": 0}, "max_tokens: got 0, expected an integer from 1"),
    ({"messages": USER, "max_tokens": 1.5}, "max_tokens: got 1.5, expected an integer from 1"),
    ({"messages": USER, "stop": ["a", ""]}, "stop[1]: got '', expected a string that is not empty"),
    ({"messages": USER, "stream": "yes"}, "stream: got 'yes', expected a boolean"),
    ({"messages": USER, "model": 3}, "model: got 3, expected a string"),
    ({"messages": USER, "tools": {}}, "tools: got an object, expected a list"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools[0].function: got null, expected an object"),
    (
        {"messages": USER, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice: got 'sub', expected one of the tools (add)",
    ),
    (
        {"messages": USER, "tool_choice": "required"},
        "tool_choice: got 'required', expected one of the tools ()",
    ),
    (
        {"messages": USER, "tool_choice": "any"},
        "tool_choice: got 'any', expected auto, none, required or "
        '{"type": "function", "function": {"name"}}',
    ),
    (
        {"messages": USER, "response_format": {"type": "xml"}},
        "response_format.type: got 'xml', expected text, json_object or json_schema",
    ),
    ({"messages": USER, "stop": "x" * 90, "model": ["x"]}, "model: got a list, expected a string"),
    (
        {"messages": [{"role": "x" * 90}]},
        f"messages[0].role: got '{'x' * 60}...', expected system, developer, user, assistant or tool",
    ),
]
RESPONSES_BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input: got an empty list, expected a message"),
    ({"input": None}, "input: got null, expected a list"),
    (
        {"input": "hi", "previous_response_id": "resp_0"},
        f"previous_response_id: got 'resp_0', {STATELESS}",
    ),
    (
        {"input": "hi", "background": True},
        f"background: got true, {STATELESS}",
    ),
    (
        {"input": [{"type": "item_reference", "id": "msg_0"}]},
        "input[0].type: got 'item_reference', expected message, function_call, function_call_output or "
        "reasoning, each in full",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        f"input[0].content[0].type: got 'input_image', {NO_IMAGES}",
    ),
    (
        {"input": [{"role": "tool", "content": ""}]},
        "input[0].role: got 'tool', expected user, assistant, system or developer",
    ),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id: got null, expected a string"),
    ({"input": "hi", "max_output_tokens": "9"}, "max_output_tokens: got '9', expected an integer from 1"),
    (
        {"input": "hi", "text": {"format": {"type": "json_schema"}}},
        "text.format.schema: got null, expected an object",
    ),
]
MESSAGES_BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].role: got 'tool', expected user, assistant or system",
    ),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: got 3, expected a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        f"messages[0].content[0].type: got 'image', {NO_IMAGES}",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id: got null, expected a string",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": "{}"}],
                }
            ]
        },
        "messages[0].content[0].input: got '{}', expected an object",
    ),
    (
        {"messages": USER, "tool_choice": {"type": "required"}},
        "tool_choice.type: got 'required', expected auto, any, tool or none",
    ),
    (
        {"messages": USER, "system": {"type": "text"}},
        "system: got an object, expected a string or a list of text parts",
    ),
    (
        {"messages": USER, "stop_sequences": [""]},
        "stop_sequences[0]: got '', expected a string that is not empty",
    ),
    (
        {"messages": USER, "tools": [{"name": "f", "input_schema": []}]},
        "tools[0].input_schema: got a list, expected an object",
    ),
]


def refusal(api: Api, body: dict[str, Any]) -> Any:
    with pytest.raises(RequestError) as raised:
        api.parse(body)
    assert raised.value.status == 400
    return api.error(raised.value)


@pytest.mark.parametrize(
    ("api", "body", "message"),
    [(CHAT, *case) for case in CHAT_BAD] + [(RESPONSES, *case) for case in RESPONSES_BAD],
)
def test_bad_requests_in_openai_form(api: Api, body: dict[str, Any], message: str) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    assert refusal(api, body) == {"error": error}


@pytest.mark.parametrize(("body", "message"), MESSAGES_BAD)
def test_bad_requests_in_anthropic_form(body: dict[str, Any], message: str) -> None:
    error = {"type": "invalid_request_error", "message": message}
    assert refusal(MESSAGES, body) == {"type": "error", "error": error}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is not JSON: .*line 1 column 1"),
        (b'{"a": ', "the body is not JSON: unexpected end of data"),
        (b'{"a": "\xff"}', "the body is not JSON: .*UTF-8"),
        (b'{"a": "\\ud800"}', "the body is not JSON: .*surrogate"),
        (b'{"a": NaN}', "the body is not JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the body is not JSON: depth limit"),
        (b"[1]", "body: got list, expected a JSON object"),
        (b"null", "body: got NoneType, expected a JSON object"),
    ],
)
def test_bad_json(content: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as raised:
        parse_json(content)
    assert (raised.value.status, raised.value.kind) == (400, "invalid_request")


def test_deep_json_is_refused_wherever_it_would_travel_on() -> None:
    deep = parse_json(b'{"a":' * 500 + b"1" + b"}" * 500)
    tool_use = {"type": "tool_use", "id": "a", "name": "f", "input": deep}
    function = {"name": "f", "parameters": deep}
    cases: list[tuple[Api, dict[str, Any], str]] = [
        (CHAT, {"messages": USER, "tools": [{"type": "function", "function": function}]}, "tools: "),
        (MESSAGES, {"messages": USER, "tools": [{"name": "f", "input_schema": deep}]}, "tools: "),
        (
            MESSAGES,
            {"messages": [{"role": "assistant", "content": [tool_use]}]},
            "messages[0].content[0].input: ",
        ),
        (
            RESPONSES,
            {"input": "hi", "text": {"format": {"type": "json_schema", "schema": deep}}},
            "text.format.schema: ",
        ),
    ]
    for api, body, message in cases:
        with pytest.raises(RequestError, match="254 levels") as raised:
            api.parse(body)
        assert str(raised.value).startswith(message)


TOP_LEVEL = """model stream max_tokens max_completion_tokens max_output_tokens n stop stop_sequences tools
tool_choice response_format text logprobs stream_options parallel_tool_calls system instructions thinking
output_config messages input prompt conversation previous_response_id background""".split()  # noqa: SIM905
JUNK = [None, True, 3, 1.5, "x", "", [], {}, [None], ["x"], [{}], {"type": "x"}, [{"type": "text"}], [[[]]]]


@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_any_field_is_taken_or_refused(junk: Any) -> None:
    """Never another exception, whatever stands where."""
    blocks = [
        {"type": "text", "text": "x"},
        {"type": "thinking", "thinking": "x"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {}},
        {"type": "tool_result", "tool_use_id": "a", "content": "x"},
        {"type": "reasoning", "content": [{"text": "x"}], "summary": []},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "x"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "x", "reasoning_content": "x", "tool_calls": []},
        {"role": "tool", "content": "x", "tool_call_id": "a"},
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
    ]
    spoiled = [{**block, key: junk} for block in blocks for key in block]
    bodies = [{"messages": USER, "input": "hi", key: junk} for key in TOP_LEVEL]
    for block in spoiled:
        nested = [[block], *([{"role": role, "content": [block]}] for role in ("user", "assistant"))]
        nested.append([{"role": "assistant", "content": "", "tool_calls": [block]}])
        bodies += [{"messages": messages, "input": messages} for messages in nested]
    for body in bodies:
        for api in (CHAT, RESPONSES, MESSAGES):
            with suppress(RequestError):
                api.parse(body)
