"""Servers that speak package atoll.v1, with messages that ours would never send."""

from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from atoll.external.base import ToolResult
from atoll.external.protocols import connect
from atoll.runtime.clients.base import ERROR_KEY
from atoll.runtime.errors import OverloadedError, ProtocolError, ServiceUnavailableError, UserError
from atoll.wire.types import (
    ExternalServer,
    Graded,
    GradingError,
)
from atoll.wire.v1 import reward_pb2, reward_pb2_grpc
from tests.score_items import item

TOKEN = "s3cr3t-t0k3n"


def graded(id: str, value: float = 1.0, **components: float) -> reward_pb2.ScoreReply:
    return reward_pb2.ScoreReply(
        verdicts=[
            reward_pb2.Verdict(
                id=id, graded=reward_pb2.Graded(value=value, components=components, reasons={"a": "b"})
            )
        ]
    )


class Theirs(reward_pb2_grpc.RewardServicer):
    """Does what the first response asks for."""

    async def Score(self, request, context):
        ids = [one.id for one in request.items]
        match request.items[0].response:
            case "backwards":
                for id in reversed(ids):
                    yield graded(id, len(id), half=0.5)
            case "whole":
                says_all = all(one.prompt and one.ground_truth for one in request.items)
                for id in ids:
                    yield graded(id, float(says_all and not request.questions))
            case "error":
                error = reward_pb2.GradingError(grader="theirs", cause="no judge", retryable=True)
                yield reward_pb2.ScoreReply(verdicts=[reward_pb2.Verdict(id=ids[0], error=error)])
            case "error that echoes":
                [(_, header)] = [
                    entry for entry in context.invocation_metadata() if entry[0] == "authorization"
                ]
                error = reward_pb2.GradingError(grader="theirs", cause=f"\x1b[2J{header}")
                yield reward_pb2.ScoreReply(verdicts=[reward_pb2.Verdict(id=ids[0], error=error)])
            case "no outcome":
                yield reward_pb2.ScoreReply(verdicts=[reward_pb2.Verdict(id=ids[0])])
            case "silent":
                yield graded("run/0/7/99")
            case "twice":
                yield graded(ids[0])
                yield graded(ids[0], 2.0)
            case "nan":
                yield graded(ids[0], float("nan"))
            case "infinite part":
                yield graded(ids[0], 1.0, part=float("inf"))
            case "flood":
                while True:
                    yield graded("x" * 100_000)
            case "stale":
                context.set_trailing_metadata(((ERROR_KEY, "StaleFenceError"),))
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "stop the run")
            case code:
                await context.abort(
                    grpc.StatusCode[code], f"because of {dict(context.invocation_metadata())}"
                )

    async def Describe(self, request, context):
        return reward_pb2.DescribeReply(graders=["theirs"])

    async def Execute(self, request, context):
        if request.source == "print(17 + 29)":
            return reward_pb2.ExecuteReply(status="ok", stdout=b"46\n")
        return reward_pb2.ExecuteReply(
            status="exception", detail="ZeroDivisionError", stdout=b"so far\n", stderr=b"Traceback"
        )


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServicer_to_server(Theirs(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_verdicts_come_back_in_the_order_of_the_items(address: str) -> None:
    judge = connect(ExternalServer("reward", "judge", f"grpc://{address}", "grpc"), TOKEN)
    assert await judge.probe() == "graders theirs"
    items = [item(5, "backwards"), item(10, ""), item(100, "")]
    assert await judge.score(items) == [
        Graded(one.id, float(len(f"run/0/7/{one.id.index}")), {"half": 0.5}, {"a": "b"}) for one in items
    ]
    assert await judge.score([item(0, "error")]) == [
        GradingError(item(0, "").id, "theirs", "no judge", retryable=True)
    ]
    assert await judge.score([item(0, "error that echoes")]) == [
        GradingError(item(0, "").id, "theirs", "\\x1b[2JBearer ***", retryable=False)
    ]
    whole = await judge.score([item(0, "whole"), item(1, "of the same group")])
    assert [verdict.value for verdict in whole] == [1.0, 1.0]
    [without] = await judge.score([item(0, "no outcome")])
    assert isinstance(without, GradingError)
    await judge.close()


@pytest.mark.parametrize(
    ("response", "error", "problem"),
    [
        ("silent", ProtocolError, "got no verdict on run/0/7/3"),
        ("twice", ProtocolError, "two verdicts on one item"),
        ("nan", ProtocolError, "got value nan, expected a finite number"),
        ("infinite part", ProtocolError, "got part inf, expected a finite number"),
        ("flood", ProtocolError, "more than 2,000,000 bytes"),
        ("stale", ProtocolError, "stop the run"),  # not the class that it names
        ("UNAUTHENTICATED", UserError, "the token of `auth`"),
        ("PERMISSION_DENIED", UserError, "the token of `auth`"),
        ("RESOURCE_EXHAUSTED", OverloadedError, "because"),
        ("UNAVAILABLE", ServiceUnavailableError, "because"),
        ("INTERNAL", ProtocolError, "because"),
        ("UNIMPLEMENTED", ProtocolError, "because"),
    ],
)
async def test_what_is_no_answer_says_what_it_was(
    address: str, response: str, error: type[Exception], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.runtime.clients.reward.MAX_MESSAGE_BYTES", 2_000_000)
    judge = connect(ExternalServer("reward", "judge", address, "grpc", timeout_s=5), TOKEN)
    with pytest.raises(error, match=problem) as caught:
        await judge.score([item(3, response)])
    assert type(caught.value) is error
    assert address in str(caught.value)
    assert TOKEN not in str(caught.value)
    await judge.close()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    judge = connect(ExternalServer("reward", "judge", "127.0.0.1:1", "grpc", timeout_s=0.5), None)
    with pytest.raises(ServiceUnavailableError, match=r"127\.0\.0\.1:1"):
        await judge.probe()
    await judge.close()


async def test_execute_is_a_tool_that_shows_what_was_printed(address: str) -> None:
    python = connect(ExternalServer("tool", "python", address, "grpc"), None)
    assert await python.probe() == "runs Python"
    [tool] = await python.tools()
    assert (tool.name, tool.schema["required"]) == ("python", ["code"])
    failed = await python.call("python", {"code": "1 / 0"})
    assert failed == ToolResult("so far\nTraceback\n[exception: ZeroDivisionError]", is_error=True)
    assert (await python.call("python", {"source": "1"})).is_error
    assert (await python.call("python", {"code": 1})).is_error
    assert (await python.call("bash", {"code": "ls"})).is_error
    await python.close()
