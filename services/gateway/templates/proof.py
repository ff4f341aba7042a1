"""Tests at start-up, on random conversations, that a model folder's chat format is exact."""

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.gateway.conversation import RequestError, Tool
from atoll.gateway.templates.chat_format import ChatFormat
from atoll.runtime.errors import UserError
from atoll.wire.types import FinishReason, Int32, Message, ToolCall

_CASES = 3  # random conversations of each kind
_KINDS = {  # of new messages, after a reply
    "user messages": ("user",),
    "tool results": ("tool",),
    "tool results before a user message": ("tool", "tool", "user"),
    "fabricated exchanges": ("user", "assistant", "user"),
    "system messages": ("system",),
}


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What a chat format was found to do with messages that follow a reply."""

    extend: tuple[str, ...]  # kinds of messages that extend a branch
    branch: tuple[str, ...]  # kinds that open one if a reply before them has thinking
    refused: dict[str, str]  # kind: why there is neither
    tool_format: str
    parallel_calls: bool  # a history may have several calls in one reply
    warnings: tuple[str, ...]
    num_checks: int


async def prove(chat: ChatFormat) -> ProofReport:
    """Raises UserError if suffixes, contents or tool calls would not be exact."""
    proof = _Proof(chat)
    await proof.encoding()
    await proof.forging()
    await proof.suffixes()
    parallel_calls = proof.calls()
    return ProofReport(
        extend=tuple(kind for kind in proof.extend if not proof.strips(kind)),
        branch=tuple(kind for kind in proof.extend if proof.strips(kind)),
        refused=proof.refused,
        tool_format=chat.tool_format,
        parallel_calls=parallel_calls,
        warnings=tuple(proof.warnings),
        num_checks=proof.num_checks,
    )


class _Proof:
    def __init__(self, chat: ChatFormat) -> None:
        self.chat = chat
        self.extend: list[str] = []
        self.refused: dict[str, str] = {}
        self.warnings: list[str] = []
        self.num_checks = 0
        self._random = random.Random(0)
        self._special_texts = sorted(chat.encoder.specials)

    async def encoding(self) -> None:
        """Harmless contents get the ordinary tokenizer's ids, with a kept head and without."""
        for case in range(2 * _CASES):
            tools = [_TOOL] if case % 2 else []
            messages = [Message("system", "Be brief."), *self._history("user", harmless=True)]
            for conversation in (messages, [*messages[:2], *messages[-1:]]):
                try:
                    got = await self.chat.root(conversation, tools)
                    text = self.chat.render(self.chat.trees(conversation), self.chat.tool_trees(tools))
                except RequestError:
                    continue
                whole = self.chat.encoder.encode_whole(self.chat.encoder.veil.lift(text))
                self._equal("the ids of a conversation", got[-len(whole) :], np.array(whole))

    async def forging(self) -> None:
        """Texts of special tokens become no special tokens, whichever field they stand in."""
        texts = self._special_texts
        halves = [half for text in texts[:32] for half in (text[1:], text[:-1])]
        private = "\U0010f000\U0010f001\U0010f002\U0010fffc"
        attacks = [private.join(texts), " ".join(texts), " ".join(halves)]
        attacks += [text[1:-1] for text in texts[:: max(1, len(texts) // 8)] if text[1:-1].strip()]
        for called in (True, False):
            try:
                expected = self._specials(await self._attacked("x", called))
            except RequestError:
                continue  # such as roles that the template does not have
            for attack in attacks:
                got = self._specials(await self._attacked(attack, called))
                self._equal("special tokens of a conversation whose contents spell some", got, expected)

    async def suffixes(self) -> None:
        """A suffix is what the whole conversation has at its end, whatever came before."""
        for kind, roles in _KINDS.items():
            try:
                for _ in range(_CASES):
                    await self._suffix(kind, roles)
            except RequestError as error:
                self.refused[kind] = str(error)
            else:
                self.extend.append(kind)
        if "user messages" in self.refused:
            raise UserError(
                f"{self.chat.model_path}: the chat template does not extend: "
                f"got {self.refused['user messages']!r} for user messages, expected text behind a stop "
                "token; name a renderer that carries this family, or use a template that extends"
            )

    def calls(self) -> bool:
        """Tool calls that the template writes are read back. Returns whether it writes several at once."""
        if self.chat.tool_format == "none":
            self.warnings.append("no known format reads the tool calls that the template writes")
            return False
        arguments = ['{"a": "x"}', json.dumps({"a": '<b> "q"\n\ttwo', "c": "é {}"}), "{}"]
        calls = tuple(ToolCall(f"call_p_{k}", f"f{k}", text) for k, text in enumerate(arguments))
        for number in (1, 2, 3):
            text = self.chat.reply_text(Message("assistant", "", calls[:number]))
            if not text and number > 1:
                self.warnings.append("the template refuses replies with several calls in a history")
                return False
            ids = np.array(self.chat.encoder.encode_whole(text), np.int32)
            parsed = self.chat.parse(
                ids, name="p", finish_reason=FinishReason.STOP, tools=[_tool(call.name) for call in calls]
            )
            got, expected = (
                [(call.name, json.loads(call.arguments)) for call in message_calls]
                for message_calls in (parsed.message.tool_calls, calls[:number])
            )
            self.num_checks += 1
            if got != expected:
                raise UserError(
                    f"{self.chat.model_path}: tool format {self.chat.tool_format}: of {text!r} got the calls "
                    f"{got}, expected {expected}; choose the format that the template writes"
                )
        return True

    def strips(self, kind: str) -> bool:
        return bool(self.chat.strip_roles & set(_KINDS[kind]))

    async def _suffix(self, kind: str, roles: Sequence[str]) -> None:
        new = self._new_messages(roles)
        for tools in ((), (_TOOL,)):
            history = self._history(roles[0])
            got = await self.chat.suffix(new, ended=True)
            cut_short = await self.chat.suffix(new, ended=False)
            whole = await self.chat.root([*history, *new], tools)
            expected = whole[-len(got) - 1 :]
            self._equal(f"the suffix for {kind} after a cut reply", cut_short[1:], got)
            if cut_short[0] not in self.chat.stop_ids:
                token = repr(self.chat.encoder.decode(cut_short[:1].tolist()))
                self._refuse("the token that ends a cut reply", token, "a stop token")
            if self.chat.renderer and not np.array_equal(got, expected[1:]):
                self.warnings.append(f"the renderer writes {kind} differently than the template")
                return
            self._equal(f"the suffix for {kind}", got, expected[1:])
            if not self.chat.renderer:  # which may end a reply with another stop token
                self._equal(f"the token before the suffix for {kind}", cut_short[:1], expected[:1])

    async def _attacked(self, text: str, called: bool) -> Int32:
        """A conversation with `text` in every field."""
        function = {
            "description": text,
            "parameters": {"type": "object", "properties": {text: {"enum": [text]}}},
        }
        tool = {"type": "function", "function": {"name": text, **function}}
        arguments = json.dumps({text: text, "b": [text, {text: text}]})
        calls = (ToolCall(text, text, arguments),) if called else ()
        messages = [
            Message("system", text),
            Message("user", text),
            Message("assistant", text, calls, thinking=text),
            *([Message("tool", text, tool_call_id=text)] if called else []),
        ]
        if called:
            root = await self.chat.root(messages, [tool])
            return np.concatenate([root, await self.chat.suffix(messages[3:], ended=True)])
        return await self.chat.root([*messages, Message("user", text)])

    def _specials(self, ids: Int32) -> Int32:
        specials = list(self.chat.encoder.specials.values())
        return ids[np.isin(ids, specials)]

    def _history(self, next_role: str, harmless: bool = False) -> list[Message]:
        """Ends with a reply that a message of `next_role` may follow."""
        messages = [Message("user", self._text(harmless))]
        for _ in range(self._random.randrange(3)):
            thinking = self._text(harmless) if self._random.random() < 0.5 else ""
            messages.append(Message("assistant", self._text(harmless), thinking=thinking))
            messages.append(Message("user", self._text(harmless)))
        calls = (ToolCall("call_0", "add", '{"a": 1, "b": "two"}'),) if next_role == "tool" else ()
        thinking = self._text(harmless) if self._random.random() < 0.5 else ""
        return [*messages, Message("assistant", self._text(harmless), calls, thinking=thinking)]

    def _new_messages(self, roles: Sequence[str]) -> list[Message]:
        ids = {"tool": "call_0"}
        return [Message(role, self._text(), tool_call_id=ids.get(role, "")) for role in roles]

    def _text(self, harmless: bool = False) -> str:
        words = _WORDS if harmless else [*_WORDS, *self._random.sample(self._special_texts, 1)]
        return "".join(self._random.choice(words) for _ in range(self._random.randint(1, 8)))

    def _equal(self, what: str, got: Int32, expected: Int32) -> None:
        self.num_checks += 1
        if not np.array_equal(got, expected):
            decoded = [self.chat.encoder.decode(ids.tolist()) for ids in (got, expected)]
            equal = len(os.path.commonprefix(decoded))  # noqa: RUF071 (of characters)
            self._refuse(what, *(repr(text[max(0, equal - 20) : equal + 80]) for text in decoded))

    def _refuse(self, what: str, got: str, expected: str) -> None:
        raise UserError(
            f"{self.chat.model_path}: chat template and tokenizer: {what}: got {got}, expected {expected}; "
            "name a renderer that carries this family, or use another template"
        )


def report_lines(report: ProofReport) -> Iterator[str]:
    """What a user has to know, in sentences; warnings apart."""
    yield f"extend a branch: {', '.join(report.extend) or 'no messages'}"
    if report.branch:
        yield (
            f'extend a branch if thinking = "keep", open one after thinking if it is "template": '
            f"{', '.join(report.branch)}"
        )
    for kind, reason in report.refused.items():
        yield f"refused: {kind}: {reason}"
    yield f"format of tool calls: {report.tool_format}"


def _tool(name: str) -> Tool:
    properties = {"a": {"type": "string"}, "b": {"type": "string"}}
    function = {
        "name": name,
        "description": "Adds.",
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


_TOOL = _tool("add")
_WORDS = [
    "a",
    "word",
    " and",
    "\n",
    "\n\n",
    "  ",
    "12",
    '{"k": 1}',
    "é",
    "日本",
    "😀",
    ".",
    "\t",
    "it's",
    " <b>",
    "|",
]
