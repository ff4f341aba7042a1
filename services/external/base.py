"""Clients of external servers, independent of their protocol.

One file per protocol, with a client built from an `ExternalServer` and its bearer token (or None). A client
belongs to one event loop, makes at most `server.concurrency` concurrent calls, each with a timeout of
`server.timeout_s`, and raises

- UserError if the server's options are invalid for the protocol, or if it rejects the token,
- ServiceUnavailableError if the server does not answer in time, or not at all: another one may,
- ProtocolError if its response violates the protocol: it is unusable until it is fixed.

Responses are read up to MAX_ANSWER_BYTES and validated by a pydantic model; other fields are ignored.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from atoll.wire.types import ExternalServer, ScoreItem, Verdict

MAX_ANSWER_BYTES = 16 << 20

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def item_fields(item: ScoreItem) -> dict[str, Json]:
    """An item's fields, under the names in server protocols; other fields are in `item.extra`."""
    return {
        "prompt": item.prompt,
        "response": item.response,
        "ground_truth": item.ground_truth,
        "data_source": item.data_source,
        "finish_reason": item.finish_reason.value,
        "response_length": item.response_length,
    }


class ExternalClient(Protocol):
    server: ExternalServer

    async def probe(self) -> str:
        """A cheap call that shows that the server speaks the protocol; returns a description."""
        ...

    async def close(self) -> None: ...


class RewardServer(ExternalClient, Protocol):
    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """One verdict per item, in their order."""
        ...


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    schema: Mapping[str, Json]  # JSON schema of its arguments


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str  # what the model reads
    is_error: bool = False  # the tool failed; the text says why


class ToolSession(Protocol):
    async def tools(self) -> tuple[Tool, ...]: ...

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult: ...


class ToolServer(ExternalClient, Protocol):
    def session(self) -> AbstractAsyncContextManager[ToolSession]:
        """The calls of one agent, between which the server may keep state, until the context exits."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    content: Mapping[str, Json]
    reward: float | None
    done: bool


class Episode(Protocol):
    async def reset(self, arguments: Mapping[str, Json]) -> Observation: ...

    async def step(self, action: Mapping[str, Json]) -> Observation: ...


class EnvServer(ExternalClient, Protocol):
    async def action_schema(self) -> Mapping[str, Json]:
        """JSON schema of an action."""
        ...

    def episode(self) -> AbstractAsyncContextManager[Episode]:
        """A separate environment until the context exits."""
        ...
