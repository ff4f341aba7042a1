"""What requests of the three chat APIs become."""

from typing import Any

import orjson
import pytest

from atoll.gateway.apis.base import Api
from atoll.gateway.apis.chat import ChatApi
from atoll.gateway.apis.client_rules import RULES, apply_rules
from atoll.gateway.apis.messages import CountTokensApi, MessagesApi
from atoll.gateway.apis.responses import ResponsesApi
from atoll.gateway.conversation import ChatRequest, Demands
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


def test_response_items_of_one_turn_may_have_outputs_between_them() -> None:
    def items_of(*ids: str) -> list[dict[str, Any]]:
        call = {"type": "function_call", "name": "add", "arguments": "{}"}
        output = {"type": "function_call_output", "output": "1"}
        return [each for id in ids for each in ({**call, "call_id": id}, {**output, "call_id": id})]

    body = {"input": [*items_of("call_7f_0_0", "call_7f_0_1"), *items_of("call_80_0_0")]}
    messages = RESPONSES.parse(body).chat.messages
    assert [m.role for m in messages] == ["assistant", "tool", "tool", "assistant", "tool"]
    assert [call.id for call in messages[0].tool_calls] == ["call_7f_0_0", "call_7f_0_1"]
    foreign = RESPONSES.parse({"input": items_of("call_a", "call_b")}).chat.messages
    assert [m.role for m in foreign] == ["assistant", "tool", "assistant", "tool"]


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
