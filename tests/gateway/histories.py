"""Agents that edit their histories at random, and a matcher that compares whole lists of messages.

The matcher knows no digests and no tree: a turn is the full list of its messages and of its tokens.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from atoll.gateway.history.canonical import digest_request, link
from atoll.gateway.history.tree import ROOT, Cause, Match, SessionTree
from atoll.wire.types import BELOW_PROMPT, Message, ToolCall, Trajectory, TurnRecord
from tests import builders

Messages = list[Message]
Key = tuple[object, ...]
TOOLS = (
    (),
    ({"type": "function", "function": {"name": "add", "parameters": {"a": {}}}},),
    ({"type": "function", "function": {"name": "run", "parameters": {}}},),
)
WORDS = ("", "yes", "no", "12+34?", "né")
VALUES = (1, 1.0, True, "1", "é", None, 2**64, 2**64 + 1, 10**19, [1, {"b": 2, "a": 1}], {"y": 1, "x": 2})


def key(message: Message) -> Key:
    """Equal for equal messages, by Python's own JSON."""
    calls = tuple((c.id, c.name, _key_of_arguments(c.arguments)) for c in message.tool_calls)
    return message.role, message.content, message.tool_call_id, calls


def _key_of_arguments(text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return "JSON " + json.dumps(value, sort_keys=True) if isinstance(value, dict) else text


@dataclass
class HeldTurn:
    tools: int
    context: list[Key]
    replies: list[Key]
    context_ids: list[int]
    reply_ids: list[list[int]]
    cause: str


@dataclass
class PlainMatcher:
    turns: list[HeldTurn] = field(default_factory=list)

    def match(self, tools: int, messages: Messages) -> Match:
        request = list(map(key, messages))
        best, place = 0, (ROOT, 0)
        for position, turn in enumerate(self.turns):
            length = len(turn.context) + 1
            if turn.tools == tools and best <= length < len(request) and begins(request, turn.context):
                for branch, reply in enumerate(turn.replies):
                    if request[length - 1] == reply:
                        best, place = length, (position, branch)
        return Match(*place, best, self._cause(tools, request, best))

    def _cause(self, tools: int, request: list[Key], matched: int) -> Cause:
        same = [turn for turn in self.turns if turn.tools == tools]
        if not any(leading(turn.context) == leading(request) for turn in same):
            has_history = self.turns and any(message[0] == "assistant" for message in request)
            return Cause.EDITED_PROMPT if has_history else Cause.NEW_CONVERSATION
        contexts = [turn.context for turn in same if len(turn.context) >= matched]
        below = [context for context in contexts if begins(context, request[:matched])]
        if matched and not below:
            return Cause.NONE
        if request in below:
            return Cause.RESAMPLED
        if any(begins(request, context) for context in below):
            return Cause.EDITED_REPLY
        held = max(common(request, [*t.context, reply]) for t in same for reply in t.replies)
        if any(message[0] == "assistant" for message in request[held:]):
            return Cause.EDITED_HISTORY
        return Cause.PARALLEL if matched else Cause.RESTARTED

    def causes(self) -> Counter[str]:
        return Counter(turn.cause for turn in self.turns if turn.cause)


def begins(messages: list[Key], start: list[Key]) -> bool:
    return messages[: len(start)] == start


def leading(messages: list[Key]) -> list[Key]:
    others = [i for i, message in enumerate(messages) if message[0] != "system"]
    return messages[: min(others, default=len(messages))]


def common(one: list[Key], other: list[Key]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass
class EditingAgent:
    """One session: its requests one after another, some of them written later than those that began after
    them."""

    random: random.Random
    tree: SessionTree = field(default_factory=SessionTree)
    plain: PlainMatcher = field(default_factory=PlainMatcher)
    records: list[TurnRecord] = field(default_factory=list)
    histories: list[tuple[int, Messages]] = field(default_factory=list)  # as the agent has them: with a reply
    requests: list[tuple[int, Messages]] = field(default_factory=list)
    late: list[tuple[TurnRecord, HeldTurn, int, Messages]] = field(default_factory=list)

    def run(self, num_edits: int) -> None:
        """So many edited requests, and others between them; ends when all turns are written."""
        self._ask(*self._begin())
        while num_edits:
            edit = self.random.random() < 0.5
            tools, messages = self._edit() if edit else self._go_on()
            if messages:
                self._ask(tools, messages)
                num_edits -= edit
        self._write_late()

    def _begin(self) -> tuple[int, Messages]:
        systems = [
            Message("system", self.random.choice(WORDS)) for _ in range(self.random.choice((0, 1, 1, 2)))
        ]
        return self.random.randrange(len(TOOLS)), [*systems, self._message("user")]

    def _go_on(self) -> tuple[int, Messages]:
        pool = self.histories[-1:] if self.random.random() < 0.7 else self.histories
        tools, messages = self.random.choice(pool) if pool else self._begin()
        added = [
            self._message(self.random.choice(("user", "tool"))) for _ in range(self.random.choice((1, 1, 2)))
        ]
        return tools, [*map(self._send_again, messages), *added]

    def _edit(self) -> tuple[int, Messages]:
        tools, messages = self._go_on() if self.random.random() < 0.7 else self.random.choice(self.requests)
        messages = list(messages)
        at, other = self.random.randrange(len(messages)), self.random.randrange(len(messages))
        match self.random.choice(
            ("text", "text", "call", "drop", "swap", "again", "begin", "tools", "resend", "id")
        ):
            case "text":
                messages[at] = messages[at]._replace(content=self.random.choice(WORDS))
            case "call":
                messages[at] = messages[at]._replace(tool_calls=self._calls())
            case "id":
                messages[at] = messages[at]._replace(tool_call_id=self.random.choice(("", "c1", "c2")))
            case "drop":
                del messages[at]
            case "swap":
                messages[at], messages[other] = messages[other], messages[at]
            case "again":
                tools, messages = self.random.choice(self.requests)
            case "begin":
                tools, messages = self._begin()
            case "tools":
                tools = self.random.randrange(len(TOOLS))
            case "resend":  # it ends with a reply
                tools, messages = self.random.choice(self.histories or self.requests)
        return tools, list(map(self._send_again, messages))

    def _ask(self, tools: int, messages: Messages) -> None:
        """Checks the match and its context, and draws a turn."""
        digests = digest_request(messages, TOOLS[tools])
        match = self.tree.match(digests)
        assert match == self.plain.match(tools, messages)
        if match.parent != ROOT and self.random.random() < 0.1:
            match = Match(ROOT, 0, 0, self.random.choice((Cause.THINKING, Cause.RENDERER)))
        above = self.tree.context_ids(match.parent, match.branch).tolist()
        if match.parent != ROOT:
            turn = self.plain.turns[match.parent]
            assert above == turn.context_ids + turn.reply_ids[match.branch]
        new = messages[match.num_messages :]
        inserted = [i for message in new for i in self._encode(message)]
        if match.parent != ROOT and self.random.random() < 0.1:
            inserted = []
        drawn = self._draw()
        replies = [self._message("assistant") for _ in drawn]
        self.requests.append((tools, messages))
        record = TurnRecord(
            number=len(self.requests),
            request=json.dumps([tools, messages]).encode(),
            parent=match.parent,
            parent_branch=match.branch,
            head=digests.head,
            has_tools=bool(TOOLS[tools]),
            inserted_ids=np.array(inserted, np.int32),
            messages=tuple(new),
            cause=match.cause,
            drawn=drawn,
            chains=tuple(link(digests.chains[-1], reply) for reply in replies),
        )
        ids = [each.nodes[0].token_ids.tolist() for each in drawn]
        held = HeldTurn(
            tools, list(map(key, messages)), list(map(key, replies)), above + inserted, ids, match.cause
        )
        self.late.append((record, held, tools, [*messages, self.random.choice(replies)]))
        if self.random.random() < 0.8:
            self._write_late()

    def _write_late(self) -> None:
        while self.late:
            record, held, tools, history = self.late.pop()
            self.tree.add(record)
            self.records.append(record)
            self.plain.turns.append(held)
            self.histories.append((tools, history))

    def _draw(self) -> tuple[Trajectory, ...]:
        drawn = []
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            ids = [self.random.randrange(50) for _ in range(self.random.choice((0, 1, 2, 3, 8)))]
            logprobs = [-self.random.random() for _ in ids]
            node = builders.node(ids, parent=BELOW_PROMPT, logprobs=logprobs)
            drawn.append(builders.sample(builders.sample_id(), node))
        return tuple(drawn)

    def _message(self, role: str) -> Message:
        word = self.random.choice(WORDS)
        if role == "tool":
            return Message(role, word, (), self.random.choice(("c1", "c2")))
        if role == "assistant":
            return Message(role, word, self._calls() if self.random.random() < 0.5 else (), "", word)
        return Message(role, word)

    def _calls(self) -> tuple[ToolCall, ...]:
        number = self.random.choice((1, 1, 2))
        return tuple(ToolCall(f"c{i}", "add", self._arguments()) for i in range(number))

    def _arguments(self) -> str:
        if self.random.random() < 0.1:
            return self.random.choice(('{"a": 1', "[1]", "", '{"a": "\\ud800"}', '{"a": 1, "a": 2}'))
        return json.dumps(
            {name: self.random.choice(VALUES) for name in self.random.choice(("ab", "ba", "a"))}
        )

    def _send_again(self, message: Message) -> Message:
        """The same message as a client writes it: without thinking, its arguments serialised anew."""
        calls = tuple(call._replace(arguments=self._rewrite(call.arguments)) for call in message.tool_calls)
        return message._replace(thinking="", tool_calls=calls)

    def _rewrite(self, arguments: str) -> str:
        if not arguments.endswith("}"):
            return arguments
        value = json.loads(arguments)
        turned = dict(sorted(value.items(), reverse=self.random.random() < 0.5))
        escape = "\\u" in arguments or self.random.random() < 0.5  # a bare surrogate is no UTF-8
        return json.dumps(turned, indent=self.random.choice((None, 2)), ensure_ascii=escape)

    @staticmethod
    def _encode(message: Message) -> list[int]:
        return [60 + len(message.role), *message.content.encode(), 59]
