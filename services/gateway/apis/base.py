"""The interface between chat APIs and the gateway's HTTP server. Pure: JSON in, JSON out.

request = api.parse({"model": "policy", "messages": [{"role": "user", "content": "12+34?"}]})
request.chat         ChatRequest(messages=(Message("user", "12+34?"),))
api.answer(...)      {"id": "chatcmpl-0_3", "object": "chat.completion", "choices": [...], ...}
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import orjson

from atoll.gateway.conversation import ChatAnswer, ChatRequest, RequestError

Json = dict[str, Any]  # may hold orjson.Fragment: write it with orjson

COMMENT: Final = b": keep-alive\n\n"  # every SSE parser skips it


@dataclass(frozen=True, slots=True)
class ApiRequest:
    chat: ChatRequest
    model: str  # as the client calls it; comes back in the answer
    stream: bool
    include_usage: bool = False  # chat: a chunk with usage at the stream's end
    show_thinking: bool = False  # messages: answer with thinking blocks


class Api(ABC):
    keep_alive: ClassVar[bytes] = COMMENT  # sent while the turn is generated, before any event

    @abstractmethod
    def parse(self, body: Mapping[str, Any]) -> ApiRequest:
        """Raises RequestError(400, "invalid_request") that names the field, what it got and what it expected.
        Unknown fields are ignored."""

    @abstractmethod
    def answer(self, request: ApiRequest, answer: ChatAnswer) -> Json: ...

    @abstractmethod
    def events(self, request: ApiRequest, answer: ChatAnswer) -> list[bytes]:
        """The answer as server-sent events; the last element ends the stream."""

    @abstractmethod
    def error(self, error: RequestError) -> Json: ...

    @abstractmethod
    def error_event(self, error: RequestError) -> bytes:
        """An error once the stream has begun; it ends the stream."""


def data_event(data: Json) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def named_event(data: Json) -> bytes:
    """An event whose name is its data's type."""
    return f"event: {data['type']}\ndata: ".encode() + orjson.dumps(data) + b"\n\n"


_OPENAI_ERRORS: Final = {  # type and code by kind
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("authentication_error", "invalid_api_key"),
    "permission": ("permission_error", "permission_denied"),
    "not_found": ("not_found_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "context_overflow": ("invalid_request_error", "context_length_exceeded"),
    "rate_limit": ("rate_limit_error", "rate_limit_exceeded"),
    "unavailable": ("server_error", "service_unavailable"),
    "internal": ("server_error", "internal_error"),
}


def openai_error(error: RequestError, history: str) -> Json:
    """As chat completions and responses have it. `history`: the field that holds the conversation; clients
    know a context overflow by its code or by these words."""
    kind, code = _OPENAI_ERRORS[error.kind]
    if error.kind != "context_overflow":
        return {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
    got, limit = error.overflow
    message = (
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {got} "
        "tokens. Please reduce the length of the messages."
    )
    return {"error": {"message": message, "type": kind, "param": history, "code": code}}
