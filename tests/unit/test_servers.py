"""Other people's servers on a virtual clock: load, failures, leases, retries, what a verdict is made of."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from services.config.schema import ServerConfig
from services.coordinator.rewards import OwnServices, Rewards, ServerGrader, merged
from services.coordinator.servers import LEASE_S
from services.external.protocols import connect
from services.runtime.clients import MAX_MESSAGE_BYTES
from services.runtime.errors import BadAnswerError, OverloadedError, ServiceUnavailableError, UserError
from services.wire import codec
from services.wire.types import ExternalServer, Graded, GradingError, ScoreItem, ServerHealth, Verdict
from tests import virtual_clock
from tests.fake_servers import Fake, World, item, now, reward_server

AWAY = ServiceUnavailableError("connection refused")
NONSENSE = BadAnswerError('got "lots", expected a number')
BUSY = OverloadedError("the queue is full")


def timed(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """The test, on the virtual clock."""

    def run() -> None:
        virtual_clock.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@asynccontextmanager
async def watched(world: World, *registered: ExternalServer) -> AsyncIterator[World]:
    watching = asyncio.create_task(world.servers.watch())
    for server in registered:
        await world.servers.add(server)
    yield world
    watching.cancel()


async def score(world: World, number: int = 1, name: str = "judge") -> list[list[Verdict]]:
    """That many calls of one item each, all at once."""
    return await asyncio.gather(*(world.servers.score(name, [item(i)]) for i in range(number)))


@timed
async def test_servers_of_one_name_share_calls_by_what_each_takes_at_once() -> None:
    world = World(small=Fake(), large=Fake())
    async with watched(world, reward_server("small", 2), reward_server("large", 6)):
        begun = now()
        await score(world, 80)
        assert now() - begun == pytest.approx(10.0)  # 80 calls of a second, 8 at once
    small, large = world.fakes["small"], world.fakes["large"]
    assert (len(small.calls), len(large.calls)) == (20, 60)
    assert (small.peak, large.peak) == (2, 6)


@timed
async def test_calls_that_come_one_by_one_go_round() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a"), reward_server("b")):
        for _ in range(6):
            await score(world)
    assert [len(fake.calls) for fake in world.fakes.values()] == [3, 3]


@timed
async def test_a_slow_server_gets_less() -> None:
    world = World(slow=Fake(seconds=3.0), fast=Fake(seconds=1.0))
    async with watched(world, reward_server("slow", 1), reward_server("fast", 1)):
        await score(world, 40)
    assert (len(world.fakes["slow"].calls), len(world.fakes["fast"].calls)) == (10, 30)


def test_a_dead_server_loses_its_calls_to_the_other_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        world = World(a=Fake(), b=Fake())
        a, b = world.fakes.values()
        async with watched(world, reward_server("a", 2), reward_server("b", 2)):
            a.fails = a.probe_fails = AWAY
            verdicts = await score(world, 30)
            assert all(isinstance(verdict, Graded) for some in verdicts for verdict in some)
            assert len(b.calls) == 30
            assert 3 <= len(a.calls) <= 4  # three in a row, and what was under way with the third
            assert world.unwell() == {"a": "connection refused"}
            before = len(a.calls)
            await score(world, 30)
            assert len(a.calls) == before
            a.fails = a.probe_fails = None
            await asyncio.sleep(31)  # the longest pause between two probes, and a probe
            assert world.unwell() == {}
            await score(world, 30)
            assert len(a.calls) == before + 15

    virtual_clock.run(run())
    assert [record.message for record in caplog.records if "unwell" in record.message] == [
        "reward server judge at a is unwell and gets no calls: connection refused"
    ]
    assert "reward server judge at a is well again" in caplog.messages


@timed
async def test_a_call_that_got_no_answer_is_forgotten_after_one_that_did() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a")):
        for _ in range(5):
            for fails in (AWAY, AWAY, None):
                world.fakes["a"].fails = fails
                await asyncio.gather(world.servers.score("judge", [item(0)]), return_exceptions=True)
    assert world.unwell() == {}


@timed
async def test_a_server_that_answers_probes_and_calls_with_nonsense_is_asked_less_and_less() -> None:
    world = World(a=Fake(fails=NONSENSE))
    async with watched(world, reward_server("a")):
        rewards = Rewards(8, servers=[ServerGrader(world.servers, "judge", 1.0)], asks_own=False)
        begun = now()
        (verdict,) = await rewards.score([item(0)])
    assert isinstance(verdict, GradingError)
    assert (verdict.grader, verdict.cause) == ("server:judge", str(NONSENSE))
    times = [time - begun for time in world.fakes["a"].calls]
    gaps = [after - before for before, after in pairwise(times)]
    # unwell for 1, 2, 4, ... s, 30 at most, and the time of a probe
    assert gaps == pytest.approx([1.01, 2.01, 4.01, 8.01, 16.01, 30.01, 30.01, 30.01])


@timed
async def test_an_idle_server_is_probed_and_one_that_answers_calls_is_not() -> None:
    world = World(idle=Fake(), working=Fake())
    async with watched(world, reward_server("idle", name="style"), reward_server("working")):
        for _ in range(100):
            await score(world)
        assert len(world.fakes["working"].probes) == 1  # when it joined
        assert len(world.fakes["idle"].probes) == 10
        world.fakes["idle"].probe_fails = AWAY
        await asyncio.sleep(11 + 1 + 1)  # three probes
        assert world.unwell() == {"idle": "connection refused"}


@timed
async def test_a_client_that_stumbles_over_an_answer_costs_its_server_and_not_the_run() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a"), reward_server("b")):
        world.fakes["a"].fails = RecursionError("too deep")
        world.fakes["a"].probe_fails = AWAY
        await score(world, 10)
        assert world.unwell() == {"a": "RecursionError: too deep"}
        assert len(world.fakes["b"].calls) == 10
        world.fakes["b"].fails = TimeoutError()
        with pytest.raises(ServiceUnavailableError, match="no answer in time"):
            await score(world)


@timed
async def test_a_registered_server_leaves_once_it_was_unwell_for_the_lease() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a")):
        await world.servers.open([reward_server("b", name="style")])
        assert list(world.store.servers) == ["reward judge a"]
        for fake in world.fakes.values():
            fake.probe_fails = NONSENSE
        await asyncio.sleep(10 + LEASE_S - 5)
        assert set(world.unwell()) == {"a", "b"}
        await asyncio.sleep(5 + 30 + 1)
        assert [health.server.url for health in world.servers.health()] == ["b"]  # of the config
        assert world.store.servers == {}
        assert world.fakes["a"].num_clients == 0


@timed
async def test_two_who_take_the_same_server_out_do_not_meet() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a")):
        world.store.seconds = 1.0
        removals = (world.servers.remove("reward", "judge", url) for url in ("a", ""))
        await asyncio.gather(*removals)
    assert world.servers.health() == ()
    assert world.fakes["a"].num_clients == 0


@timed
async def test_a_server_that_is_sometimes_unwell_stays() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a")):
        for _ in range(5):
            world.fakes["a"].probe_fails = NONSENSE
            await asyncio.sleep(LEASE_S / 2)
            assert world.unwell() != {}
            world.fakes["a"].probe_fails = None
            await asyncio.sleep(60)
            assert world.unwell() == {}
    assert len(world.servers.health()) == 1


@timed
async def test_calls_wait_for_a_server_that_is_well() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a")):
        world.fakes["a"].fails = NONSENSE
        world.fakes["a"].probe_fails = NONSENSE
        await asyncio.gather(world.servers.score("judge", [item(0)]), return_exceptions=True)
        waiting = asyncio.create_task(score(world, 10))
        await asyncio.sleep(60)
        assert not waiting.done()
        await world.servers.add(reward_server("b"))
        await waiting
        assert len(world.fakes["b"].calls) == 10


@timed
async def test_calls_do_not_wait_for_ever() -> None:
    world = World(a=Fake(fails=NONSENSE))
    async with watched(world, reward_server("a")):
        world.fakes["a"].probe_fails = NONSENSE
        await asyncio.gather(world.servers.score("judge", [item(0)]), return_exceptions=True)
        begun = now()
        with pytest.raises(
            ServiceUnavailableError, match=r"waited 100 s: no reward server judge is well.*lots"
        ):
            await score(world)
        assert now() - begun == pytest.approx(100)
        with pytest.raises(ServiceUnavailableError, match="none is registered"):
            await score(world, name="style")


@timed
async def test_a_call_that_is_given_up_while_it_waits_costs_no_slot() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a", 1)):
        calls = [asyncio.create_task(score(world)) for _ in range(5)]
        await asyncio.sleep(0.5)
        for call in calls[:4]:  # the first is under way, three wait
            call.cancel()
        await calls[4]
        await score(world)
    assert len(world.fakes["a"].calls) == 3


@timed
async def test_a_server_that_is_taken_out_finishes_what_it_has() -> None:
    world = World(a=Fake(seconds=5.0), b=Fake())
    async with watched(world, reward_server("a", 1), reward_server("b", 1)):
        calls = asyncio.create_task(score(world, 2))
        await asyncio.sleep(1)
        assert await world.servers.remove("reward", "judge", "a") == 1
        assert world.fakes["a"].num_clients == 1
        assert [len(verdicts) for verdicts in await calls] == [1, 1]
        assert world.fakes["a"].num_clients == 0
        await score(world, 4)
        assert len(world.fakes["a"].calls) == 1
        assert await world.servers.remove("reward", "judge", "a") == 0


@timed
async def test_whoever_is_registered_again_takes_its_own_place() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a", 1), reward_server("a", 8)):
        begun = now()
        await score(world, 8)
        assert now() - begun == pytest.approx(1.0)
        assert [health.server.concurrency for health in world.servers.health()] == [8]


@timed
async def test_of_two_who_register_the_same_server_at_once_one_stays() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a", 1)):
        await asyncio.gather(*(world.servers.add(reward_server("a", count)) for count in (2, 3)))
        assert len(world.servers.health()) == 1
        assert world.fakes["a"].num_clients == 1


@timed
async def test_who_registers_a_server_while_it_is_taken_out_finds_it_kept() -> None:
    world, server = World(a=Fake()), reward_server("a")
    async with watched(world, server):
        world.store.seconds = 1.0
        adding = asyncio.create_task(world.servers.add(server))
        await asyncio.sleep(0.5)  # it is being written
        await asyncio.gather(adding, world.servers.remove("reward", "judge", "a"))
        assert len(world.servers.health()) == len(world.store.servers) == 1
        assert world.fakes["a"].num_clients == 1


@timed
async def test_a_restarted_coordinator_finds_who_was_registered() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a", options={"preset": "slime"}), reward_server("b")):
        await world.servers.remove("reward", "judge", "b")
    later = World(**world.fakes)
    later.store = later.servers._store = world.store  # type: ignore[assignment]
    await later.servers.restore(resume=True)
    assert set(later.unwell()) == {"a"}
    assert later.servers.missing() == ["judge", "style"]
    async with watched(later):
        await asyncio.sleep(1)
        assert later.servers.missing() == ["style"]
        assert later.servers.health() == (
            ServerHealth(reward_server("a", options={"preset": "slime"}), True),
        )
    await later.servers.restore(resume=False)  # a run that begins anew
    assert later.store.servers == {}


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_TOKEN", "sesame-4711")
    judge = reward_server("a")

    async def refused(world: World, server: ExternalServer, *words: str) -> None:
        with pytest.raises(UserError) as caught:
            await world.servers.add(server)
        for word in words:
            assert word in str(caught.value)
        assert "4711" not in str(caught.value)

    async def run() -> None:
        world = World(a=Fake(), b=Fake())
        await refused(world, replace(judge, name="jugde"), "server:judge, server:style", "jugde")
        await refused(world, replace(judge, kind="judge"), "kind")
        await refused(world, replace(judge, name="a b"), "name")
        await refused(world, replace(judge, concurrency=0), "concurrency")
        await refused(world, replace(judge, timeout_s=0.0), "timeout_s")
        await refused(world, replace(judge, url="http://me:4711@host"), "url", "auth")
        await refused(world, replace(judge, auth="sesame-4711"), "auth", "environment variable")
        await refused(world, replace(judge, auth="env:NO_SUCH_TOKEN"), "NO_SUCH_TOKEN is not set")
        assert world.fakes["a"].probes == []
        world.fakes["a"].probe_fails = NONSENSE
        await refused(world, judge, "judge at a", "lots")
        world.fakes["a"].probe_fails = AWAY
        await refused(world, judge, "judge at a", "refused")
        assert world.fakes["a"].num_clients == 0
        with pytest.raises(UserError, match=r"\[\[servers\]\].*connection refused.*atoll register"):
            await world.servers.open([judge])
        world.fakes["a"].probe_fails = None
        await world.servers.open([judge])
        await refused(world, judge, "stands in the run's config")
        with pytest.raises(UserError, match="stands in the run's config"):
            await world.servers.remove("reward", "judge", "")
        assert world.store.servers == {}
        world.servers._connect = connect
        await refused(world, replace(judge, url="b", protocol="openenv", kind="tool"), "openenv", "mcp")

    virtual_clock.run(run())
    assert "4711" not in caplog.text


def test_a_token_is_read_where_it_stands_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("JUDGE_TOKEN", "sesame-4711")

    async def run() -> None:
        world = World(a=Fake())
        async with watched(world, reward_server("a", auth="env:JUDGE_TOKEN")):
            assert world.fakes["a"].token == "sesame-4711"
            assert "4711" not in f"{world.servers.health()} {world.store.servers}"
            assert world.servers.health()[0].server.auth == "env:JUDGE_TOKEN"

    virtual_clock.run(run())
    assert "4711" not in caplog.text
    with pytest.raises(ValueError, match="environment variable") as caught:
        ServerConfig(kind="reward", name="judge", url="http://a", protocol="http", auth="sesame-4711")
    assert all("4711" not in problem["msg"] for problem in caught.value.errors())  # type: ignore[attr-defined]


@timed
async def test_tool_and_env_servers_need_no_grader_and_show_their_health() -> None:
    world = World(a=Fake(), b=Fake())
    tool = ExternalServer("tool", "search", "a", "mcp")
    env = ExternalServer("env", "maze", "b", "openenv")
    async with watched(world, tool, env):
        changes = world.changes
        world.fakes["a"].probe_fails = NONSENSE
        await asyncio.sleep(11)
        assert world.servers.health() == (
            ServerHealth(env, True),
            ServerHealth(tool, False, str(NONSENSE)),
        )
        assert world.changes == changes + 1


# What a verdict is made of


class Own:
    """The run's own reward service: exact_match with weight 0.5."""

    def __init__(self, *failures: Verdict | Exception) -> None:
        self.failures = list(failures)
        self.calls: list[tuple[float, int]] = []  # when, of how many items

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        self.calls.append((now(), len(items)))
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            others = [item for item in items if item.id != failure.id]
            return [failure, *(graded(item) for item in others)]
        return [graded(item) for item in items]


def graded(item: ScoreItem) -> Graded:
    return Graded(item.id, 0.5, {"exact_match": 1.0}, {"exact_match": "right"})


def rewards(world: World, *own: Own, retries: int = 3, **settings: Any) -> Rewards:
    graders = [ServerGrader(world.servers, "judge", 2.0), ServerGrader(world.servers, "style", -0.25)]
    return Rewards(retries, own, graders, **settings)  # type: ignore[arg-type]


@timed
async def test_a_verdict_is_the_weighted_sum_of_all_parts_with_all_components() -> None:
    world = World(judge=Fake(value=0.75), style=Fake(value=3.0))
    own = Own()
    async with watched(world, reward_server("judge"), reward_server("style", name="style")):
        begun = now()
        verdicts = await rewards(world, own).score([item(i) for i in range(4)])
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
    assert merged(item(0).id, []) == Graded(item(0).id, 0.0, {})


@timed
async def test_only_the_part_and_the_responses_that_failed_are_asked_again_and_later_each_time() -> None:
    world = World(judge=Fake(), style=Fake())
    passing = GradingError(item(1).id, "exact_match", "OSError: no route", retryable=True)
    own = Own(passing, passing, passing)
    async with watched(world, reward_server("judge"), reward_server("style", name="style")):
        asked = rewards(world, own)
        begun = now()
        verdicts = await asked.score([item(i) for i in range(4)])
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


@timed
async def test_a_part_that_fails_for_good_leaves_no_score() -> None:
    world = World(judge=Fake(), style=Fake())
    broken = GradingError(item(1).id, "exact_match", "ValueError: a bug", retryable=False)
    own = Own(broken)
    async with watched(world, reward_server("judge"), reward_server("style", name="style")):
        asked = rewards(world, own)
        verdicts = await asked.score([item(i) for i in range(4)])
    assert [verdict for verdict in verdicts if not isinstance(verdict, Graded)] == [broken]
    assert len(own.calls) == 1
    assert asked.take_metrics() == {"reward/retried": 0.0, "reward/dropped": 1.0}


@timed
async def test_a_service_that_is_gone_is_asked_again_and_blamed_in_the_end() -> None:
    world = World()
    asked = Rewards(2, [Own(AWAY, AWAY, AWAY)])  # type: ignore[list-item]
    begun = now()
    (verdict,) = await asked.score([item(0)])
    assert now() - begun == pytest.approx(0.5 + 1.0)
    assert verdict == GradingError(item(0).id, "service", "connection refused", retryable=True)
    assert world.changes == 0


@timed
async def test_a_sum_that_is_no_finite_number_is_no_score() -> None:
    world = World(judge=Fake(value=1e308))
    async with watched(world, reward_server("judge")):
        grader = ServerGrader(world.servers, "judge", 2.0)
        (verdict,) = await Rewards(0, servers=[grader], asks_own=False).score([item(0)])
    cause = "got a weighted sum of inf, expected a finite number"
    assert verdict == GradingError(item(0).id, "", cause, retryable=False)


@timed
async def test_each_call_asks_every_service_once_however_many_calls_there_are() -> None:
    class Dying(Own):
        async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
            await asyncio.sleep(1)
            raise AWAY

    asked = Rewards(0, [Dying(), Own()])  # type: ignore[list-item]
    verdicts = await asyncio.gather(*(asked.score([item(i)]) for i in range(8)))
    assert verdicts == [[graded(item(i))] for i in range(8)]


@timed
async def test_one_that_has_too_much_to_do_sends_its_calls_to_another() -> None:
    full, free = Own(*[BUSY] * 10), Own()
    asked = Rewards(0, [full, free])  # type: ignore[list-item]
    for i in range(4):
        assert await asked.score([item(i)]) == [graded(item(i))]
    assert len(free.calls) == 4


@timed
async def test_where_all_have_too_much_to_do_the_call_waits_and_that_is_no_failure() -> None:
    own = Own(*[BUSY] * 6)
    asked = Rewards(0, [own])  # type: ignore[list-item]
    begun = now()
    assert await asked.score([item(0)]) == [graded(item(0))]
    assert now() - begun == pytest.approx(0.1 + 0.2 + 0.4 + 0.8 + 1.6 + 2.0)
    assert asked.take_metrics()["reward/retried"] == 0.0


@timed
async def test_patience_with_those_who_have_too_much_to_do_ends() -> None:
    asked = Rewards(0, [Own(*[BUSY] * 100)], patience_s=20.0)  # type: ignore[list-item]
    begun = now()
    (verdict,) = await asked.score([item(0)])
    assert isinstance(verdict, GradingError)
    assert verdict.cause == str(BUSY)
    assert 20 <= now() - begun <= 22


@timed
async def test_a_busy_external_server_stays_well_and_another_gets_the_call() -> None:
    world = World(a=Fake(fails=BUSY), b=Fake())
    async with watched(world, reward_server("a"), reward_server("b")):
        await score(world, 10)
        assert world.unwell() == {}
        world.fakes["b"].fails = BUSY
        with pytest.raises(OverloadedError):
            await score(world)
        assert world.unwell() == {}
    assert len(world.fakes["b"].calls) == 11


@timed
async def test_nothing_is_asked_about_nothing() -> None:
    own = Own()
    assert await rewards(World(), own).score([]) == []
    assert own.calls == []


@timed
async def test_a_batch_is_cut_into_calls_for_all_slots() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a", 4), reward_server("b", 12)):
        asked = Rewards(0, servers=[ServerGrader(world.servers, "judge", 1.0)], asks_own=False)
        verdicts = await asked.score([item(i) for i in range(128)])
    assert [verdict.id for verdict in verdicts] == [item(i).id for i in range(128)]
    assert (len(world.fakes["a"].calls), len(world.fakes["b"].calls)) == (4, 12)  # of 8 responses each


@timed
async def test_no_call_is_larger_than_a_message_may_be() -> None:
    """A run that continues has all its finished samples graded at once."""
    world = World(a=Fake())
    items = [replace(item(number), ground_truth="\N{EURO SIGN}" * ((1 << 20) - 100)) for number in range(30)]
    async with watched(world, reward_server("a", 1)):
        for part in (OwnServices(), ServerGrader(world.servers, "judge", 1.0)):
            calls = part.split(items)
            assert [one.id for call in calls for one in call] == [one.id for one in items]
            assert [len(call) for call in calls] == [8, 8, 8, 6]
            sizes = [sum(codec.encode_score_item(one).ByteSize() for one in call) for call in calls]
            assert max(sizes) < MAX_MESSAGE_BYTES
    assert [len(call) for call in OwnServices().split([item(number) for number in range(5)])] == [5]
