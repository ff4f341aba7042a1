"""Environments that speak text, for the built-in environment loop: a server's, or a class of the user's."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.agents.server_clients import ServerClients
from atoll.agents.session import AgentSession, EnvironmentFailedError
from atoll.config.schema import EnvironmentLoopConfig
from atoll.external.base import EnvServer, Json, Observation
from atoll.external.base import Episode as ServerEpisode
from atoll.runtime.errors import AtollError, UserError


@dataclass(frozen=True, slots=True)
class Seen:
    """What an environment answers."""

    text: str
    reward: float | None = None
    done: bool = False


class TextEpisode(Protocol):
    """Raises EnvironmentFailedError if the environment fails."""

    async def reset(self, state: Mapping[str, Json]) -> Seen: ...

    async def step(self, reply: str) -> Seen: ...


@asynccontextmanager
async def server_episode(
    session: AgentSession, settings: EnvironmentLoopConfig, clients: ServerClients
) -> AsyncIterator[TextEpisode]:
    """On the environment server that the session occupies."""
    [access] = [access for access in session.servers if access.server.kind == "env"]
    server = await clients.environment(access)
    try:
        form = await _form(server, settings)  # beforehand, since the episode may take the server's last slot
        async with server.episode() as episode:
            yield ServerTextEpisode(episode, form, settings.observation)
    except AtollError as error:
        raise EnvironmentFailedError(str(error)) from error


@dataclass(frozen=True, slots=True)
class ActionForm:
    """How a reply becomes an action."""

    field: str  # that holds it; "": the reply is the action, as a JSON object
    is_text: bool
    expected: str  # in words, for the policy

    def action(self, reply: str) -> Mapping[str, Json] | None:
        """None: the reply is no action."""
        if self.field and self.is_text:
            return {self.field: reply}
        try:
            value = json.loads(reply)
        except (ValueError, RecursionError):
            return None
        if self.field:
            return {self.field: value}
        return value if isinstance(value, dict) else None


async def _form(server: EnvServer, settings: EnvironmentLoopConfig) -> ActionForm:
    schema: Mapping[str, Any] = await server.action_schema()
    properties, required = schema["properties"], schema["required"]
    field = settings.action or (required[0] if len(required) == 1 else "")
    if not field:
        return ActionForm("", False, f"a JSON object with {', '.join(properties) or 'no field'}")
    if field not in properties:
        raise UserError(
            f"{server.server}: agents.environment.action = {field!r}: its actions have the fields "
            f"{', '.join(properties) or '(none)'}"
        )
    kind = properties[field].get("type", "string")
    return ActionForm(field, kind == "string", f"one JSON value of type {kind}")


class ServerTextEpisode:
    def __init__(self, episode: ServerEpisode, form: ActionForm, field: str) -> None:
        self._episode = episode
        self._form = form
        self._field = field

    async def reset(self, state: Mapping[str, Json]) -> Seen:
        return self._seen(await self._episode.reset(state))

    async def step(self, reply: str) -> Seen:
        """A reply that is no valid action changes nothing: the policy is told so."""
        action = self._form.action(reply)
        if action is not None:
            with suppress(UserError):  # the environment finds it invalid: the policy is told below
                return self._seen(await self._episode.step(action))
        return Seen(f"invalid action: expected {self._form.expected}")

    def _seen(self, observation: Observation) -> Seen:
        content = observation.content
        texts = [value for value in content.values() if isinstance(value, str)]
        if self._field:
            shown: object = content.get(self._field, "")
        else:
            shown = texts[0] if len(texts) == 1 else content
        return Seen(_as_text(shown), observation.reward, observation.done)


@asynccontextmanager
async def class_episode(session: AgentSession, environment: type[Any]) -> AsyncIterator[TextEpisode]:
    """Of a class as Gymnasium has them, with text as observations and actions. Its methods run in threads."""
    try:
        made = await asyncio.to_thread(environment)
    except Exception as error:  # users' code may raise anything
        raise _failed(environment, error) from error
    try:
        yield ClassTextEpisode(made, session.row_number)
    finally:
        if hasattr(made, "close"):
            await asyncio.to_thread(made.close)


class ClassTextEpisode:
    def __init__(self, environment: Any, seed: int) -> None:
        """`seed`: of the row, so that the samples of a group begin in the same state."""
        self._environment = environment
        self._seed = seed

    async def reset(self, state: Mapping[str, Json]) -> Seen:
        observation, _ = await self._call("reset", seed=self._seed, options=dict(state))
        return Seen(_as_text(observation))

    async def step(self, reply: str) -> Seen:
        observation, reward, terminated, truncated, _ = await self._call("step", reply)
        return Seen(_as_text(observation), float(reward), bool(terminated or truncated))

    async def _call(self, method: str, *arguments: object, **options: object) -> Any:
        try:
            return await asyncio.to_thread(getattr(self._environment, method), *arguments, **options)
        except Exception as error:  # users' code may raise anything
            raise _failed(type(self._environment), error) from error


def _failed(environment: type[Any], error: Exception) -> EnvironmentFailedError:
    return EnvironmentFailedError(f"{environment.__name__}: {type(error).__name__}: {error}")


def _as_text(observation: object) -> str:
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, ensure_ascii=False, default=str)
