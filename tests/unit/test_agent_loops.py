"""The built-in loops' parts: what the policy writes becomes calls and actions, whatever it is."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from atoll.agents.environment_loop import reset_state, with_observation
from atoll.agents.environments import ActionForm, ClassTextEpisode, Seen, ServerTextEpisode
from atoll.agents.toolbox import Toolbox, ToolSources, hidden_arguments, row_tools
from atoll.config.schema import SandboxConfig, ToolLoopConfig
from atoll.config.user_files import load_class
from atoll.external.base import Json, Observation, Tool, ToolResult
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.wire.types import ExternalServer, ServerAccess


class Echo:
    """A tool server that answers with its arguments."""

    def __init__(self, *names: str) -> None:
        self.names = names

    async def tools(self) -> tuple[Tool, ...]:
        return tuple(Tool(name, f"Does {name}.", {"type": "object"}) for name in self.names)

    async def call(self, name: str, arguments: Mapping[str, Json]) -> ToolResult:
        return ToolResult(f"{name} {json.dumps(arguments)}", is_error="wrong" in arguments)


class Clients:
    def __init__(self, **servers: Echo) -> None:
        self.servers = servers

    @asynccontextmanager
    async def tool_session(self, access: ServerAccess) -> AsyncIterator[Echo]:
        yield self.servers[access.server.name]


class Session:
    id = "run/0/0/0/0"

    def __init__(self, *names: str, **extra: str) -> None:
        self.servers = [ServerAccess(ExternalServer("tool", n, f"http://{n}", "mcp"), None) for n in names]
        self.extra = extra


@asynccontextmanager
async def toolbox(session: Session, max_result_chars: int = 100, **servers: Echo) -> AsyncIterator[Toolbox]:
    settings = ToolLoopConfig(servers=tuple(servers), max_result_chars=max_result_chars)
    sources = ToolSources(Clients(**servers), [], SandboxConfig(), settings)  # type: ignore[arg-type]
    async with sources.open(session) as opened:  # type: ignore[arg-type]
        yield opened


async def test_what_the_policy_writes_is_called_or_answered_with_what_is_wrong() -> None:
    async with toolbox(Session("a", "b"), a=Echo("look"), b=Echo("walk")) as tools:
        assert [schema["function"]["name"] for schema in tools.schemas()] == ["look", "walk"]
        assert tools.schemas()[0] == {
            "type": "function",
            "function": {"name": "look", "description": "Does look.", "parameters": {"type": "object"}},
        }
        assert await tools.call("walk", '{"to": "north"}') == 'walk {"to": "north"}'
        assert await tools.call("look", "") == "look {}"
        assert await tools.call("look", '{"wrong": 1}') == 'error: look {"wrong": 1}'
        assert await tools.call("fly", "{}") == "error: there is no tool fly; there is look, walk"
        assert (await tools.call("look", "{")).startswith("error: the arguments are not valid JSON")
        assert await tools.call("look", "[1]") == "error: the arguments are list, expected an object"
        assert (await tools.call("look", "[" * 100_000)).startswith("error: the arguments are not valid JSON")


async def test_long_results_are_cut() -> None:
    async with toolbox(Session("a"), max_result_chars=10, a=Echo("look")) as tools:
        text = await tools.call("look", json.dumps({"at": "x" * 100}))
    assert text == 'look {"at"\n[cut: the result has 115 characters]'


async def test_a_row_chooses_its_tools() -> None:
    schema = {"type": "function", "function": {"name": "walk", "parameters": {}}}
    for named in (["walk"], [schema]):
        async with toolbox(Session("a", tools=json.dumps(named)), a=Echo("look", "walk")) as tools:
            assert [each["function"]["name"] for each in tools.schemas()] == ["walk"]
    with pytest.raises(ValueError, match="the row names the tools fly, expected some of look"):
        async with toolbox(Session("a", tools='["fly"]'), a=Echo("look")):
            pass
    assert row_tools({}) == []


async def test_two_servers_may_not_offer_one_tool() -> None:
    with pytest.raises(ValueError, match="b: another server offers a tool look, too"):
        async with toolbox(Session("a", "b"), a=Echo("look"), b=Echo("look")):
            pass


def test_verls_create_kwargs_are_hidden_arguments() -> None:
    kwargs = {"grade": {"create_kwargs": {"ground_truth": "46", "level": 3}}}
    extra = {"level": "1", "tools_kwargs": json.dumps(kwargs)}
    assert hidden_arguments(extra, "grade") == {**extra, "ground_truth": "46", "level": "3"}
    assert hidden_arguments(extra, "look") == extra


def test_what_an_environment_is_reset_to() -> None:
    assert reset_state({}) == {}
    assert reset_state({"environment": '{"name": "maze", "seed": 3}'}) == {"name": "maze", "seed": 3}
    assert reset_state({"interaction_kwargs": '{"name": "gsm8k", "query": "1+1"}'}) == {"query": "1+1"}


def test_the_first_observation_continues_a_users_message() -> None:
    system, user = {"role": "system", "content": "Play."}, {"role": "user", "content": "Maze 7."}
    seen = {"role": "user", "content": "You see a door."}
    assert with_observation([system], "You see a door.") == [system, seen]
    assert with_observation([user], "You see a door.") == [
        {"role": "user", "content": "Maze 7.\nYou see a door."}
    ]
    assert with_observation([user], "") == [user]


class Game:
    """An environment server's episode that takes even numbers."""

    async def reset(self, arguments: Mapping[str, Json]) -> Observation:
        return Observation({"text": f"from {arguments['start']}", "board": [[0]]}, None, False)

    async def step(self, action: Mapping[str, Json]) -> Observation:
        move = action["move"]
        if move == 13:
            raise ServiceUnavailableError("gone")
        if not isinstance(move, int) or move % 2:
            raise UserError("odd")
        return Observation({"text": "fine", "board": [[move]]}, 0.5, move == 8)


async def test_replies_become_actions_and_observations_text() -> None:
    form = ActionForm("move", False, "one JSON value of type integer")
    episode = ServerTextEpisode(Game(), form, "")
    assert await episode.reset({"start": 3}) == Seen("from 3")
    assert await episode.step(" 4 ") == Seen("fine", 0.5)
    assert await episode.step("8") == Seen("fine", 0.5, True)
    invalid = Seen("invalid action: expected one JSON value of type integer")
    assert [await episode.step(reply) for reply in ("north", "3", "[" * 9999, "")] == [invalid] * 4
    with pytest.raises(ServiceUnavailableError):
        await episode.step("13")
    board = ServerTextEpisode(Game(), form, "board")
    assert (await board.step("2")).text == "[[2]]"


def test_an_action_of_several_fields_is_json() -> None:
    form = ActionForm("", True, "a JSON object with x, y")
    assert form.action('{"x": 1, "y": 2}') == {"x": 1, "y": 2}
    assert [form.action(reply) for reply in ("1", "x", "[]")] == [None] * 3
    assert ActionForm("answer", True, "").action("{}") == {"answer": "{}"}


async def test_a_class_as_gymnasium_has_them() -> None:
    environment: Any = load_class("examples/own_environment.py:Countdown")()
    episode = ClassTextEpisode(environment, seed=1)
    assert await episode.reset({"start": 2}) == Seen("Count down from 2, one number at a time.")
    assert await episode.step("1\n") == Seen("Next?", 1.0, False)
    assert await episode.step("0") == Seen("Next?", 1.0, True)
