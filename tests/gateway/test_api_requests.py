"""What requests of the three chat APIs become, and how bad ones are refused."""

from typing import Any

import orjson
import pytest

from atoll.gateway.apis.base import Api
from atoll.gateway.apis.chat import ChatApi
from atoll.gateway.apis.client_rules import RULES, apply_rules
from atoll.gateway.apis.json_body import parse_json
from atoll.gateway.apis.messages import CountTokensApi, MessagesApi
from atoll.gateway.apis.responses import ResponsesApi
from atoll.gateway.conversation import ChatRequest, Demands, RequestError
from atoll.wire.types import Message, ToolCall

CHAT, RESPONSES, MESSAGES = ChatApi(), ResponsesApi(), MessagesApi()
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object"}
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
CHAT_ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
RESPONSE_ADD = {"type": "function", "name": "add", "description": None, "parameters": SCHEMA, "strict": True}
MESSAGE_ADD = {"name": "add", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}


# Histories ------------------------------------------------------------------------------------------------

CALLS = (ToolCall("call_0", "add", '{"a":1}'), ToolCall("call_1", "add", '{"a":2}'))
HISTORY = (
    Message("system", "Be brief.\nBe kind."),
    Message("user", "Add.\nTwice."),
    Message("assistant", "I add.", CALLS, thinking="Hm."),
    Message("tool", "1\nof 1", tool_call_id="call_0"),
    Message("tool", "", tool_call_id="call_1"),
    Message("user", "Thanks."),
    Message("assistant", ""),
)


def parts(*texts: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text, "cache_control": {"type": "ephemeral"}} for text in texts]


def chat_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function, "provider_specific_fields": None}


def test_chat_history() -> None:
    messages = [
        {"role": "developer", "content": parts("Be brief.", "Be kind.")},
        {"role": "user", "content": parts("Add.", "Twice."), "name": "me"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [chat_call(call) for call in CALLS],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": parts("1", "of 1")},
        {"role": "tool", "tool_call_id": "call_1", "content": None},
        {"role": "user", "content": "Thanks."},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
    ]
    assert CHAT.parse({"messages": messages}).chat.messages == HISTORY


def test_response_items() -> None:
    items = [
        {"role": "user", "content": parts("Add.", "Twice.", kind="input_text")},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": parts("I add.", kind="output_text")},
        *(
            {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments}
            for call in CALLS
        ),
        {
            "type": "function_call_output",
            "call_id": "call_0",
            "output": parts("1", "of 1", kind="input_text"),
        },
        {"type": "function_call_output", "call_id": "call_1", "output": ""},
        {"type": "message", "role": "user", "content": "Thanks."},
        {"role": "assistant", "content": ""},
    ]
    body = {"instructions": "Be brief.\nBe kind.", "input": items}
    assert RESPONSES.parse(body).chat.messages == HISTORY


def test_response_items_of_two_turns_in_a_row_stay_apart() -> None:
    reasoning = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said = {"role": "assistant", "content": "One."}
    items = [*USER, reasoning, said, said, {**reasoning, "summary": []}, {**said, "content": "Two."}]
    assert RESPONSES.parse({"input": items}).chat.messages[1:] == (
        Message("assistant", "One.", thinking="Hm."),
        Message("assistant", "One."),
        Message("assistant", "Two."),
    )


def test_message_blocks() -> None:
    messages = [
        {"role": "user", "content": parts("Add.", "Twice.")},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "0_3"},
                {"type": "redacted_thinking", "data": "..."},
                *parts("I add."),
                *(
                    {
                        "type": "tool_use",
                        "id": call.id,
                        "name": call.name,
                        "input": orjson.loads(call.arguments),
                    }
                    for call in CALLS
                ),
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_0", "content": parts("1", "of 1")},
                {"type": "tool_result", "tool_use_id": "call_1", "is_error": True},
                *parts("Thanks."),
            ],
        },
        {"role": "assistant", "content": []},
    ]
    body = {"system": parts("Be brief.", "Be kind."), "messages": messages}
    assert MESSAGES.parse(body).chat.messages == HISTORY
    assert CountTokensApi().parse(body).chat.messages == HISTORY


def test_a_message_of_tool_results_alone_has_no_user_text() -> None:
    result = {"type": "tool_result", "tool_use_id": "call_0", "content": "1"}
    messages = [{"role": "user", "content": [result]}]
    assert MESSAGES.parse({"messages": messages}).chat.messages == (
        Message("tool", "1", tool_call_id="call_0"),
    )


# Settings -------------------------------------------------------------------------------------------------

HI = (Message("user", "hi"),)
SETTINGS: list[tuple[Api, dict[str, Any], ChatRequest]] = [
    (CHAT, {"temperature": 0.1, "metadata": {}, "seed": 1, "tools": None}, ChatRequest(HI)),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 5}, ChatRequest(HI, max_tokens=5)),
    (CHAT, {"max_tokens": 3, "stop": "a", "n": 2}, ChatRequest(HI, max_tokens=3, stop=("a",), n=2)),
    (CHAT, {"stop": ["a", "b"], "logprobs": True}, ChatRequest(HI, stop=("a", "b"), logprobs=True)),
    (CHAT, {"tools": [CHAT_ADD, {"type": "custom", "custom": {}}]}, ChatRequest(HI, (ADD,))),
    (CHAT, {"tool_choice": "none"}, ChatRequest(HI, demands=Demands("none"))),
    (
        CHAT,
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        ChatRequest(HI, (ADD,), Demands("required", "add")),
    ),
    (CHAT, {"parallel_tool_calls": False}, ChatRequest(HI, demands=Demands(single_call=True))),
    (CHAT, {"response_format": {"type": "text"}}, ChatRequest(HI)),
    (CHAT, {"response_format": {"type": "json_object"}}, ChatRequest(HI, demands=Demands(json_schema=""))),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ChatRequest(HI, demands=Demands(json_schema='{"type":"object"}')),
    ),
    (RESPONSES, {"store": True, "include": [], "reasoning": {"effort": "low"}}, ChatRequest(HI)),
    (RESPONSES, {"max_output_tokens": 7}, ChatRequest(HI, max_tokens=7)),
    (
        RESPONSES,
        {"tools": [RESPONSE_ADD, {"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}]},
        ChatRequest(HI, (ADD,)),
    ),
    (
        RESPONSES,
        {"tools": [RESPONSE_ADD], "tool_choice": {"type": "function", "name": "add"}},
        ChatRequest(HI, (ADD,), Demands("required", "add")),
    ),
    (RESPONSES, {"parallel_tool_calls": False}, ChatRequest(HI, demands=Demands(single_call=True))),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}, "verbosity": "low"}},
        ChatRequest(HI, demands=Demands(json_schema='{"type":"object"}')),
    ),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_object"}}},
        ChatRequest(HI, demands=Demands(json_schema="")),
    ),
    (MESSAGES, {"max_tokens": 9, "stop_sequences": ["a"]}, ChatRequest(HI, max_tokens=9, stop=("a",))),
    (MESSAGES, {"tools": [MESSAGE_ADD, {"type": "bash_20250124", "name": "bash"}]}, ChatRequest(HI, (ADD,))),
    (
        MESSAGES,
        {"tools": [MESSAGE_ADD], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        ChatRequest(HI, (ADD,), Demands("required", single_call=True)),
    ),
    (
        MESSAGES,
        {"tools": [MESSAGE_ADD], "tool_choice": {"type": "tool", "name": "add"}},
        ChatRequest(HI, (ADD,), Demands("required", "add")),
    ),
    (MESSAGES, {"tool_choice": {"type": "none"}}, ChatRequest(HI, demands=Demands("none"))),
    (
        MESSAGES,
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
        ChatRequest(HI, demands=Demands(json_schema='{"type":"object"}')),
    ),
]


@pytest.mark.parametrize(("api", "settings", "expected"), SETTINGS)
def test_settings(api: Api, settings: dict[str, Any], expected: ChatRequest) -> None:
    history = {"input": "hi"} if api is RESPONSES else {"messages": USER}
    assert api.parse({**history, **settings}).chat == expected


def test_the_form_of_the_answer() -> None:
    asked = CHAT.parse({"messages": USER, "model": "m", "stream": True})
    assert (asked.model, asked.stream, asked.include_usage) == ("m", True, False)
    options = {"include_usage": True, "include_obfuscation": False}
    assert CHAT.parse({"messages": USER, "stream_options": options}).include_usage
    for kind, shown in (("enabled", True), ("adaptive", True), ("disabled", False)):
        assert MESSAGES.parse({"messages": USER, "thinking": {"type": kind}}).show_thinking is shown
    assert not MESSAGES.parse({"messages": USER}).show_thinking


# Bad requests ---------------------------------------------------------------------------------------------

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
        "messages[0].content[0].type: got 'image_url', expected text: the gateway takes no images, audio or files",
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
        'tool_choice: got \'any\', expected auto, none, required or {"type": "function", "function": {"name"}}',
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
        "previous_response_id: got 'resp_0', expected none: the gateway keeps no responses, send the whole history",
    ),
    (
        {"input": "hi", "background": True},
        "background: got true, expected none: the gateway keeps no responses, send the whole history",
    ),
    (
        {"input": [{"type": "item_reference", "id": "msg_0"}]},
        "input[0].type: got 'item_reference', expected message, function_call, function_call_output or reasoning, each in full",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type: got 'input_image', expected text: the gateway takes no images, audio or files",
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
        "messages[0].content[0].type: got 'image', expected text: the gateway takes no images, audio or files",
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
        (b"", "the body is no JSON: .*line 1 column 1"),
        (b'{"a": ', "the body is no JSON: unexpected end of data"),
        (b'{"a": "\xff"}', "the body is no JSON: .*utf-8"),
        (b'{"a": "\\ud800"}', "the body is no JSON: .*surrogate"),
        (b'{"a": NaN}', "the body is no JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "the body is no JSON: .*[Rr]ecursion"),
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
    top_level = (
        "model stream max_tokens max_completion_tokens max_output_tokens n stop stop_sequences tools tool_choice "
        "response_format text logprobs stream_options parallel_tool_calls system instructions thinking "
        "output_config messages input prompt conversation"
    ).split()
    bodies = [{"messages": USER, "input": "hi", key: junk} for key in top_level]
    for block in spoiled:
        nested = [[block], *([{"role": role, "content": [block]}] for role in ("user", "assistant"))]
        nested.append([{"role": "assistant", "content": "", "tool_calls": [block]}])
        bodies += [{"messages": messages, "input": messages} for messages in nested]
    for body in bodies:
        for api in (CHAT, RESPONSES, MESSAGES):
            try:
                api.parse(body)
            except RequestError as error:
                assert (error.status, error.kind) == (400, "invalid_request")


# Rules for clients ----------------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b;"


def system(text: str) -> Message:
    return Message("system", text)


def user(text: str) -> Message:
    return Message("user", text)


REPLY = Message("assistant", "ok")


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("billing_header", [system(f"{BILLING}\nBe brief."), user("a")], [system("Be brief."), user("a")]),
        ("billing_header", [system(BILLING), user("a")], [user("a")]),
        ("billing_header", [user(BILLING)], [user(BILLING)]),
        ("fold_system", [system("s"), system("t"), user("a")], [system("s"), system("t"), user("a")]),
        (
            "fold_system",
            [user("a"), REPLY, system("s"), system("t"), user("b")],
            [user("a"), REPLY, user("s\nt\nb")],
        ),
        ("fold_system", [user("a"), system("s"), REPLY], [user("a"), user("s"), REPLY]),
        ("fold_system", [user("a"), system("s")], [user("a"), user("s")]),
        ("fold_system", [], []),
    ],
)
def test_rule(rule: str, before: list[Message], after: list[Message]) -> None:
    messages = tuple(before)
    assert apply_rules(frozenset({rule}), messages) == (tuple(after), [rule] if before != after else [])
    assert apply_rules(frozenset(), messages) == (messages, [])


def test_rules_are_applied_together() -> None:
    messages = (system(BILLING), user("a"), system("s"), user("b"))
    assert apply_rules(frozenset(RULES), messages) == (
        (user("a"), user("s\nb")),
        ["billing_header", "fold_system"],
    )


def test_folding_extends_what_was_folded_before() -> None:
    history = [user("a"), system("s")]
    rules = frozenset({"fold_system"})
    earlier, _ = apply_rules(rules, tuple(history))
    later, _ = apply_rules(rules, (*history, REPLY, system("t"), user("b")))
    assert later[: len(earlier)] == earlier
