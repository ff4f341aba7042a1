"""The built-in environment loop: each reply of the policy is an action, each observation the next message."""

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import openai

from atoll.agents.chat import complete
from atoll.agents.environments import TextEpisode, class_episode, server_episode
from atoll.agents.runner import AgentFunction
from atoll.agents.server_clients import ServerClients
from atoll.agents.session import AgentSession
from atoll.config.schema import EnvironmentLoopConfig
from atoll.config.user_files import load_class
from atoll.external.base import Json

OpenEpisode = Callable[[AgentSession], AbstractAsyncContextManager[TextEpisode]]
COMPONENT = "environment"  # of its rewards


def environment_loop(settings: EnvironmentLoopConfig, clients: ServerClients) -> AgentFunction:
    """Raises ConfigError if the user's class cannot be loaded."""
    if settings.environment:
        return _loop(partial(class_episode, environment=load_class(settings.environment)))
    return _loop(partial(server_episode, settings=settings, clients=clients))


def _loop(open_episode: OpenEpisode) -> AgentFunction:
    async def play(session: AgentSession) -> None:
        """Each turn gets the reward of its step. An episode that a rule ends keeps what it was rewarded with
        so far; one that the environment ends without any reward has none, which is an error."""
        async with open_episode(session) as episode:
            seen = await episode.reset(reset_state(session.extra))
            messages = with_observation(session.messages, seen.text)
            rewards: list[float] = []
            while not seen.done:
                try:
                    reply = await complete(session, messages)
                except openai.PermissionDeniedError:
                    break
                text = reply.choices[0].message.content or ""
                seen = await episode.step(text)
                if seen.reward is not None:
                    rewards.append(seen.reward)
                    if seen.reward != 0:
                        await session.reward(seen.reward, turn=reply.id, component=COMPONENT)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": seen.text}]
            if not any(rewards) and (rewards or not seen.done):
                await session.reward(0.0, component=COMPONENT)

    return play


def reset_state(extra: Mapping[str, str]) -> Mapping[str, Json]:
    """The row's `environment`, or what verl calls `interaction_kwargs`, without the name."""
    state: dict[str, Json] = json.loads(extra.get("environment") or extra.get("interaction_kwargs") or "{}")
    return state if "environment" in extra else {key: value for key, value in state.items() if key != "name"}


def with_observation(messages: list[dict[str, Any]], text: str) -> list[Any]:
    """The first observation continues a user's last message, since some templates refuse two in a row."""
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    last = messages[-1]
    return [*messages[:-1], {**last, "content": "\n".join(filter(None, (last["content"], text)))}]
