"""Idempotency by request id, with an engine that is played by hand."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import numpy as np
import pytest

from atoll.rollout import generate
from atoll.rollout.engines.base import Completion
from atoll.rollout.generate import Generator, linger_for
from atoll.runtime.errors import UserError
from atoll.wire.types import (
    FinishReason,
    GroupId,
    SampleId,
    Sampling,
    Trajectory,
    TurnId,
    TurnRequest,
    Version,
    VersionSpan,
)
from tests import virtual_clock
from tests.builders import turn_request

GROUP = GroupId("toy", 0, 7)
V3 = Version("a3f0", 3)


class ScriptedEngine:
    """Finishes samples when the test says so, and counts what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []  # index and attempt
        self.closed = 0
        self.news: asyncio.Queue[list[int] | Exception] = asyncio.Queue()

    async def generate(self, requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Completion], None]:
        for request in requests:
            self.asked += [(id.sample.index, id.attempt) for id in request.ids]
        attempts = {id.sample.index: id.attempt for request in requests for id in request.ids}
        try:
            while attempts:
                news = await self.news.get()
                if isinstance(news, Exception):
                    raise news
                yield [completion(index, attempts.pop(index)) for index in news]
        finally:
            self.closed += bool(attempts)


def completion(index: int, attempt: int) -> Completion:
    return Completion(
        id=TurnId(SampleId(GROUP, index), attempt),
        token_ids=np.array([8, 10, index], np.int32),
        logprobs=np.array([-0.1, -0.7, -0.2], np.float32),
        spans=(VersionSpan(V3, 0, 3),),
        finish_reason=FinishReason.STOP,
        text="46",
        started=1.0,
        finished=2.0,
    )


def request(*indices: int, attempt: int = 0) -> TurnRequest:
    return turn_request([5, 6], group=GROUP, indices=indices, attempt=attempt, sampling=Sampling(3))


async def listen(generator: Generator, *requests: TurnRequest) -> list[list[Trajectory]]:
    async with asyncio.timeout(10):
        return [samples async for samples in generator.generate(requests)]


def indices(batches: list[list[Trajectory]]) -> list[list[int]]:
    return [[sample.id.index for sample in batch] for batch in batches]


async def settle() -> None:
    """Lets every task run until it waits for something outside of the event loop."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def generator(engine) -> Generator:
    return Generator(engine, "rollout-0", "a1")


async def test_a_sample_is_a_tree_of_one_node(engine, generator):
    engine.news.put_nowait([1])
    ((sample,),) = await listen(generator, request(1))
    (node,) = sample.nodes
    assert (str(sample.id), sample.attempt, sample.text) == ("toy/0/7/1", 0, "46")
    assert (node.parent, node.token_ids.tolist(), node.loss_mask.tolist()) == (-1, [8, 10, 1], [True] * 3)
    np.testing.assert_allclose(node.logprobs, [-0.1, -0.7, -0.2])
    assert node.spans == (VersionSpan(V3, 0, 3),)
    assert (sample.turns[0].origin.replica, sample.turns[0].origin.incarnation) == ("rollout-0", "a1")
    assert (sample.turns[0].started, sample.turns[0].finished) == (1.0, 2.0)


async def test_what_finishes_in_quick_succession_arrives_together(engine, generator):
    for news in ([2, 0], [1]):
        engine.news.put_nowait(news)
    assert indices(await listen(generator, request(0, 1), request(2))) == [[2, 0, 1]]


async def test_a_finished_sample_waits_for_others_no_longer_than_it_may(engine, generator):
    engine.news.put_nowait([2, 0])
    stream = generator.generate([request(0, 1), request(2)])
    first = await asyncio.wait_for(anext(stream), 10)
    engine.news.put_nowait([1])
    assert indices([first, await asyncio.wait_for(anext(stream), 10)]) == [[2, 0], [1]]


def test_replicas_of_a_large_fleet_let_more_samples_share_a_message():
    assert [linger_for(replicas) for replicas in (1, 10, 256, 4096)] == [0.02, 0.02, 0.512, 1.0]


def test_a_call_lingers_twice_as_long_for_each_further_message() -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        heard = asyncio.create_task(listen(Generator(engine, "rollout-0", "a1"), request(0, 1, 2, 3)))
        for index in range(4):
            engine.news.put_nowait([index])
            await asyncio.sleep(0.03)
        assert indices(await heard) == [[0], [1, 2], [3]]

    virtual_clock.run(run())


async def test_a_running_request_is_joined(engine, generator):
    first = asyncio.create_task(listen(generator, request(0, 1)))
    await settle()
    second = asyncio.create_task(listen(generator, request(1)))
    await settle()
    engine.news.put_nowait([1])
    engine.news.put_nowait([0])
    assert indices(await second) == [[1]]
    assert indices(await first) == [[1, 0]]
    assert engine.asked == [(0, 0), (1, 0)]


async def test_a_finished_request_is_answered_again(engine, generator):
    engine.news.put_nowait([0])
    (first,) = await listen(generator, request(0))
    assert await listen(generator, request(0)) == [first]
    engine.news.put_nowait([0])
    ((retried,),) = await listen(generator, request(0, attempt=1))
    assert retried.attempt == 1
    assert engine.asked == [(0, 0), (0, 1)]


async def test_a_new_lineage_asks_anew(engine, generator):
    for _ in range(2):
        engine.news.put_nowait([0])
        await listen(generator, request(0))
        generator.forget()
    assert engine.asked == [(0, 0), (0, 0)]


async def test_memory_is_bounded(engine, generator, monkeypatch):
    monkeypatch.setattr(generate, "MAX_REMEMBERED_TOKENS", 7)  # two samples of three tokens
    for index in range(4):
        engine.news.put_nowait([index])
        await listen(generator, request(index))
    await listen(generator, request(3), request(2))
    engine.news.put_nowait([0])
    await listen(generator, request(0))
    assert [index for index, _ in engine.asked] == [0, 1, 2, 3, 0]


async def test_work_that_nobody_waits_for_ends(engine, generator, monkeypatch):
    monkeypatch.setattr(generate, "ORPHAN_TIMEOUT_S", 0.0)
    first = asyncio.create_task(listen(generator, request(0, 1)))
    await settle()
    second = asyncio.create_task(listen(generator, request(1)))
    await settle()
    first.cancel()
    await settle()
    assert engine.closed == 0
    engine.news.put_nowait([1])
    assert indices(await second) == [[1]]
    await settle()
    assert engine.closed == 1  # index 0, which nobody wants any more
    third = asyncio.create_task(listen(generator, request(0)))
    await settle()
    engine.news.put_nowait([0])
    assert indices(await third) == [[0]]
    assert engine.asked == [(0, 0), (1, 0), (0, 0)]


async def test_a_caller_that_lost_its_stream_finds_its_work_going_on(engine, generator):
    first = asyncio.create_task(listen(generator, request(0, 1)))
    await settle()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    engine.news.put_nowait([1])  # while nobody listens
    await settle()
    second = asyncio.create_task(listen(generator, request(0, 1)))
    await settle()
    engine.news.put_nowait([0])
    assert indices(await second) == [[1], [0]]
    assert engine.asked == [(0, 0), (1, 0)]


async def test_a_new_lineage_joins_no_work_of_the_old_one(engine, generator):
    first = asyncio.create_task(listen(generator, request(0)))
    await settle()
    first.cancel()
    await settle()
    generator.forget()
    await settle()
    assert engine.closed == 1
    second = asyncio.create_task(listen(generator, request(0)))
    await settle()
    engine.news.put_nowait([0])
    assert indices(await second) == [[0]]
    assert engine.asked == [(0, 0), (0, 0)]


async def test_an_error_reaches_every_listener_and_nothing_is_remembered(engine, generator):
    calls = [asyncio.create_task(listen(generator, request(0))) for _ in range(2)]
    await settle()
    engine.news.put_nowait(UserError("no"))
    for call in calls:
        with pytest.raises(UserError, match="no"):
            await call
    engine.news.put_nowait([0])
    assert indices(await listen(generator, request(0))) == [[0]]


async def test_requests_that_make_no_sense(engine, generator):
    with pytest.raises(UserError, match="turn toy/0/7/1/0/0/0 is requested twice"):
        await listen(generator, request(0, 1), request(1))
    assert engine.asked == []
