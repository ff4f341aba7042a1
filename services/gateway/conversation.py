"""A turn's request and response, independent of the chat API. Pure.

An agent asks "12+34?" and offers a tool `add`; the policy calls it:

    ChatRequest(messages=(Message("user", "12+34?"),), tools=(add,))
    Reply(Message("assistant", "", (ToolCall("call_0_0_0", "add", '{"a": 12, "b": 34}'),)), "tool_calls", ...)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from atoll.wire.types import Message

Tool = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}
End = Literal["stop", "length", "tool_calls"]


class RequestError(Exception):
    """A request that is refused. Each API has its own form of it."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        """`kind`: "invalid_request", "authentication", "permission", "not_found", "too_large",
        "context_overflow", "rate_limit", "unavailable" or "internal"."""
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.overflow = (0, 0)  # of kind "context_overflow": tokens got, and at most expected

    @classmethod
    def of_overflow(cls, num_tokens: int, max_length: int) -> Self:
        error = cls(
            400, "context_overflow", f"{num_tokens} tokens of context, expected less than {max_length}"
        )
        error.overflow = num_tokens, max_length
        return error


@dataclass(frozen=True, slots=True)
class Demands:
    """What a request asks of the reply's form. The prompt says it, and the reply is checked afterwards; the
    distribution that the policy draws from stays as it is."""

    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str = ""  # the tool that must be called (tool_choice is "required" then); "": any
    single_call: bool = False  # at most one call in a reply
    json_schema: str | None = None  # the reply is JSON: of this schema, or "" for any object


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What the policy is to answer. Temperature, top_p and the like are the run's, whatever a client asks."""

    messages: tuple[Message, ...]  # system messages too, each where it stood
    tools: tuple[Tool, ...] = ()
    demands: Demands = Demands()
    max_tokens: int | None = None  # of the reply; None: as many as the run allows
    stop: tuple[str, ...] = ()
    n: int = 1  # replies to draw
    logprobs: bool = False  # answer with those of the sampled tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    text: str  # bytes that are no UTF-8 by themselves as U+FFFD
    utf8: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Reply:
    """One turn as clients see it. Its tokens are kept elsewhere, as they were sampled."""

    message: Message  # of the assistant: text, thinking and tool calls, parsed from the sampled tokens
    end: End
    num_tokens: int  # sampled
    num_thinking_tokens: int = 0  # of these, spent on thinking
    stop_sequence: str = ""  # the stop string that ended it
    logprobs: Sequence[TokenLogprob] = ()  # of the sampled tokens, if the request asked for them


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    name: str  # of the turn, unique in its session: part of every id that the client gets
    created: int  # Unix seconds
    model: str  # as the client called it
    prompt_tokens: int  # of the context
    cached_tokens: int  # of the context, those that the session's tree held before
    replies: tuple[Reply, ...]
