"""Verdicts of services and servers that fail, are slow, busy or away, on a virtual clock."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from atoll.config.schema import GraderConfig
from atoll.coordinator.rewards.advice import slow_grading_note
from atoll.coordinator.rewards.rewards import Rewards, merge_verdicts
from atoll.coordinator.rewards.verdict_sources import NoRewardServiceError, RewardServices, ServerGrader
from atoll.runtime.clients.base import MAX_MESSAGE_BYTES
from atoll.runtime.errors import (
    AtollError,
    OverloadedError,
    ProtocolError,
    ServiceUnavailableError,
    StaleFenceError,
    UserError,
)
from atoll.wire.codec.rewards import encode_score_item
from atoll.wire.types import Graded, GradingError, GroupId, SampleId, ScoreItem, Verdict
from tests import virtual_clock
from tests.fake_rewards import FakeService, graded, rewards_of, scored
from tests.fake_servers import Fake, World, item, now, reward_server, watched
from tests.virtual_clock import timed

AWAY = ServiceUnavailableError("connection refused")
BUSY = OverloadedError("the queue is full")


def judges(world: World) -> list[ServerGrader]:
    return [ServerGrader(world.servers, "judge", 2.0), ServerGrader(world.servers, "style", -0.25)]


@timed
async def test_a_verdict_is_the_weighted_sum_of_all_parts_with_all_components() -> None:
    world = World(judge=Fake(value=0.75), style=Fake(value=3.0))
    own = FakeService()
    async with watched(world, reward_server("judge"), reward_server("style", name="style")):
        begun = now()
        verdicts = await scored(
            rewards_of(own, servers=judges(world), retries=3), [item(i) for i in range(4)]
        )
        assert now() - begun == pytest.approx(1.0)  # all asked at the same time
    assert verdicts == [
        Graded(
            item(i).id,
            0.5 * 1.0 + 2.0 * 0.75 - 0.25 * 3.0,
            {
                "exact_match": 1.0,
                "server:judge": 0.75,
                "server:judge/tone": 0.5,
                "server:style": 3.0,
                "server:style/tone": 0.5,
            },
            {
                "exact_match": "right",
                "server:judge/tone": "flat: no joke",
                "server:style/tone": "flat: no joke",
            },
        )
        for i in range(4)
    ]


def test_reasons_of_the_server_itself_are_those_of_its_grader() -> None:
    grader = ServerGrader(World().servers, "judge", 2.0)
    part = grader._part(Graded(item(0).id, 0.5, {"tone": 1.0}, {"judge": "rude", "tone": "flat"}))
    assert isinstance(part, Graded)
    assert part.reasons == {"server:judge": "rude", "server:judge/tone": "flat"}


def test_without_any_grader_the_score_is_0() -> None:
    assert merge_verdicts(item(0).id, []) == Graded(item(0).id, 0.0, {})


@timed
async def test_only_the_part_and_the_responses_that_failed_are_asked_again_and_later_each_time() -> None:
    world = World(judge=Fake(), style=Fake())
    passing = GradingError(item(1).id, "exact_match", "OSError: no route", retryable=True)
    own = FakeService(passing, passing, passing)
    async with watched(world, reward_server("judge"), reward_server("style", name="style")):
        asked = rewards_of(own, servers=judges(world), retries=3)
        begun = now()
        verdicts = await scored(asked, [item(i) for i in range(4)])
    assert all(isinstance(verdict, Graded) for verdict in verdicts)
    assert [(round(when - begun, 3), items) for when, items in own.calls] == [
        (0.0, 4),
        (0.5, 1),
        (1.5, 1),
        (3.5, 1),
    ]
    assert [len(fake.calls) for fake in world.fakes.values()] == [4, 4]
    assert asked.take_metrics() == {"reward/retried": 3.0, "reward/dropped": 0.0}
    assert asked.take_metrics() == {"reward/retried": 0.0, "reward/dropped": 0.0}


async def test_timeouts_are_counted_and_told_at_once() -> None:
    notes: list[str] = []

    async def tell(note: str) -> None:
        notes.append(note)

    late = [GradingError(item(i).id, "g.py:f", "no grade within 2 s", False, timed_out=True) for i in (1, 2)]
    asked = rewards_of(FakeService(*late), tell=tell)
    for i in (1, 2):
        assert await scored(asked, [item(i)]) == [late[i - 1]]
    assert notes == [
        "reward g.py:f: no grade within its deadline_s for 1 response of this step (reward/timeouts)",
        "reward g.py:f: no grade within its deadline_s for 2 responses of this step (reward/timeouts)",
    ]
    assert [asked.take_timeouts(), asked.take_timeouts()] == [2.0, 0.0]


def test_grading_that_dominates_a_step_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "g.py").write_text("def f(item): return 1.0")
    mine = GraderConfig(name=f"{tmp_path / 'g.py'}:f")
    metrics = {"timing_s/reward": 6.0, "timing_s/step": 10.0}
    assert slow_grading_note(metrics, [mine]) == (
        f"grading took 6.0 s of a step of 10.0 s: {mine.name} grades one response at a time; raise its "
        "concurrency"
    )
    assert slow_grading_note(metrics | {"timing_s/reward": 5.0}, [mine]) == ""
    assert slow_grading_note(metrics, [mine.model_copy(update={"concurrency": 2})]) == ""
    assert slow_grading_note(metrics, [GraderConfig(name="exact_match")]) == ""
    assert slow_grading_note(metrics | {"timing_s/reward": 11.0}, [mine]) == ""  # a validation's, too
    assert slow_grading_note({}, [mine]) == ""


@timed
async def test_a_part_that_fails_for_good_leaves_no_score() -> None:
    world = World(judge=Fake(), style=Fake())
    broken = GradingError(item(1).id, "exact_match", "ValueError: a bug", retryable=False)
    own = FakeService(broken)
    async with watched(world, reward_server("judge"), reward_server("style", name="style")):
        asked = rewards_of(own, servers=judges(world), retries=3)
        verdicts = await scored(asked, [item(i) for i in range(4)])
    assert [verdict for verdict in verdicts if not isinstance(verdict, Graded)] == [broken]
    assert len(own.calls) == 1
    assert asked.take_metrics() == {"reward/retried": 0.0, "reward/dropped": 1.0}


@timed
async def test_responses_of_a_validation_or_the_warm_up_are_not_counted_as_the_steps() -> None:
    """Its groups that cannot be graded are in the set's own metric."""
    scoring = item(1)._replace(id=SampleId(GroupId.of_validation("toy", "warmup", 0, 1), 0))
    passing = GradingError(scoring.id, "exact_match", "OSError: no route", retryable=True)
    broken = GradingError(scoring.id, "exact_match", "ValueError: a bug", retryable=False)
    asked = rewards_of(FakeService(passing, broken), retries=3)
    verdicts = await scored(asked, [scoring])
    assert verdicts == [broken]
    assert asked.take_metrics() == {"reward/retried": 0.0, "reward/dropped": 0.0}


@timed
async def test_a_service_that_fails_each_time_is_blamed_in_the_end() -> None:
    own = FakeService(*[AtollError("Score at host:1: INTERNAL: KeyError")] * 3)
    asked = rewards_of(own, retries=2)
    begun = now()
    (verdict,) = await scored(asked, [item(0)])
    assert verdict == GradingError(
        item(0).id, "service", "Score at host:1: INTERNAL: KeyError", retryable=True
    )
    assert [round(when - begun, 3) for when, _ in own.calls] == [0.0, 0.5, 1.5]
    assert asked.take_metrics() == {"reward/retried": 2.0, "reward/dropped": 1.0}


@pytest.mark.parametrize(
    "error",
    [
        AWAY,
        AtollError("Score at host:1: INTERNAL: KeyError"),
        UserError("Score at host:1: the id of item 3 is of another form"),
        ProtocolError("Score at host:1: got more bytes of verdicts than a message holds"),
    ],
)
def test_a_service_that_fails_gets_no_calls_for_a_while_and_another_takes_them(error: AtollError) -> None:
    async def run() -> None:
        failing, fine = FakeService(*[error] * 3), FakeService()
        asked = rewards_of(failing, fine, retries=1)
        begun = now()
        while now() - begun < 4.0:
            assert await scored(asked, [item(0)]) == [graded(item(0))]
            await asyncio.sleep(0.01)
        # skipped for 0.5, 1 and 2 s, each time until it answers
        assert len(failing.described) == 3
        assert [gap > 0.45 * 2**n for n, gap in enumerate(gaps([begun, *failing.described]))] == [True] * 3
        assert len(failing.calls) > 4  # it has its share again
        assert asked.take_metrics()["reward/dropped"] == 0.0

    virtual_clock.run(run())


def gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@timed
async def test_another_coordinator_ends_grading() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await scored(rewards_of(FakeService(StaleFenceError("epoch 3 is over")), retries=3), [item(0)])
    assert isinstance(caught.value.exceptions[0], StaleFenceError)


@timed
async def test_responses_wait_for_a_service_that_takes_its_time_to_come_back() -> None:
    own = FakeService(AWAY)
    own.cannot_describe = AWAY
    asked = rewards_of(own, retries=1)
    waiting = asyncio.create_task(scored(asked, [item(i) for i in range(4)]))
    await asyncio.sleep(120)
    assert not waiting.done()
    own.cannot_describe = None
    assert await waiting == [graded(item(i)) for i in range(4)]
    assert asked.take_metrics() == {"reward/retried": 4.0, "reward/dropped": 0.0}


@timed
async def test_responses_wait_for_the_first_service_and_for_the_successor_of_one_that_left() -> None:
    asked = rewards_of()
    waiting = asyncio.create_task(scored(asked, [item(0)]))
    await asyncio.sleep(500)
    first, second = FakeService(seconds={1: 1000.0}), FakeService()
    asked.add(first, 8)  # type: ignore[arg-type]
    assert await waiting == [graded(item(0))]
    asked.remove(first)  # type: ignore[arg-type]
    waiting = asyncio.create_task(scored(asked, [item(0)]))
    await asyncio.sleep(599)
    asked.add(second, 8)  # type: ignore[arg-type]
    assert await waiting == [graded(item(0))]
    assert asked.take_metrics() == {"reward/retried": 0.0, "reward/dropped": 0.0}
    assert second.calls


@timed
async def test_a_service_that_dies_after_a_long_call_is_waited_for_as_well() -> None:
    class Dying(FakeService):
        async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
            if not self.calls:
                await asyncio.sleep(3600)
                self.cannot_describe = AWAY
                asyncio.get_running_loop().call_later(100, self.come_back)
                self.failures = [AWAY]
            async for verdicts in super().verdicts(items):
                yield verdicts

        def come_back(self) -> None:
            self.cannot_describe = None

    assert await scored(rewards_of(Dying(), retries=1), [item(0)]) == [graded(item(0))]


@timed
async def test_patience_without_a_service_ends_for_all_that_wait_at_the_same_time() -> None:
    """It is no fault of the responses: the run ends, and no retry of theirs is used up."""
    asked = rewards_of(retries=2, wait_timeout_s=20.0, absence_timeout_s=3600.0)
    begun = now()
    waiting = [asyncio.create_task(scored(asked, [item(i) for i in range(n, n + 500)])) for n in (0, 500)]
    for task in waiting:
        with pytest.raises(ExceptionGroup) as failure:
            await task
        assert {type(error) for error in failure.value.exceptions} == {NoRewardServiceError}
        assert r"for 3600 s (coordinator.start_timeout_s)" in str(failure.value.exceptions[0])
        assert now() - begun == 3600.0
    assert asked.take_metrics() == {"reward/retried": 0.0, "reward/dropped": 0.0}


@timed
async def test_responses_wait_for_the_only_service_however_often_it_is_away() -> None:
    """Absence is told, and costs no retry; only what was in a call that broke is asked again."""
    notes: list[str] = []

    async def tell(note: str) -> None:
        notes.append(note)

    asked = rewards_of(retries=1, wait_timeout_s=20.0, absence_timeout_s=3600.0, tell=tell)
    waiting = asyncio.create_task(scored(asked, [item(i) for i in range(3)]))
    for service in (FakeService(AWAY), FakeService()):
        await asyncio.sleep(900.0)  # far longer than a service may be silent
        assert notes[-1] == "no reward service is registered: finished samples wait for one"
        asked.add(service, 64)  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        asked.remove(service)  # type: ignore[arg-type]
        await asyncio.sleep(0.0)
    assert await waiting == [graded(item(i)) for i in range(3)]
    assert notes == ["no reward service is registered: finished samples wait for one", ""] * 2


@timed
async def test_what_waited_for_a_service_fits_one_that_takes_little() -> None:
    own, asked = FakeService(max_queued=64), rewards_of()
    waiting = asyncio.create_task(scored(asked, [item(i) for i in range(1000)]))
    await asyncio.sleep(1)
    asked.add(own, own.max_queued)  # type: ignore[arg-type]
    assert len(await waiting) == 1000
    assert own.peak == 64


@timed
async def test_patience_is_with_silence_not_with_a_long_line() -> None:
    """Each response takes 15 s, one at a time; the last has waited for 15 minutes."""
    own = FakeService(seconds=dict.fromkeys(range(60), 15.0), max_queued=1)
    asked = rewards_of(own, wait_timeout_s=20.0)
    assert await scored(asked, [item(i) for i in range(60)]) == [graded(item(i)) for i in range(60)]


@timed
async def test_verdicts_are_handed_on_as_they_come() -> None:
    own = FakeService(seconds={7: 30.0, 8: 2.0})
    begun, came = now(), dict[Any, float]()

    def deliver(verdicts: Sequence[Verdict]) -> None:
        came.update({verdict.id: now() - begun for verdict in verdicts})

    await rewards_of(own).score([item(i) for i in range(16)], deliver)
    assert came.pop(item(7).id) == pytest.approx(30.0)
    assert came.pop(item(8).id) == pytest.approx(2.0)
    assert len(came) == 14
    assert max(came.values()) == 0.0


@timed
async def test_no_service_has_more_responses_at_once_than_it_takes() -> None:
    """A run that continues has all its finished samples graded at once."""
    small, large = FakeService(max_queued=64), FakeService(max_queued=1000)
    asked = rewards_of(small, large)
    items = [item(i) for i in range(9000)]
    assert await scored(asked, items) == [graded(one) for one in items]
    assert 0 < small.peak <= 64
    assert 64 < large.peak <= 1000
    assert small.held == large.held == 0


@timed
async def test_a_service_that_takes_fewer_responses_than_a_group_has_grades_the_group() -> None:
    own = FakeService(max_queued=3)
    items = [item(i) for i in range(8)]
    assert await scored(rewards_of(own), items) == [graded(one) for one in items]
    assert [number for _, number in own.calls] == [3, 3, 2]


@timed
async def test_a_slow_response_holds_no_other_ones_place() -> None:
    own = FakeService(seconds={0: 1000.0}, max_queued=2)
    asked = rewards_of(own)
    slow = asyncio.create_task(scored(asked, [item(0), item(1)]))
    await asyncio.sleep(1)
    for i in range(2, 10):
        assert await scored(asked, [item(i)]) == [graded(item(i))]
    assert not slow.done()
    assert own.peak == 2
    assert len(await slow) == 2


@timed
async def test_a_large_batch_goes_to_all_services_at_once_in_calls_of_some_hundred() -> None:
    services = [FakeService(seconds=dict.fromkeys(range(3000), 1.0), max_queued=8192) for _ in range(4)]
    begun = now()
    await scored(rewards_of(*services), [item(i) for i in range(3000)])
    assert now() - begun == pytest.approx(1.0)
    assert [[number for _, number in service.calls] for service in services] == [[256] * 3] * 3 + [
        [256, 256, 184]
    ]


@timed
async def test_an_item_that_no_message_holds_costs_its_own_verdict() -> None:
    own = FakeService()
    large = item(0)._replace(ground_truth="x" * MAX_MESSAGE_BYTES)
    half = item(1)._replace(extra={"case": "\ud800"})  # of a surrogate pair
    refused = await scored(rewards_of(own, retries=3), [large, item(2), half])
    assert isinstance(refused[0], GradingError)
    assert not refused[0].retryable
    assert "bytes of prompt, response, ground truth and extra fields" in refused[0].cause
    assert isinstance(refused[2], GradingError)
    assert "surrogate" in refused[2].cause
    assert refused[1] == graded(item(2))
    assert [number for _, number in own.calls] == [1]


@timed
async def test_a_response_that_a_service_leaves_out_is_asked_again() -> None:
    class Forgetful(FakeService):
        async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
            async for verdicts in super().verdicts(items):
                yield verdicts[1:] if len(self.calls) < 3 else [*verdicts, *verdicts]

    own = Forgetful()
    assert len(await scored(rewards_of(own, retries=3), [item(i) for i in range(4)])) == 4
    assert [number for _, number in own.calls] == [4, 1, 1]
    own = Forgetful()
    errors = [
        v for v in await scored(rewards_of(own, retries=1), [item(0), item(1)]) if isinstance(v, GradingError)
    ]
    assert [error.cause for error in errors] == ["it sent no verdict for this response"]


@timed
async def test_a_sum_that_is_no_finite_number_is_no_score() -> None:
    world = World(judge=Fake(value=1e308))
    async with watched(world, reward_server("judge")):
        grader = ServerGrader(world.servers, "judge", 2.0)
        (verdict,) = await scored(Rewards(0, [grader], asks_own=False), [item(0)])
    cause = "got a weighted sum of inf, expected a finite number"
    assert verdict == GradingError(item(0).id, "", cause, retryable=False)


@timed
async def test_one_that_has_too_much_to_do_sends_its_calls_to_another() -> None:
    full, free = FakeService(*[BUSY] * 10), FakeService()
    asked = rewards_of(full, free)
    for i in range(4):
        assert await scored(asked, [item(i)]) == [graded(item(i))]
    assert len(free.calls) == 4


@timed
async def test_where_all_have_too_much_to_do_the_call_waits_and_that_is_no_failure() -> None:
    own = FakeService(*[BUSY] * 6)
    asked = rewards_of(own)
    begun = now()
    assert await scored(asked, [item(0)]) == [graded(item(0))]
    assert now() - begun == pytest.approx(0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 2.0)
    assert asked.take_metrics()["reward/retried"] == 0.0


@timed
async def test_patience_with_those_who_have_too_much_to_do_ends() -> None:
    asked = rewards_of(FakeService(*[BUSY] * 100), wait_timeout_s=20.0)
    begun = now()
    (verdict,) = await scored(asked, [item(0)])
    assert isinstance(verdict, GradingError)
    assert str(BUSY) in verdict.cause
    assert 20 <= now() - begun <= 22


@timed
async def test_nothing_is_asked_about_nothing() -> None:
    own = FakeService()
    assert await scored(rewards_of(own, servers=judges(World())), []) == []
    assert own.calls == []


@timed
async def test_a_batch_is_cut_into_calls_for_all_slots() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a", 4), reward_server("b", 12)):
        asked = Rewards(0, [ServerGrader(world.servers, "judge", 1.0)], asks_own=False)
        verdicts = await scored(asked, [item(i) for i in range(128)])
    assert [verdict.id for verdict in verdicts] == [item(i).id for i in range(128)]
    assert (len(world.fakes["a"].calls), len(world.fakes["b"].calls)) == (4, 12)  # of 8 responses each


@timed
async def test_no_call_is_larger_than_a_message_may_be() -> None:
    world = World(a=Fake())
    items = [item(number)._replace(ground_truth="\N{EURO SIGN}" * ((1 << 20) - 1000)) for number in range(30)]
    async with watched(world, reward_server("a", 1)):
        for part in (RewardServices(600.0, 600.0, AsyncMock()), ServerGrader(world.servers, "judge", 1.0)):
            calls = part.split(items)
            assert [one.id for call in calls for one in call] == [one.id for one in items]
            assert [len(call) for call in calls] == [8, 8, 8, 6]
            sizes = [sum(encode_score_item(one).ByteSize() for one in call) for call in calls]
            assert max(sizes) < MAX_MESSAGE_BYTES
    assert [
        len(call)
        for call in RewardServices(600.0, 600.0, AsyncMock()).split([item(number) for number in range(5)])
    ] == [5]
