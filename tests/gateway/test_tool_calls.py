"""Parsers of tool calls and the check of demands, by hand-written replies."""

import pytest

from atoll.gateway.conversation import Demands
from atoll.gateway.templates.demands import unmet, with_demands
from atoll.gateway.templates.tool_calls import TOOL_FORMATS
from atoll.wire.types import Message, ToolCall

GOOD = '<tool_call>\n{"name": "add", "arguments": {"b":34,  "a": 1.50}}\n</tool_call>'
TYPED = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}},
        },
    },
}
XML = (
    "<tool_call>\n<function=f>\n<parameter=text>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
    '<parameter=l>\n[1, "é"]\n</parameter>\n</function>\n</tool_call>'
)
LLAMA = '{"name": "add", "parameters": {"b":34, "a": 1}}'


@pytest.mark.parametrize(
    ("format", "text", "content", "calls", "num_malformed"),
    [
        # arguments stay as the policy wrote them
        ("hermes", GOOD, "", [("add", '{"b":34,  "a": 1.50}')], 0),
        ("hermes", f" I add.\n{GOOD}\n{GOOD} ", "I add.", [("add", '{"b":34,  "a": 1.50}')] * 2, 0),
        (
            "hermes",
            '<tool_call>{"arguments": {"s": "}</x>"}, "name": "no_such_tool"}</tool_call>done',
            "done",
            [("no_such_tool", '{"s": "}</x>"}')],
            0,
        ),
        ("hermes", "<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", [], 1),
        (
            "hermes",
            f"{GOOD}<tool_call>{{}}</tool_call>",
            "<tool_call>{}</tool_call>",
            [("add", '{"b":34,  "a": 1.50}')],
            1,
        ),
        ("hermes", GOOD.removesuffix("</tool_call>"), GOOD.removesuffix("\n</tool_call>"), [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} {}</tool_call>', None, [], 1),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a":' + "[" * 99999 + "</tool_call>", None, [], 1),
        ("hermes", "12 < 34, no call", None, [], 0),
        ("qwen_xml", XML, "", [("f", '{"text": "12", "n": 12, "l": [1, "é"]}')], 0),
        ("qwen_xml", XML.replace("=f>", "=g>"), "", [("g", '{"text": 12, "n": 12, "l": [1, "é"]}')], 0),
        ("qwen_xml", f"so\n{XML}\n{XML}", "so", [("f", '{"text": "12", "n": 12, "l": [1, "é"]}')] * 2, 0),
        ("qwen_xml", "<tool_call><function=f></function></tool_call>", "", [("f", "{}")], 0),
        ("qwen_xml", XML.replace("</function>", ""), None, [], 1),
        ("qwen_xml", XML.replace("<parameter=n>", "n:"), None, [], 1),
        ("qwen_xml", XML.replace("</tool_call>", ""), None, [], 1),
        ("llama", f"\n{LLAMA} ", "", [("add", '{"b":34, "a": 1}')], 0),
        ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", [("add", '{"b":34, "a": 1}')] * 2, 0),
        ("llama", f"I add. <|python_tag|>{LLAMA};", "I add.", [("add", '{"b":34, "a": 1}')], 0),
        ("llama", f"{LLAMA};{LLAMA[:-1]}", LLAMA[:-1], [("add", '{"b":34, "a": 1}')], 1),
        ("llama", LLAMA[:-1], None, [], 1),
        ("llama", f"{LLAMA} is the call", "is the call", [("add", '{"b":34, "a": 1}')], 0),
        ("llama", '<|python_tag|>search.call(query="x")', None, [], 1),
        ("llama", '{"sum": 46}', None, [], 0),
        ("llama", '{"name": "Ada", "age": 36}', None, [], 0),
        ("llama", '{"name": "add", "parameters": "a"}', None, [], 1),
        ("llama", "<|python_tag|>[1]", None, [], 1),
        ("none", f" {GOOD}\n", GOOD, [], 0),
    ],
)
def test_calls(
    format: str, text: str, content: str | None, calls: list[tuple[str, str]], num_malformed: int
) -> None:
    """`content` None: the whole text."""
    found = TOOL_FORMATS[format](text, [TYPED])
    expected = (text.strip() if content is None else content, calls, num_malformed)
    assert (found.content, found.calls, found.num_malformed) == expected


ADD, SUB = ToolCall("c1", "add", "{}"), ToolCall("c2", "sub", "{}")
SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'


@pytest.mark.parametrize(
    ("demands", "content", "calls", "said"),
    [
        (Demands(), "x", (ADD, SUB), ""),
        (Demands(tool_choice="none"), "x", (), ""),
        (Demands(tool_choice="none"), "", (ADD,), "expected no call, got a call of add"),
        (Demands(tool_choice="required"), "x", (), "expected a tool call, got none"),
        (Demands(tool_choice="required"), "", (SUB,), ""),
        (Demands(tool_choice="required", tool_name="add"), "", (ADD,), ""),
        (Demands(tool_choice="required", tool_name="add"), "", (SUB,), "expected a call of add, got sub"),
        (Demands(single_call=True), "", (ADD, SUB), "expected one call, got 2"),
        (Demands(json_schema=""), '{"a": 1}', (), ""),
        (Demands(json_schema=""), "[1]", (), "expected a JSON object, got list"),
        (Demands(json_schema=""), "ok", (), "expected JSON: Expecting value: line 1 column 1 (char 0)"),
        (Demands(json_schema=""), "", (ADD,), ""),
        (Demands(json_schema=SCHEMA), '{"n": 1}', (), ""),
        (
            Demands(json_schema=SCHEMA),
            '{"n": "1"}',
            (),
            "expected JSON of the schema: $.n: '1' is not of type 'integer'",
        ),
        (
            Demands(json_schema='{"type": 3}'),
            "{}",
            (),
            "the schema cannot be checked: 3 is not valid under any of the given schemas",
        ),
        (
            Demands(json_schema='{"$ref": "http://127.0.0.1:1/x"}'),
            "{}",
            (),
            "the schema cannot be checked: Unresolvable: http://127.0.0.1:1/x",
        ),
        # takes hours if it is tried
        (Demands(json_schema='{"pattern": "(a+)+$"}'), '"' + "a" * 60 + '!"', (), ""),
        (
            Demands(json_schema='{"patternProperties": {"(a+)+$": {}}, "additionalProperties": false}'),
            '{"' + "a" * 60 + '!": 1}',
            (),
            "",
        ),
        (
            Demands(json_schema='{"additionalProperties": false}'),
            '{"a": 1}',
            (),
            "expected JSON of the schema: $: Additional properties are not allowed ('a' was unexpected)",
        ),
    ],
)
def test_what_a_reply_did_not_keep_to(
    demands: Demands, content: str, calls: tuple[ToolCall, ...], said: str
) -> None:
    assert unmet(demands, Message("assistant", content, calls)) == said


def test_demands_are_said_in_the_last_message_that_is_not_the_assistants() -> None:
    messages = [Message("user", "a"), Message("tool", "b"), Message("assistant", "c")]
    assert with_demands(messages, Demands()) == messages
    said = with_demands(messages, Demands(tool_choice="none", json_schema=SCHEMA))
    assert [said[0], said[2]] == [messages[0], messages[2]]
    assert said[1].content == (
        "b\n\nDo not call a tool in this reply. "
        f"Reply with a single JSON value of this schema and nothing else: {SCHEMA}"
    )
