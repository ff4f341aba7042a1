"""Reward servers over HTTP: the documented shapes, and every way in which an answer can be wrong."""

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator

import pytest

from atoll.external import channel
from atoll.external.base import RewardServer
from atoll.external.protocols import connect
from atoll.runtime.errors import OverloadedError, ProtocolError, ServiceUnavailableError, UserError
from atoll.wire.types import (
    ExternalServer,
    Graded,
    GradingError,
    ServerKind,
)
from tests.http_servers import Answer, Request, raw_http, reply
from tests.score_items import item

TOKEN = "s3cr3t-t0k3n"
GOOD = {"verdicts": [{"value": 1.0}]}


def server(url: str, protocol: str = "http", timeout_s: float = 5.0, concurrency: int = 4, **options: str):
    return ExternalServer("reward", "judge", url, protocol, options, "env:T", concurrency, timeout_s)


def client(url: str, protocol: str = "http", token: str | None = TOKEN, **settings) -> RewardServer:
    return connect(server(url, protocol, **settings), token)


def always(*chunks: bytes) -> Answer:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return answer


async def test_plain_sends_all_of_an_item_and_reads_every_kind_of_verdict() -> None:
    answer = {
        "verdicts": [
            {"value": 0.5, "components": {"right": 1, "short": 0.0}, "reason": "long"},
            {"error": "no judge", "retryable": True},
            {"error": "broken row"},
            {"value": -3},
        ]
    }
    async with raw_http(always(reply(answer))) as raw:
        judge = client(f"{raw.url}/grade/", preset="plain")
        verdicts = await judge.score([item(0, "a", level="5"), item(1), item(2), item(3)])
        await judge.close()
    assert verdicts == [
        Graded(item(0).id, 0.5, {"right": 1.0, "short": 0.0}, {"judge": "long"}),
        GradingError(item(1).id, "judge", "no judge", retryable=True),
        GradingError(item(2).id, "judge", "broken row", retryable=False),
        Graded(item(3).id, -3.0, {}),
    ]
    request = raw.requests[0]
    assert (request.method, request.path) == ("POST", "/grade/")
    assert request.headers["authorization"] == f"Bearer {TOKEN}"
    assert request.json["items"][0] == {
        "id": "run/0/7/0",
        "prompt": "17 + 29 =",
        "response": "a",
        "ground_truth": "46",
        "data_source": "sums",
        "finish_reason": "stop",
        "response_length": 2,
        "extra": {"level": "5"},
    }


@pytest.mark.parametrize(
    ("answer", "options", "value"),
    [
        (3, {}, 3.0),
        (0.25, {}, 0.25),
        ({"reward": 1, "score": 2}, {}, 1.0),
        ({"score": 2}, {}, 2.0),
        ({"accuracy": 0.5, "reward": 9}, {"reward_key": "accuracy"}, 0.5),
    ],
)
async def test_slime_asks_for_each_item_and_takes_a_number_or_one_under_a_key(answer, options, value) -> None:
    async with raw_http(always(reply(answer))) as raw:
        judge = client(raw.url, preset="slime", **options)
        verdicts = await judge.score([item(0, "x"), item(1, "\ud800 46 🙂")])
        await judge.close()
    assert verdicts == [Graded(item(0).id, value, {}), Graded(item(1).id, value, {})]
    bodies = sorted((request.json for request in raw.requests), key=lambda body: body["response"])
    assert bodies == [
        {"prompt": "17 + 29 =", "response": "x", "label": "46"},
        {"prompt": "17 + 29 =", "response": "\ud800 46 🙂", "label": "46"},
    ]


async def test_an_item_that_fails_costs_its_own_verdict_alone() -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        bad = {"a": reply({}), "b": reply("", "503 Busy", retry_after="3")}
        yield bad.get(request.json["response"], reply(1))

    async with raw_http(answer) as raw:
        judge = client(raw.url, preset="slime")
        a, b, c = await judge.score([item(0, "a"), item(1, "b"), item(2, "c")])
        with pytest.raises(ProtocolError, match="expected a number, or one under reward or score"):
            await judge.score([item(0, "a")])
        await judge.close()
    assert isinstance(a, GradingError)
    assert not a.retryable
    assert isinstance(b, GradingError)
    assert b.retryable
    assert c == Graded(item(2).id, 1.0, {})


async def test_openrlhf_sends_columns_and_reads_columns() -> None:
    answer = {"rewards": [0.1, 0.9], "scores": [0, 1], "extra_logs": {"length": [10, 20]}}
    async with raw_http(always(reply(answer))) as raw:
        judge = client(raw.url, preset="openrlhf")
        verdicts = await judge.score([item(0, " 45"), item(1, " 46")])
        await judge.close()
    assert verdicts == [Graded(item(0).id, 0.1, {"length": 10.0}), Graded(item(1).id, 0.9, {"length": 20.0})]
    assert raw.requests[0].json == {
        "query": ["17 + 29 = 45", "17 + 29 = 46"],
        "prompts": ["17 + 29 =", "17 + 29 ="],
        "labels": ["46", "46"],
    }


async def test_sglang_is_asked_at_classify_with_the_text_that_its_model_reads() -> None:
    answer = [{"embedding": [-1.5], "meta_info": {"id": "x"}}, {"embedding": [2], "meta_info": {}}]
    async with raw_http(always(reply(answer))) as raw:
        judge = client(f"{raw.url}/", preset="sglang", template="<u>{prompt}<a>{response}")
        verdicts = await judge.score([item(0, "{prompt}"), item(1)])
        await judge.close()
    assert verdicts == [Graded(item(0).id, -1.5, {}), Graded(item(1).id, 2.0, {})]
    assert raw.requests[0].path == "/classify"
    assert raw.requests[0].json == {"text": ["<u>17 + 29 =<a>{prompt}", "<u>17 + 29 =<a>46"]}


@pytest.mark.parametrize(
    ("preset", "answer", "problem"),
    [
        ("openrlhf", {"rewards": [1, 2]}, "got 2 rewards for 1 items"),
        ("openrlhf", {"rewards": [1], "extra_logs": {"length": []}}, "got 0 length for 1 items"),
        ("sglang", [{"embedding": [0.1, 0.9]}], "at most 1 item"),  # a classifier, not a reward model
        ("sglang", {"embedding": [1]}, "valid array"),  # what it answers to one text that is no list
        ("slime", {"reward": None}, "valid number"),
    ],
)
async def test_an_answer_of_another_shape_is_refused(preset: str, answer: object, problem: str) -> None:
    async with raw_http(always(reply(answer))) as raw:
        judge = client(raw.url, preset=preset)
        with pytest.raises(ProtocolError, match=problem):
            await judge.score([item()])
        await judge.close()


VERDICT = '{"verdicts": [{"value": %s}]}'
BAD_ANSWERS = {
    "a page": (
        reply(b"<html>ok</html>", content_type="text/html"),
        ProtocolError,
        "content type 'text/html'",
    ),
    "no content type": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1",
        ProtocolError,
        "content type 'none'",
    ),
    "not JSON": (reply(b"<html>ok</html>"), ProtocolError, "Invalid JSON"),
    "not UTF-8": (reply(b'{"verdicts": "\xff"}'), ProtocolError, "Invalid JSON"),
    "half of it": (reply(b'{"verdicts": [{"value": 1'), ProtocolError, "Invalid JSON"),
    "too deep": (reply(b"[" * 100_000), ProtocolError, "Invalid JSON"),
    "nan": (reply((VERDICT % "NaN").encode()), ProtocolError, "finite number, got nan"),
    "infinity": (reply((VERDICT % "-Infinity").encode()), ProtocolError, "finite number, got -inf"),
    "too large": (reply((VERDICT % "1e999").encode()), ProtocolError, "finite number, got inf"),
    "too long": (reply((VERDICT % ("9" * 400)).encode()), ProtocolError, "number"),
    "a truth": (reply((VERDICT % "true").encode()), ProtocolError, "valid number, got True"),
    "a text": (reply((VERDICT % '"1"').encode()), ProtocolError, "valid number, got '1'"),
    "null": (reply((VERDICT % "null").encode()), ProtocolError, "valid number, got None"),
    "no verdicts": (reply({}), ProtocolError, "verdicts: Field required"),
    "too few": (reply({"verdicts": []}), ProtocolError, "got 0 verdicts for 1 items"),
    "too many": (reply({"verdicts": [{"value": 1}] * 2}), ProtocolError, "got 2 verdicts for 1 items"),
    "both": (reply({"verdicts": [{"value": 1, "error": "x"}]}), ProtocolError, "not permitted"),
    "packed": (
        reply(gzip.compress(json.dumps(GOOD).encode()), content_encoding="gzip"),
        ProtocolError,
        "content encoding 'gzip'",
    ),
    "400": (reply({"detail": "what?"}, "400 Bad"), ProtocolError, "status 400 and .*what"),
    "404": (reply({}, "404 Not Found"), ProtocolError, "status 404"),
    "401": (reply({}, "401 No"), UserError, "the server rejects the token of `auth`"),
    "403": (reply({}, "403 No"), UserError, "the server rejects the token of `auth`"),
    "429": (reply({}, "429 Busy", retry_after="7"), OverloadedError, "retry after '7'"),
    "503 with a time": (reply({}, "503 Busy", retry_after="7"), OverloadedError, "retry after '7'"),
    "503": (reply({}, "503 Away"), ServiceUnavailableError, "status 503"),
    "500": (reply({}, "500 Oops"), ServiceUnavailableError, "status 500"),
    "less than announced": (
        reply(b"{", content_length="99") + b"",
        ServiceUnavailableError,
        "connection failed",
    ),
    "not HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", ServiceUnavailableError, "connection failed"),
    "nothing": (b"", ServiceUnavailableError, "connection failed"),
}


@pytest.mark.parametrize("case", BAD_ANSWERS)
async def test_what_is_no_answer_says_what_it_was(case: str) -> None:
    content, error, problem = BAD_ANSWERS[case]
    async with raw_http(always(content, b"")) as raw:
        judge = client(raw.url)
        with pytest.raises(error, match=problem) as caught:
            await judge.score([item()])
        await judge.close()
    assert type(caught.value).__name__ in (error.__name__, "RefusedError")
    assert raw.url in str(caught.value)
    assert len(str(caught.value)) < 800


async def test_without_a_token_the_error_says_how_to_give_one() -> None:
    async with raw_http(always(reply({}, "401 No"))) as raw:
        judge = client(raw.url, token=None)
        with pytest.raises(UserError, match="the server requires a token: set `auth`"):
            await judge.score([item()])
        await judge.close()
    assert "authorization" not in raw.requests[0].headers


@pytest.mark.parametrize(
    "content",
    [
        reply({"verdicts": TOKEN}),
        reply(TOKEN.encode(), content_type="text/plain"),
        reply({"seen": f"Bearer {TOKEN}"}, "400 Bad"),
        reply({}, "302 Found", location=f"http://elsewhere/{TOKEN}?key=other"),
        reply({}, "429 Busy", retry_after=TOKEN),
        reply({"verdicts": [{"value": "x" * 190 + TOKEN}]}),  # where it would be cut
    ],
)
async def test_a_token_that_a_server_echoes_is_not_shown(content: bytes) -> None:
    async with raw_http(always(content)) as raw:
        judge = client(raw.url)
        with pytest.raises(Exception, match="judge") as caught:
            await judge.score([item()])
        await judge.close()
    assert TOKEN[:6] not in str(caught.value)
    assert "key=other" not in str(caught.value)


async def test_a_verdicts_texts_are_short_and_fit_for_a_log() -> None:
    said = f"\x1b[2J\nBearer {TOKEN} " + "x" * 2000
    shown = "\\x1b[2J\\nBearer *** " + "x" * 984  # 1,000 characters of what is told
    async with raw_http(always(reply({"verdicts": [{"error": said}, {"value": 1, "reason": said}]}))) as raw:
        judge = client(raw.url)
        verdicts = await judge.score([item(0), item(1)])
        await judge.close()
    assert verdicts == [
        GradingError(item(0).id, "judge", shown, retryable=False),
        Graded(item(1).id, 1.0, {}, {"judge": shown}),
    ]


@pytest.mark.parametrize("preset", ["plain", "slime"])
async def test_a_second_response_is_not_taken_as_that_to_the_next_request(preset: str) -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        (response,) = [one["response"] for one in request.json.get("items", [request.json])]
        own, other = ({"verdicts": [{"value": v}], "reward": v} for v in (float(response), 99.0))
        yield reply(own) + reply(other)  # in one piece, so that both are read at once

    async with raw_http(answer) as raw:
        judge = client(raw.url, preset=preset)
        verdicts = [await judge.score([item(index, str(index))]) for index in range(3)]
        await judge.close()
    assert verdicts == [[Graded(item(index).id, float(index), {})] for index in range(3)]
    assert raw.connections == 3


async def test_the_id_of_a_verdict_has_to_match() -> None:
    said = [{"id": "run/0/7/0", "value": 1}, {"id": "run/0/7/1", "error": "no judge"}]
    async with raw_http(always(reply({"verdicts": said}))) as raw:
        judge = client(raw.url)
        assert len(await judge.score([item(0), item(1)])) == 2
        with pytest.raises(ProtocolError, match="a verdict of id 'run/0/7/0', expected 'run/0/7/1'"):
            await judge.score([item(1), item(0)])
        await judge.close()


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Temporary", "308 Permanent"])
async def test_a_redirect_is_refused_and_the_token_stays_here(status: str) -> None:
    async with (
        raw_http(always(reply(GOOD))) as other,
        raw_http(always(reply({}, status, location=f"{other.url}/steal"))) as raw,
    ):
        judge = client(raw.url)
        with pytest.raises(ProtocolError, match=f"redirect to '{other.url}/steal', which is not followed"):
            await judge.score([item()])
        await judge.close()
    assert len(raw.requests) == 1
    assert other.requests == []


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_ANSWER_BYTES", 1_000_000)
    sent = 0

    async def answer(request: Request) -> AsyncIterator[bytes]:
        nonlocal sent
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        while True:
            yield b"10000\r\n" + b"1" * 0x10000 + b"\r\n"
            sent += 0x10000

    async with raw_http(answer) as raw:
        judge = client(raw.url)
        with pytest.raises(ProtocolError, match="more than 1,000,000 bytes"):
            await judge.score([item()])
        await judge.close()
    assert sent < 10_000_000  # what the socket's buffers hold, and no more


@pytest.mark.parametrize("trickle", [b"", b" "])
async def test_an_answer_that_trickles_is_given_up_in_time(trickle: bytes) -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n"
        for _ in range(1000):
            await asyncio.sleep(0.02)
            yield b"x-slow: 1\r\n" if not trickle else b"\r\n" + trickle

    began = time.perf_counter()
    async with raw_http(answer) as raw:
        judge = client(raw.url, timeout_s=0.2)
        with pytest.raises(ServiceUnavailableError, match=r"no answer within 0\.2 s"):
            await judge.score([item()])
        await judge.close()
    assert time.perf_counter() - began < 10  # of 20 that it trickles


async def test_no_more_calls_at_once_than_allowed_over_connections_that_are_kept() -> None:
    running = most = 0

    async def answer(request: Request) -> AsyncIterator[bytes]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        yield reply(1)

    async with raw_http(answer) as raw:
        judge = client(raw.url, preset="slime", concurrency=3)
        await judge.score([item(index) for index in range(12)])
        await judge.score([item()])
        await judge.close()
    assert most == 3
    assert raw.connections == 3


@pytest.mark.parametrize(
    ("kind", "protocol", "url", "options", "problem"),
    [
        ("reward", "http", "http://h", {"preset": "gym"}, "'plain', 'slime', 'openrlhf', 'sglang'"),
        ("reward", "http", "http://h", {"reward_key": "x"}, "reward_key: Extra inputs are not permitted"),
        ("reward", "http", "http://h", {"preset": "sglang", "template": "{prompt}"}, "template"),
        ("reward", "http", "ftp://h/x", {}, "HOST"),
        ("reward", "http", "h:80", {}, "HOST"),
        ("reward", "http", "http://h:port", {}, "url"),
        ("reward", "http", f"http://me:{TOKEN}@h/", {}, "put a token into `auth`"),
        ("reward", "http", f"http://h/?key={TOKEN}", {}, "put a token into `auth`"),
        ("reward", "grpc", f"http://me:{TOKEN}@h:1", {}, "HOST:PORT"),
        ("reward", "grpc", "h:1", {"preset": "plain"}, "preset: Extra inputs"),
        ("reward", "mcp", "http://h/mcp", {}, "tool: Field required"),
        ("tool", "mcp", "http://h/mcp", {"tool": "x"}, "tool: Extra inputs"),
        ("reward", "openenv", "http://h", {"action": "x"}, "action: Extra inputs"),
        ("env", "grpc", "h:1", {}, "protocol 'grpc'; such servers speak openenv"),
        ("tool", "nemo_gym", "http://h", {}, "protocol 'nemo_gym'; such servers speak grpc, mcp"),
    ],
)
def test_what_cannot_work_is_refused_before_a_call(
    kind: ServerKind, protocol: str, url: str, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        connect(ExternalServer(kind, "judge", url, protocol, options), None)
    assert TOKEN not in str(caught.value)


async def test_nemo_gym_verifies_each_item_in_a_session_of_its_own() -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        if request.path == "/seed_session":
            yield reply(
                {}, set_cookie=f"session={request.json['answer']}{request.json['unit']}; Path=/; httponly"
            )
        else:
            session = request.headers["cookie"]
            yield reply(request.json | {"reward": float(session == f"session=46{request.json['unit']}")})

    async with raw_http(answer) as raw:
        judge = client(raw.url, "nemo_gym", ground_truth="answer")
        items = [
            item(n, unit="cm" * n, cases='[{"in": 1}]', note="[no JSON", number="5") for n in range(1, 5)
        ]
        verdicts = await judge.score(items)
        await judge.close()
    assert verdicts == [Graded(one.id, 1.0, {}) for one in items]
    seeded, verified = (
        next(one.json for one in raw.requests if one.path == path and one.json["unit"] == "cm")
        for path in ("/seed_session", "/verify")
    )
    response = verified.pop("response")
    assert verified == seeded
    assert seeded == {
        "responses_create_params": {"input": [{"role": "user", "content": "17 + 29 ="}]},
        "answer": "46",
        "unit": "cm",
        "cases": [{"in": 1}],
        "note": "[no JSON",
        "number": "5",
    }
    assert response["object"] == "response"
    assert response["output"][0]["role"] == "assistant"
    assert response["output"][0]["content"] == [{"type": "output_text", "text": "46", "annotations": []}]
    # what the Response of OpenAI's API requires
    assert response.keys() >= {
        "id",
        "created_at",
        "model",
        "output",
        "parallel_tool_calls",
        "tool_choice",
        "tools",
    }


async def test_nemo_gym_whose_rows_have_more_fields_still_registers() -> None:
    async def answer(request: Request) -> AsyncIterator[bytes]:
        yield reply({"detail": [{"loc": ["body", "unit_tests"]}]}, "422 Unprocessable")

    async with raw_http(answer) as raw:
        judge = client(raw.url, "nemo_gym")
        assert "unit_tests" in await judge.probe()
        await judge.close()
    async with raw_http(always(reply({}, "404 Not Found"))) as raw:
        judge = client(raw.url, "nemo_gym")
        with pytest.raises(ProtocolError, match="404"):
            await judge.probe()
        await judge.close()


async def test_a_probe_says_what_the_server_made_of_it() -> None:
    async with raw_http(always(reply(GOOD))) as raw:
        judge = client(raw.url)
        assert await judge.probe() == "preset plain: graded the probe 1"
        await judge.close()
    async with raw_http(always(reply({"verdicts": [{"error": "unknown source"}]}))) as raw:
        judge = client(raw.url)
        assert "returned a proper error for the probe (unknown source)" in await judge.probe()
        await judge.close()
