"""Agent functions: how they end, and that none of them holds up the others' service."""

import asyncio
import gc
import math
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import openai
import pytest

from atoll.agents import runner as runners
from atoll.agents.runner import AgentRunner, HostedAgent
from atoll.agents.session import AgentSession, EnvironmentFailedError
from atoll.runtime.errors import UserError
from atoll.wire.types import AgentOutcome, AgentTask, GroupId, Message, SampleId, SessionId, ToolCall
from tests.http_servers import Request, raw_http

HANG_S = 30


def session_id(index: int = 0) -> SessionId:
    return SessionId(SampleId(GroupId("toy", 0, 7), index), 0)


def task(index: int = 0, agent: str = "mine", url: str = "http://gateway:1") -> AgentTask:
    return AgentTask(
        session=session_id(index),
        agent=agent,
        url=url,
        agent_key="agent-key",
        reward_key="reward-key",
        model="toy",
        messages=(Message("system", "add"), Message("user", "1+1=")),
        ground_truth="2",
        data_source="sums",
        extra={"level": "3"},
    )


@asynccontextmanager
async def running(function: Callable[[AgentSession], Awaitable[object]]) -> AsyncIterator[AgentRunner]:
    runner = AgentRunner({"mine": HostedAgent(function, concurrency=8)})
    async with asyncio.timeout(HANG_S):
        yield runner
        await runner.close()


async def outcome(function: Callable[[AgentSession], Awaitable[object]]) -> AgentOutcome:
    async with running(function) as runner:
        return await runner.run(task())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, AgentOutcome()),
        (0.5, AgentOutcome(reward=0.5)),
        (-2, AgentOutcome(reward=-2.0)),
        (True, AgentOutcome(reward=1.0)),
        (np.float32(0.25), AgentOutcome(reward=0.25)),
    ],
)
async def test_what_a_function_returns_is_its_reward(value: object, expected: AgentOutcome) -> None:
    async def agent(session: AgentSession) -> object:
        return value

    assert await outcome(agent) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, "4", [1.0]])
async def test_a_value_that_is_no_finite_number_is_a_failure(value: object) -> None:
    async def agent(session: AgentSession) -> object:
        return value

    assert await outcome(agent) == AgentOutcome(
        f"ValueError: the agent function returned {value!r}, expected a finite number or None"
    )


async def test_a_function_says_that_its_environment_failed() -> None:
    async def agent(session: AgentSession) -> None:
        raise EnvironmentFailedError("the shop is closed")

    expected = AgentOutcome("EnvironmentFailedError: the shop is closed", environment_failed=True)
    assert await outcome(agent) == expected


@pytest.mark.parametrize("error", [LookupError("no such tool"), SystemExit(3), KeyboardInterrupt("stop")])
async def test_whatever_a_function_raises_is_its_own_failure(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(session: AgentSession) -> None:
        if session.id.endswith("/0/0"):
            raise error

    async with running(agent) as runner:
        assert await runner.run(task(0)) == AgentOutcome(f"{type(error).__name__}: {error}")
        assert await runner.run(task(1)) == AgentOutcome()
    (record,) = caplog.records
    assert record.getMessage() == "session toy/0/7/0/0: agent mine failed"
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_a_repeated_run_joins_the_session_and_is_answered_alike_afterwards() -> None:
    calls, go = [], threading.Event()

    async def agent(session: AgentSession) -> float:
        calls.append(session.id)
        await asyncio.to_thread(go.wait, HANG_S)
        return float(len(calls))

    async with running(agent) as runner:
        first = asyncio.create_task(runner.run(task()))
        second = asyncio.create_task(runner.run(task()))
        await asyncio.sleep(0)  # both have begun
        first.cancel()  # a coordinator that is gone cancels nothing
        go.set()
        assert await second == AgentOutcome(reward=1.0)
        assert await runner.run(task()) == AgentOutcome(reward=1.0)
        assert calls == ["toy/0/7/0/0"]


async def test_a_session_that_nobody_asks_for_any_more_is_cancelled_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runners, "REMEMBERED_S", 0.0)
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    async def agent(session: AgentSession) -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.release()

    async with running(agent) as runner:
        for _ in range(2):  # the second begins anew
            listener = asyncio.create_task(runner.run(task()))
            assert await asyncio.to_thread(begun.acquire, timeout=HANG_S)
            listener.cancel()
            assert await asyncio.to_thread(ended.acquire, timeout=HANG_S)


async def test_a_cancelled_function_may_clean_up() -> None:
    begun, cleaned = threading.Event(), []

    async def agent(session: AgentSession) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(session.id)

    async with running(agent) as runner:
        asked = asyncio.create_task(runner.run(task()))
        await asyncio.to_thread(begun.wait, HANG_S)
        runner.cancel(session_id())
        runner.cancel(session_id())  # which does not interrupt the cleaning
        assert await asked == AgentOutcome("cancelled")
        assert cleaned == ["toy/0/7/0/0"]
        runner.cancel(session_id())
        runner.cancel(session_id(5))  # of a session that is not here


async def test_a_session_that_is_cancelled_before_its_function_begins() -> None:
    async def agent(session: AgentSession) -> None:
        pytest.fail("it has begun")

    async with running(agent) as runner:
        go = threading.Event()
        runner._loop.call_soon_threadsafe(go.wait, HANG_S)
        asked = asyncio.create_task(runner.run(task()))
        await asyncio.sleep(0)
        runner.cancel(session_id())
        go.set()
        assert await asked == AgentOutcome("cancelled")


async def test_a_function_that_swallows_its_cancellation_or_blocks_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "CANCEL_GRACE_S", 0.01)
    begun, go, ended = threading.Event(), threading.Event(), threading.Semaphore(0)

    async def agent(session: AgentSession) -> float:
        begun.set()
        if session.id.endswith("/1/0"):
            go.wait(HANG_S)  # keeps the loop
        while True:
            try:
                await asyncio.to_thread(go.wait, HANG_S)
                ended.release()
                return 1.0
            except asyncio.CancelledError:
                pass

    async with running(agent) as runner:
        for index in range(2):
            begun.clear()
            asked = asyncio.create_task(runner.run(task(index)))
            await asyncio.to_thread(begun.wait, HANG_S)
            runner.cancel(session_id(index))
            assert await asked == AgentOutcome("cancelled")
            assert runner.num_running == 0
        go.set()
        for _ in range(2):
            assert await asyncio.to_thread(ended.acquire, timeout=HANG_S)
    assert [record.getMessage() for record in caplog.records] == [
        f"session toy/0/7/{index}/0: its function is still running after it was cancelled"
        for index in range(2)
    ]


async def test_sessions_that_this_process_cannot_hold() -> None:
    async def agent(session: AgentSession) -> None:
        pytest.fail("it has begun")

    async with running(agent) as runner:
        with pytest.raises(UserError, match="got a session for agent 'other', this process runs mine"):
            await runner.run(task(agent="other"))
        again = replace(task(), agent_key="")  # of a session that another process held
        assert await runner.run(again) == AgentOutcome("the process that ran the agent exited")


HANGS = """
import asyncio, re
from atoll.agents.runner import AgentRunner, HostedAgent
from tests.unit.test_agent_runner import task

async def my_function(session):
    re.match(r"(a+)+$", "a" * 64 + "b")  # keeps the interpreter's lock for ages

async def main():
    runner = AgentRunner({"mine": HostedAgent(my_function, 1)})
    runner.end_process_if_blocked(0.5)
    await runner.run(task())

asyncio.run(main())
"""


def test_a_process_whose_function_never_gives_the_loop_back_ends_and_says_where_it_hung() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == 1
    assert "in my_function" in ended.stderr


def test_a_session_shows_the_row_and_hides_its_keys() -> None:
    session = AgentSession(task())
    assert session.messages == [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    assert (session.ground_truth, session.data_source, session.extra) == ("2", "sums", {"level": "3"})
    assert (session.base_url, session.anthropic_url) == ("http://gateway:1/v1", "http://gateway:1")
    assert (session.id, session.model) == ("toy/0/7/0/0", "toy")
    assert (session.api_key, session.reward_key) == ("agent-key", "reward-key")
    for shown in (repr(session), repr(task())):
        assert "-key" not in shown


def test_tool_calls_of_a_row_are_as_openais_api_has_them() -> None:
    call = ToolCall("c1", "add", '{"a": 1}')
    messages = (Message("assistant", "", (call,)), Message("tool", "2", tool_call_id="c1"))
    session = AgentSession(AgentTask(session_id(), "mine", "", "", "", "toy", messages, "", ""))
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert session.messages == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


def num_tls_contexts() -> int:
    return sum(issubclass(type(each), ssl.SSLContext) for each in gc.get_objects())


async def test_clients_of_all_sessions_share_a_tls_context_and_each_is_closed_alone() -> None:
    first, *others = sessions = [AgentSession(task(index)) for index in range(20)]
    assert not first.client.is_closed()  # it has built what is shared, unless another test did
    before = num_tls_contexts()
    clients = [session.client for session in others]
    assert num_tls_contexts() == before
    await first.aclose()
    assert first.client.is_closed()
    assert not any(client.is_closed() for client in clients)
    for session in sessions:
        await session.aclose()


async def test_a_reward_goes_to_the_gateway_with_its_own_key_until_it_is_there() -> None:
    statuses = iter(["503 Service Unavailable", "200 OK", "200 OK", "403 Forbidden"])

    async def answer(request: Request) -> AsyncIterator[bytes]:
        yield f"HTTP/1.1 {next(statuses)}\r\nContent-Type: application/json\r\n".encode()
        yield b"Retry-After-Ms: 1\r\nContent-Length: 2\r\n\r\n{}"

    async def agent(session: AgentSession) -> None:
        await session.reward(0.5)
        await session.reward(1, "chatcmpl-3")
        with pytest.raises(ValueError, match="got nan, expected a finite number"):
            await session.reward(math.nan)
        with pytest.raises(openai.PermissionDeniedError):
            await session.reward(2.0)
        assert session.client.api_key == "agent-key"

    async with raw_http(answer) as server, running(agent) as runner:
        assert await runner.run(task(url=server.url)) == AgentOutcome()
    assert {(r.method, r.path, r.headers["authorization"]) for r in server.requests} == {
        ("POST", "/sessions/reward", "Bearer reward-key")
    }
    whole = {"value": 0.5, "turn": None, "component": "session"}
    assert [request.json for request in server.requests] == [
        whole,
        whole,
        {"value": 1.0, "turn": "chatcmpl-3", "component": "session"},
        {"value": 2.0, "turn": None, "component": "session"},
    ]
    keys = [request.headers["idempotency-key"] for request in server.requests]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
