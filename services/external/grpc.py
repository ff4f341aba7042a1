"""Servers that speak package atoll.v1: a reward server has Score and Describe, a tool server Execute."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import grpc
import grpc.aio
from pydantic import TypeAdapter, ValidationError

from atoll.external.base import Json, Tool, ToolResult
from atoll.external.responses import OptionsModel, parse_options, redact, sanitize
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import (
    AtollError,
    OverloadedError,
    ProtocolError,
    ServiceUnavailableError,
    UnauthenticatedError,
    UserError,
)
from atoll.wire.types import (
    Execution,
    ExternalServer,
    Graded,
    GradingError,
    ProgramLimits,
    ProgramStatus,
    ScoreItem,
    Verdict,
)

MAX_DETAIL_CHARACTERS = 500  # of an error message


Client = TypeVar("Client", RewardClient, TrainerClient)


class Connection(Generic[Client]):
    """The client of one server, and slots that limit concurrency."""

    def __init__(
        self, server: ExternalServer, token: str | None, client: Callable[[str, Caller, float], Client]
    ) -> None:
        self.where = str(server)
        self._token = token
        self._client: Client = client(_address(server), Caller(token=token), server.timeout_s)
        self._slots = asyncio.Semaphore(server.concurrency)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Client]:
        """Waits for a slot; translates errors of the call to those of base.py."""
        async with self._slots:
            try:
                yield self._client
            except AtollError as error:
                raise self._translate(error) from None

    async def close(self) -> None:
        await self._client.close()

    def fit(self, verdict: Verdict) -> Verdict:
        """The verdict with sanitized texts."""
        if isinstance(verdict, GradingError):
            return replace(verdict, cause=sanitize(verdict.cause, self._token))
        return verdict._replace(
            reasons={name: sanitize(reason, self._token) for name, reason in verdict.reasons.items()}
        )

    def _translate(self, error: AtollError) -> AtollError:
        text = f"{self.where}: {redact(str(error), self._token)[:MAX_DETAIL_CHARACTERS]}"
        status = error.__cause__.code() if isinstance(error.__cause__, grpc.aio.AioRpcError) else None
        if isinstance(error, UnauthenticatedError) or status in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.PERMISSION_DENIED,
        ):
            return UserError(f"{text}: the token of `auth` is missing or wrong")
        if isinstance(error, OverloadedError) or status is grpc.StatusCode.RESOURCE_EXHAUSTED:
            return OverloadedError(text)
        if isinstance(error, ServiceUnavailableError):
            return ServiceUnavailableError(text)
        return ProtocolError(text)


class GrpcReward:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        parse_options(server, TypeAdapter(OptionsModel))
        self.server = server
        self._connection = Connection(server, token, RewardClient)

    async def probe(self) -> str:
        async with self._connection.slot() as client:
            graders = (await client.describe()).graders
        return f"graders {', '.join(graders) or 'without names'}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        async with self._connection.slot() as client:
            verdicts = await client.score(items)
        where = self._connection.where
        by_id = {verdict.id: verdict for verdict in verdicts}
        if len(by_id) != len(verdicts):
            raise ProtocolError(f"{where}: got two verdicts on one item, expected one per item")
        missing = [str(item.id) for item in items if item.id not in by_id]
        if missing:
            raise ProtocolError(
                f"{where}: got no verdict on {', '.join(missing[:3])}, expected one per item item"
            )
        for verdict in verdicts:
            if isinstance(verdict, Graded):
                for name, value in {"value": verdict.value, **verdict.components}.items():
                    if not math.isfinite(value):
                        raise ProtocolError(f"{where}: got {name} {value}, expected a finite number")
        return [self._connection.fit(by_id[item.id]) for item in items]

    async def close(self) -> None:
        await self._connection.close()


class _Code(OptionsModel):
    """Arguments of the tool."""

    code: str


class GrpcTool:
    """One tool, "python": runs a program in a sandbox of a reward service."""

    def __init__(self, server: ExternalServer, token: str | None) -> None:
        parse_options(server, TypeAdapter(OptionsModel))
        self.server = server
        self._connection = Connection(server, token, RewardClient)

    async def probe(self) -> str:
        result = await self.call("python", {"code": "print(17 + 29)"})
        if result != ToolResult("46\n"):
            raise ProtocolError(
                f"{self._connection.where}: got {result} from print(17 + 29), expected 46; see its sandbox"
            )
        return "runs Python"

    @asynccontextmanager
    async def session(self) -> AsyncIterator["GrpcTool"]:
        yield self

    async def tools(self) -> tuple[Tool, ...]:
        return (
            Tool(
                "python",
                "Runs a Python program in a sandbox and returns what it prints.",
                _Code.model_json_schema(),
            ),
        )

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        if name != "python":
            return ToolResult(f"there is no tool {name}; there is python", is_error=True)
        try:
            code = _Code.model_validate(dict(arguments)).code
        except ValidationError:
            return ToolResult(
                f"got arguments {', '.join(arguments) or 'none'}, expected code, a string", is_error=True
            )
        async with self._connection.slot() as client:
            return _tool_result(await client.execute(code, b"", ProgramLimits()))

    async def close(self) -> None:
        await self._connection.close()


def _tool_result(execution: Execution) -> ToolResult:
    printed = (execution.stdout + execution.stderr).decode(errors="replace")
    if execution.status is ProgramStatus.OK:
        return ToolResult(printed)
    end = f"{execution.status.value}: {execution.detail}" if execution.detail else execution.status.value
    return ToolResult(f"{printed}\n[{end}]", is_error=True)


def _address(server: ExternalServer) -> str:
    found = re.fullmatch(r"(?:grpc://)?([^/@?#]+:\d+)", server.url)
    if found is None:
        raise UserError(
            f'{server.kind} server {server.name}: expected url = "HOST:PORT" or "grpc://HOST:PORT"'
        )
    if not server.address:
        return found[1]
    host = f"[{server.address}]" if ":" in server.address else server.address
    return f"{host}:{found[1].rpartition(':')[2]}"
