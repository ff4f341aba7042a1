"""Digests of messages: equal messages have equal digests. Pure.

Two messages are the same if role, text, calls and the call that they answer are. Thinking does not count,
since clients drop it. Arguments of calls are compared as JSON, since clients serialize them again: spaces and
the order of keys do not count, while 1, 1.0 and true differ, and integers count to their last digit.
Arguments that are no JSON object are compared as text.

What is hashed is JSON, which no two different values share, whichever of the two encoders wrote it.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import orjson

from atoll.gateway.conversation import Tool
from atoll.wire.types import Message

DIGEST_SIZE: Final = 16
# orjson reads integers of 64 bits exactly and longer ones as floats: runs of so many digits go to json
_LONG_NUMBER: Final = b"0" * 19
_DIGITS_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")


class Digests(NamedTuple):
    """Of a request's tools and messages."""

    head: bytes  # tools, and the system messages that the conversation begins with
    chains: tuple[bytes, ...]  # by message: the conversation up to and with it, and the tools
    last_assistant: int  # position of the assistant's last message; -1: there is none


def digest_request(messages: Sequence[Message], tools: Sequence[Tool]) -> Digests:
    """Raises RecursionError for tools nested more than some 900 levels deep."""
    chain = _digest_tools(tools)
    head, num_leading = chain, count_leading(messages)
    chains, last_assistant = [], -1
    for position, message in enumerate(messages):
        chain = link(chain, message)
        chains.append(chain)
        if position < num_leading:
            head = chain
        if message.role == "assistant":
            last_assistant = position
    return Digests(head, tuple(chains), last_assistant)


def head(messages: Sequence[Message], tools: Sequence[Tool]) -> bytes:
    """`digest_request(messages, tools).head`, without a look at the other messages."""
    return digest_request(messages[: count_leading(messages)], tools).head


def count_leading(messages: Sequence[Message]) -> int:
    """System messages that a conversation begins with."""
    others = (position for position, message in enumerate(messages) if message.role != "system")
    return next(others, len(messages))


def link(chain: bytes, message: Message) -> bytes:
    """The chain of a conversation with one more message."""
    hasher = blake2b(chain, digest_size=DIGEST_SIZE)
    hasher.update(canonical(message))
    return hasher.digest()


def canonical(message: Message) -> bytes:
    """The same bytes for the same messages, and for no others. Raises nothing, whatever the texts are."""
    parsed = [(call.id, call.name, _parse_object(call.arguments)) for call in message.tool_calls]
    try:
        return _dump((message.role, message.content, message.tool_call_id, parsed))
    except RecursionError:  # arguments nested so deeply are compared as text
        return _dump((message.role, message.content, message.tool_call_id, [*map(tuple, message.tool_calls)]))


def _digest_tools(tools: Sequence[Tool]) -> bytes:
    return blake2b(_dump(list(tools)), digest_size=DIGEST_SIZE, person=b"tools").digest()


def _parse_object(arguments: str) -> dict[str, Any] | str:
    """The object, or the text if it is none."""
    try:
        value = _parse(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _parse(text: str) -> Any:
    """Raises ValueError for what is no JSON, and for numbers that are not finite."""
    if _LONG_NUMBER not in text.encode(errors="surrogatepass").translate(_DIGITS_AS_ZEROS):
        with suppress(orjson.JSONDecodeError):  # it refuses escaped surrogates, which json reads
            return orjson.loads(text)
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is beyond a float")
    return value


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _dump(value: Any) -> bytes:
    """JSON. Raises RecursionError for what is nested too deeply."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # integers of more than 64 bits, surrogates, more than 254 levels
        return json.dumps(value, sort_keys=True, allow_nan=False).encode()
