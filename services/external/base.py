"""What the run asks of other people's servers, whatever protocol they speak.

One file of this package per protocol; each holds a client that is built from an `ExternalServer` and the
bearer token, or None. A client is used by one event loop, makes at most `server.concurrency` calls at once
and gives each `server.timeout_s`. It raises

- UserError where the server's options are not those of the protocol, or it wants another token,
- ServiceUnavailableError where the server does not answer in time, or not at all: another one may,
- BadAnswerError where what it answers is not what the protocol says: it is of no use until it is mended.

An answer is read up to MAX_ANSWER_BYTES and validated by a pydantic model; nothing else of it is believed.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from atoll.wire.types import ExternalServer, ScoreItem, Verdict

MAX_ANSWER_BYTES = 16 << 20

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def item_fields(item: ScoreItem) -> dict[str, Json]:
    """What an item holds, by the names that servers know it under; its further fields are `item.extra`."""
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
        """Asks what costs the server little and shows that it speaks the protocol; says what was found."""
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
    is_error: bool = False  # the tool failed at what it was asked: the model reads why


class ToolServer(ExternalClient, Protocol):
    async def tools(self) -> tuple[Tool, ...]: ...

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult: ...


@dataclass(frozen=True, slots=True)
class Observation:
    content: Mapping[str, Json]
    reward: float | None
    done: bool


class Episode(Protocol):
    async def reset(self, arguments: Mapping[str, Json]) -> Observation: ...

    async def step(self, action: Mapping[str, Json]) -> Observation: ...


class EnvServer(ExternalClient, Protocol):
    def episode(self) -> AbstractAsyncContextManager[Episode]:
        """An environment of its own until it is left."""
        ...
