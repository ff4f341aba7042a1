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

from atoll.external.answers import Answer, Number, Options, each, hidden, read_answer, read_options, shown
from atoll.external.base import MAX_ANSWER_BYTES, Json, Observation
from atoll.external.channel import Channel, bearer, refusal
from atoll.external.probes import probe_reward
from atoll.runtime.errors import (
    AtollError,
    BadAnswerError,
    OverloadedError,
    ServiceUnavailableError,
    UserError,
)
from atoll.wire.types import ExternalServer, Graded, ScoreItem, Verdict

FAREWELL_S = 1.0
TOO_BIG = 1009  # our side closes a connection with it


class _ActionSchema(Answer):
    properties: dict[str, JsonValue] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class _Schema(Answer):
    action: _ActionSchema


class _Step(Answer):
    observation: dict[str, JsonValue]
    reward: Number | StrictBool | None = None
    done: StrictBool = False


class _Observed(Answer):
    type: Literal["observation"]
    data: _Step


class _Problem(Answer):
    message: str = ""
    code: str = ""


class _Failed(Answer):
    type: Literal["error"]
    data: _Problem


_SCHEMA = TypeAdapter(_Schema)
_FRAME: TypeAdapter[_Observed | _Failed] = TypeAdapter(
    Annotated[_Observed | _Failed, Field(discriminator="type")]
)


class OpenEnvEnv:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        read_options(server, TypeAdapter(Options))
        self.server = server
        self._channel = Channel(server, token)

    async def probe(self) -> str:
        schema = await self._channel.get("/schema", _SCHEMA)
        async with self.episode() as episode:
            await episode.reset({})
        return f"actions of {', '.join(schema.action.properties) or 'no field'}"

    @asynccontextmanager
    async def episode(self) -> AsyncIterator["OpenEnvEpisode"]:
        async with _episode(self._channel) as episode:
            yield episode

    async def close(self) -> None:
        await self._channel.close()


class RewardOptions(Options):
    field: str = ""  # of the action, that holds the response; "": the only one that it requires


class OpenEnvReward:
    def __init__(self, server: ExternalServer, token: str | None) -> None:
        self.server = server
        self._channel = Channel(server, token)
        self._option = read_options(server, TypeAdapter(RewardOptions)).field
        self._field = ""  # once /schema was read

    async def probe(self) -> str:
        return f"episodes of one step, the response as {await self._find_field()}: {await probe_reward(self)}"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """Environments that take them read prompt, ground truth and the item's further fields at reset."""
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
                raise BadAnswerError(
                    f"{self._channel.where}: got no reward after one step, expected a number"
                )
            return Graded(item.id, step.reward, {})

        return await each(self.server, items, grade)

    async def close(self) -> None:
        await self._channel.close()

    async def _find_field(self) -> str:
        """Raises UserError where an action cannot be made of a response alone."""
        action = (await self._channel.get("/schema", _SCHEMA)).action
        field = self._option or (action.required[0] if len(action.required) == 1 else "")
        if field not in action.properties or not {field}.issuperset(action.required):
            raise UserError(
                f"{self._channel.where}: option field = {self._option!r}: its actions have the fields "
                f"{', '.join(action.properties) or '(none)'} and require "
                f"{', '.join(action.required) or '(none)'}; "
                "expected one field that holds the response, and no other that is required"
            )
        self._field = field
        return field


class OpenEnvEpisode:
    """One frame is answered by one; the connection is of no use after an answer that did not come in time."""

    def __init__(self, channel: Channel, socket: ClientConnection) -> None:
        self._channel = channel
        self._socket = socket
        self._in_step = True  # question and answer alternate

    async def reset(self, arguments: Mapping[str, Json]) -> Observation:
        return await self._ask("reset", arguments)

    async def step(self, action: Mapping[str, Json]) -> Observation:
        """Raises UserError where the environment's actions are not of that form."""
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: Mapping[str, Json]) -> Observation:
        where = f"{self._channel.where}: {kind}"
        if not self._in_step:
            raise ServiceUnavailableError(f"{where}: the episode ended with a call that was not answered")
        self._in_step = False
        try:
            async with self._channel.deadline():
                with suppress(ConnectionClosed):  # what the server said before it closed is still to be read
                    await self._socket.send(json.dumps({"type": kind, "data": dict(data)}))
                frame = await self._socket.recv()
        except ConnectionClosed as error:
            raise self._closed(where, error) from None
        self._in_step = True
        answer = read_answer(where, frame, _FRAME, self._channel.token)
        if isinstance(answer, _Failed):
            raise self._failed(where, answer.data)
        step = answer.data
        return Observation(step.observation, None if step.reward is None else float(step.reward), step.done)

    def _closed(self, where: str, error: ConnectionClosed) -> AtollError:
        if error.sent is not None and error.sent.code == TOO_BIG:
            return BadAnswerError(
                f"{where}: got a frame of more than {MAX_ANSWER_BYTES:,} bytes, expected less"
            )
        return ServiceUnavailableError(
            f"{where}: the connection ended: {hidden(str(error), self._channel.token)}"
        )

    def _failed(self, where: str, problem: _Problem) -> AtollError:
        text = f"{where}: got error {problem.code}: {shown(problem.message, self._channel.token)}"
        match problem.code:
            case "CAPACITY_REACHED":
                return OverloadedError(f"{text}; register it with a lower concurrency")
            case "VALIDATION_ERROR":
                return UserError(f"{text}; GET /schema says what it takes")
            case "FACTORY_ERROR" | "SESSION_ERROR":
                return ServiceUnavailableError(text)
        return BadAnswerError(text)


class _Connect(connect):
    def process_redirect(self, exc: Exception) -> Exception:
        return exc  # the token is for this address alone


@asynccontextmanager
async def _episode(channel: Channel) -> AsyncIterator[OpenEnvEpisode]:
    async with channel.slots:
        socket = await _open(channel)
        try:
            yield OpenEnvEpisode(channel, socket)
        finally:
            await _leave(socket)


async def _leave(socket: ClientConnection) -> None:
    """openenv-core logs a traceback for each client that goes without a word."""
    with suppress(TimeoutError, ConnectionClosed):
        async with asyncio.timeout(FAREWELL_S):
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
                close_timeout=FAREWELL_S,
                **channel.elsewhere(),
            )
    except InvalidStatus as error:
        response = error.response
        failed = refusal(channel.where, response.status_code, response.headers, channel.token)
        raise failed or BadAnswerError(
            f"{channel.where}: /ws: got status {response.status_code}, expected a WebSocket"
        ) from None
    except (OSError, EOFError, InvalidHandshake) as error:
        reason = hidden(str(error), channel.token)
        raise ServiceUnavailableError(f"{channel.where}: /ws: no connection: {reason}") from None
