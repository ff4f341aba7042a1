"""Environments of OpenEnv: an episode is a WebSocket at /ws.

A frame is `{"type": "reset" | "step" | "close", "data": {...}}`; the first two are answered by
`{"type": "observation", "data": {"observation", "reward", "done"}}` or by
`{"type": "error", "data": {"message", "code"}}`. A server's actions forbid fields that they do not have;
GET /schema says which they have. (POST /reset and /step keep no state, and are of no use here.) As a reward
server an environment grades by an episode of one step.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Literal

from pydantic import Field, JsonValue, StrictBool, TypeAdapter
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from atoll.external.base import MAX_ANSWER_BYTES, Json, Observation
from atoll.external.channel import Channel, bearer, status_error
from atoll.external.probes import probe_reward
from atoll.external.responses import (
    Number,
    OptionsModel,
    ResponseModel,
    excerpt,
    grade_each,
    parse_options,
    parse_response,
    redact,
)
from atoll.runtime.errors import (
    AtollError,
    OverloadedError,
    ProtocolError,
    ServiceUnavailableError,
    UserError,
)
from atoll.wire.types import ExternalServer, Graded, ScoreItem, Verdict

CLOSE_TIMEOUT_S = 1.0
TOO_BIG = 1009  # code with which our side closes a connection


class _ActionSchema(ResponseModel):
    properties: dict[str, JsonValue] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class _Schema(ResponseModel):
    action: _ActionSchema


class _StepResult(ResponseModel):
    observation: dict[str, JsonValue]
    reward: Number | StrictBool | None = None
    done: StrictBool = False


class _ObservationFrame(ResponseModel):
    type: Literal["observation"]
    data: _StepResult


class _ErrorDetails(ResponseModel):
    message: str = ""
    code: str = ""


class _ErrorFrame(ResponseModel):
    type: Literal["error"]
    data: _ErrorDetails


_SCHEMA = TypeAdapter(_Schema)
_FRAME: TypeAdapter[_ObservationFrame | _ErrorFrame] = TypeAdapter(
    Annotated[_ObservationFrame | _ErrorFrame, Field(discriminator="type")]
)


class OpenEnvEnv:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        parse_options(server, TypeAdapter(OptionsModel))
        self.server = server
        self._channel = Channel(server, token)
        self._actions: dict[str, Json] | None = None  # once /schema was read

    async def probe(self) -> str:
        schema = await self._channel.get("/schema", _SCHEMA)
        async with self.episode() as episode:
            await episode.reset({})
        return f"actions of {', '.join(schema.action.properties) or 'no field'}"

    async def action_schema(self) -> Mapping[str, Json]:
        if self._actions is None:
            self._actions = (await self._channel.get("/schema", _SCHEMA)).action.model_dump()
        return self._actions

    @asynccontextmanager
    async def episode(self) -> AsyncIterator["OpenEnvEpisode"]:
        async with _episode(self._channel) as episode:
            yield episode

    async def close(self) -> None:
        await self._channel.close()


class OpenEnvRewardOptions(OptionsModel):
    field: str = ""  # action field for the response; "": the only required one


class OpenEnvReward:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        self.server = server
        self._channel = Channel(server, token)
        self._option = parse_options(server, TypeAdapter(OpenEnvRewardOptions)).field
        self._field = ""  # once /schema was read

    async def probe(self) -> str:
        return f"episodes of one step, the response as {await self._find_field()}: {await probe_reward(self)}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """Prompt, ground truth and the item's other fields are passed at reset."""
        field = self._field or await self._find_field()

        async def grade(item: ScoreItem) -> Verdict:
            async with _episode(self._channel) as episode:
                await episode.reset(
                    {
                        **item.extra,
                        "prompt": item.prompt,
                        "ground_truth": item.ground_truth,
                        "data_source": item.data_source,
                    }
                )
                step = await episode.step({field: item.response})
            if step.reward is None:
                raise ProtocolError(f"{self._channel.where}: got no reward after one step, expected a number")
            return Graded(item.id, step.reward, {})

        return await grade_each(self.server, items, grade)

    async def close(self) -> None:
        await self._channel.close()

    async def _find_field(self) -> str:
        """Raises UserError if an action needs more than the response."""
        action = (await self._channel.get("/schema", _SCHEMA)).action
        field = self._option or (action.required[0] if len(action.required) == 1 else "")
        if field not in action.properties or not {field}.issuperset(action.required):
            raise UserError(
                f"{self._channel.where}: option field = {self._option!r}: its actions have the fields "
                f"{', '.join(action.properties) or '(none)'} and require "
                f"{', '.join(action.required) or '(none)'}; expected one field that holds the response, and "
                "no other that is required"
            )
        self._field = field
        return field


class OpenEnvEpisode:
    """Each frame gets one response; the connection is unusable after a timeout."""

    def __init__(self, channel: Channel, socket: ClientConnection) -> None:
        self._channel = channel
        self._socket = socket
        self._in_step = True  # requests and responses alternate

    async def reset(self, arguments: Mapping[str, Json]) -> Observation:
        return await self._ask("reset", arguments)

    async def step(self, action: Mapping[str, Json]) -> Observation:
        """Raises UserError if the environment's actions are not of that form."""
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: Mapping[str, Json]) -> Observation:
        where = f"{self._channel.where}: {kind}"
        if not self._in_step:
            raise ServiceUnavailableError(f"{where}: the episode ended with an unanswered call")
        self._in_step = False
        try:
            async with self._channel.deadline():
                with suppress(ConnectionClosed):  # read what the server sent before it closed
                    await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                frame = await self._socket.recv()
        except ConnectionClosed as error:
            raise self._connection_error(where, error) from None
        self._in_step = True
        answer = parse_response(where, frame, _FRAME, self._channel.token)
        if isinstance(answer, _ErrorFrame):
            raise self._server_error(where, answer.data)
        step = answer.data
        return Observation(step.observation, None if step.reward is None else float(step.reward), step.done)

    def _connection_error(self, where: str, error: ConnectionClosed) -> AtollError:
        if error.sent is not None and error.sent.code == TOO_BIG:
            return ProtocolError(
                f"{where}: got a frame of more than {MAX_ANSWER_BYTES:,} bytes, expected less"
            )
        return ServiceUnavailableError(
            f"{where}: the connection ended: {redact(str(error), self._channel.token)}"
        )

    def _server_error(self, where: str, problem: _ErrorDetails) -> AtollError:
        text = f"{where}: got error {problem.code}: {excerpt(problem.message, self._channel.token)}"
        match problem.code:
            case "CAPACITY_REACHED":
                return OverloadedError(f"{text}; register it with a lower concurrency")
            case "VALIDATION_ERROR":
                return UserError(f"{text}; GET /schema says what it takes")
            case "FACTORY_ERROR" | "SESSION_ERROR":
                return ServiceUnavailableError(text)
        return ProtocolError(text)


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        return exc  # the token is only for this address


@asynccontextmanager
async def _episode(channel: Channel) -> AsyncIterator[OpenEnvEpisode]:
    async with channel.slots:
        socket = await _open(channel)
        try:
            yield OpenEnvEpisode(channel, socket)
        finally:
            await _leave(socket)


async def _leave(socket: ClientConnection) -> None:
    """Says goodbye, since openenv-core logs a traceback for clients that just disconnect."""
    with suppress(TimeoutError, ConnectionClosed):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await socket.send('{"type": "close"}')
            await socket.wait_closed()
    await socket.close()


async def _open(channel: Channel) -> ClientConnection:
    address = "ws" + channel.address("/ws").removeprefix("http")
    try:
        async with channel.deadline():
            return await _Connect(
                address,
                additional_headers=bearer(channel.token),
                max_size=MAX_ANSWER_BYTES,
                compression=None,
                proxy=None,
                open_timeout=None,
                close_timeout=CLOSE_TIMEOUT_S,
                **channel.websocket_arguments(),
            )
    except InvalidStatus as error:
        response = error.response
        failed = status_error(channel.where, response.status_code, response.headers, channel.token)
        raise failed or ProtocolError(
            f"{channel.where}: /ws: got status {response.status_code}, expected a WebSocket"
        ) from None
    except (OSError, EOFError, InvalidHandshake) as error:
        reason = redact(str(error), channel.token)
        raise ServiceUnavailableError(f"{channel.where}: /ws: no connection: {reason}") from None
