"""OpenEnv environments: the frames of openenv-core 0.3, and servers that fail in the middle of an episode."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest

from atoll.external import openenv
from atoll.external.base import Observation
from atoll.external.protocols import connect
from atoll.runtime.errors import OverloadedError, ProtocolError, ServiceUnavailableError, UserError
from atoll.wire.types import (
    ExternalServer,
    Graded,
    GradingError,
    ScoreItem,
)
from tests import score_items
from tests.openenv_server import Theirs, openenv_server

TOKEN = "s3cr3t-t0k3n"


def item(index: int, response: str) -> ScoreItem:
    return score_items.item(index, response, a="b")


@pytest.fixture
async def theirs() -> AsyncIterator[tuple[str, Theirs]]:
    async with openenv_server(TOKEN) as (url, app):
        yield url, app


def env(url: str, **settings) -> Any:
    return connect(ExternalServer("env", "theirs", url, "openenv", **settings), TOKEN)


async def test_an_episode_is_a_connection_of_its_own(theirs: tuple[str, Theirs]) -> None:
    url, app = theirs
    client = env(url)
    assert await client.probe() == "actions of metadata, answer"
    async with client.episode() as first, client.episode() as second:
        assert await first.reset({"seed": 1}) == Observation({"given": {"seed": 1}}, None, False)
        await second.reset({"ground_truth": "b"})
        assert await first.step({"answer": "b"}) == Observation({"said": "b"}, 0.0, True)
        assert await second.step({"answer": "b"}) == Observation({"said": "b"}, 1.0, True)
        assert app.open == 2
    await client.close()
    assert set(app.authorizations) == {f"Bearer {TOKEN}"}
    assert app.farewells == 3  # of the probe's too


async def test_error_frames_say_whose_fault_it_is_and_the_episode_goes_on(theirs: tuple[str, Theirs]) -> None:
    client = env(theirs[0])
    async with client.episode() as episode:
        await episode.reset({})
        with pytest.raises(UserError, match=r"VALIDATION_ERROR.*schema"):
            await episode.step({"answer": "a", "thought": "b"})
        with pytest.raises(ProtocolError, match="EXECUTION_ERROR: 'boom ") as caught:
            await episode.step({"answer": "raise"})
        assert TOKEN not in str(caught.value)
        with pytest.raises(ServiceUnavailableError, match="SESSION_ERROR"):
            await episode.step({"answer": "broken"})
        assert (await episode.step({"answer": "yes"})).reward == 1.0
    await client.close()


@pytest.mark.parametrize("end", ["die", "leave"])
async def test_a_server_that_goes_in_the_middle_is_unavailable(theirs: tuple[str, Theirs], end: str) -> None:
    client = env(theirs[0])
    async with client.episode() as episode:
        await episode.reset({})
        with pytest.raises(ServiceUnavailableError, match="the connection ended"):
            await episode.step({"answer": end})
        with pytest.raises(ServiceUnavailableError):
            await episode.step({"answer": "yes"})
    await client.close()


async def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(theirs: tuple[str, Theirs]) -> None:
    client = env(theirs[0])
    async with client.episode() as episode:
        await episode.reset({})
        client._channel.server = replace(client.server, timeout_s=0.2)  # from here on: a reset is in time
        with pytest.raises(ServiceUnavailableError, match=r"no answer within 0\.2 s"):
            await episode.step({"answer": "hang"})
        with pytest.raises(ServiceUnavailableError, match="unanswered call"):
            await episode.step({"answer": "yes"})
    await client.close()


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        ({"type": "state", "data": {}}, "state"),
        ({"data": {}}, "type"),
        ({"type": "observation", "data": {}}, "observation: Field required"),
        ({"type": "observation", "data": {"observation": {}, "reward": "1"}}, "reward"),
        ({"type": "observation", "data": {"observation": {}, "reward": float("nan")}}, "reward"),
        ({"type": "observation", "data": {"observation": {}, "done": "yes"}}, "done"),
        ({"type": "observation", "data": {"observation": [1]}}, "observation"),
    ],
)
async def test_a_frame_of_another_form_is_refused(
    theirs: tuple[str, Theirs], frame: object, problem: str
) -> None:
    client = env(theirs[0])
    async with client.episode() as episode:
        await episode.reset({})
        with pytest.raises(ProtocolError, match=problem):
            await episode.step({"answer": json.dumps(frame)})
    await client.close()


async def test_a_frame_without_end_is_cut_off(theirs: tuple[str, Theirs], monkeypatch) -> None:
    monkeypatch.setattr(openenv, "MAX_ANSWER_BYTES", 100_000)
    client = env(theirs[0])
    async with client.episode() as episode:
        await episode.reset({})
        with pytest.raises(ProtocolError, match="more than 100,000 bytes"):
            await episode.step({"answer": "flood"})
    await client.close()


async def test_concurrency_counts_episodes_and_a_full_server_says_so(theirs: tuple[str, Theirs]) -> None:
    url, app = theirs

    async def one() -> None:
        async with client.episode() as episode:
            await episode.reset({})

    client = env(url, concurrency=3)
    await asyncio.gather(*(one() for _ in range(12)))
    assert app.most == 3
    app.capacity = 1
    async with client.episode() as episode:
        await episode.reset({})
        with pytest.raises(OverloadedError, match=r"CAPACITY_REACHED.*lower concurrency"):
            await one()
    await client.close()


@pytest.mark.parametrize(
    ("status", "error", "problem"),
    [
        (HTTPStatus.UNAUTHORIZED, UserError, "the token of `auth`"),
        (HTTPStatus.SERVICE_UNAVAILABLE, OverloadedError, "retry after '3'"),
        (HTTPStatus.INTERNAL_SERVER_ERROR, ServiceUnavailableError, "status 500"),
        (HTTPStatus.TEMPORARY_REDIRECT, ProtocolError, "redirect to 'ws://other/ws', which is not followed"),
        (HTTPStatus.NOT_FOUND, ProtocolError, "status 404, expected a WebSocket"),
    ],
)
async def test_a_connection_that_is_refused_says_why(
    theirs: tuple[str, Theirs], status: HTTPStatus, error: type[Exception], problem: str
) -> None:
    url, app = theirs
    app.status = status
    client = env(url)
    with pytest.raises(error, match=problem):
        async with client.episode():
            pass
    await client.close()
    assert len(app.authorizations) == 1


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    client = env("http://127.0.0.1:1")
    with pytest.raises(ServiceUnavailableError, match="no connection"):
        async with client.episode():
            pass
    await client.close()


async def test_a_reward_is_that_of_an_episode_of_one_step(theirs: tuple[str, Theirs]) -> None:
    url, app = theirs
    judge = connect(ExternalServer("reward", "judge", url, "openenv"), TOKEN)
    assert await judge.probe() == "episodes of one step, the response as answer: graded the probe 1"
    responses = ["46", "45", "yes", "None", "die", "raise"]
    right, wrong, true, none, dead, failed = await judge.score([item(n, r) for n, r in enumerate(responses)])
    assert [right, wrong, true] == [
        Graded(item(n, "").id, value, {}) for n, value in enumerate([1.0, 0.0, 1.0])
    ]
    assert isinstance(none, GradingError)
    assert "no reward after one step" in none.cause
    assert isinstance(dead, GradingError)
    assert dead.retryable
    assert isinstance(failed, GradingError)
    assert not failed.retryable
    assert app.open == 0
    await judge.close()


@pytest.mark.parametrize(
    ("action", "field"),
    [
        ({"properties": {"answer": {}, "thought": {}}, "required": ["answer", "thought"]}, ""),
        ({"properties": {"answer": {}, "thought": {}}, "required": ["answer", "thought"]}, "answer"),
        ({"properties": {"answer": {}, "thought": {}}, "required": []}, ""),
        ({"properties": {"answer": {}}, "required": ["answer"]}, "response"),
    ],
)
async def test_an_action_that_a_response_does_not_make_is_refused(
    theirs: tuple[str, Theirs], action: object, field: str
) -> None:
    url, app = theirs
    app.schema = {"action": action}
    judge = connect(
        ExternalServer("reward", "judge", url, "openenv", {"field": field} if field else {}), TOKEN
    )
    with pytest.raises(UserError, match="actions have the fields answer"):
        await judge.probe()
    await judge.close()
