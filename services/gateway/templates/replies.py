"""Parses sampled replies into the messages that clients see. The tokens stay as sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.gateway.conversation import End, Tool
from atoll.gateway.templates.tool_calls import CallsFound
from atoll.wire.types import FinishReason, Int32, Message, ToolCall

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ParsedReply:
    message: Message
    end: End
    stop_sequence: str = ""  # the stop string that ended it
    num_thinking_tokens: int = 0  # marks included: they are in the history even if nothing was thought
    num_malformed_calls: int = 0  # which are in the message's content, as the policy wrote them


@dataclass(frozen=True, slots=True)
class ReplyParser:
    """Parses the replies of one model folder."""

    decode: Callable[[Sequence[int]], str]
    stop_ids: frozenset[int]
    find_calls: Callable[[str, Sequence[Tool]], CallsFound]
    opens_thinking: bool  # the generation prompt ends with <think>

    def parse(
        self,
        token_ids: Int32,
        *,
        name: str,
        finish_reason: FinishReason,
        stop: Sequence[str] = (),
        tools: Sequence[Tool] = (),
    ) -> ParsedReply:
        """`token_ids` [T] as sampled, stop token included. `name` of the turn is part of its calls' ids."""
        ids = token_ids.tolist()
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        text, stop_sequence = _cut_at_stop(self.decode(ids), stop)
        thinking, num_thinking_tokens = "", 0
        if self.opens_thinking or text.lstrip().startswith(THINK):
            thinking, closed, answer = text.partition(END_THINK)
            num_thinking_tokens = _tokens_before(ids, len(thinking) + len(closed), self.decode)
            thinking, text = thinking.strip().removeprefix(THINK).strip(), answer
        found = self.find_calls(text, tools)
        calls = tuple(
            ToolCall(f"call_{name}_{number}", called, arguments)
            for number, (called, arguments) in enumerate(found.calls)
        )
        end: End = "tool_calls" if calls else "stop"
        return ParsedReply(
            Message("assistant", found.content, calls, thinking=thinking),
            "length" if finish_reason is FinishReason.LENGTH else end,
            stop_sequence,
            num_thinking_tokens,
            found.num_malformed,
        )


def _cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop string, and that string."""
    found = [(place, string) for string in stop if (place := text.find(string)) >= 0]
    if not found:
        return text, ""
    place, string = min(found)
    return text[:place], string


def _tokens_before(ids: Sequence[int], length: int, decode: Callable[[Sequence[int]], str]) -> int:
    """How many tokens the first `length` characters of the reply took."""
    characters, block = 0, 256
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        in_part = len(decode(part))
        if characters + in_part >= length:
            return start + _bisect(part, length - characters, decode)
        characters += in_part
    return len(ids)


def _bisect(ids: Sequence[int], length: int, decode: Callable[[Sequence[int]], str]) -> int:
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[:middle])) >= length:
            high = middle
        else:
            low = middle + 1
    return low
