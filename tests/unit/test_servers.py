"""External servers on a virtual clock: load, failures, leases, retries."""

import asyncio
import logging
from dataclasses import replace
from itertools import pairwise

import pytest

from atoll.config.schema import ServerConfig
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rewards.server_pool import Name
from atoll.coordinator.rewards.servers import LEASE_S
from atoll.coordinator.rewards.verdict_sources import ServerGrader
from atoll.external.protocols import connect
from atoll.runtime.errors import (
    AtollError,
    OverloadedError,
    ProtocolError,
    ServiceUnavailableError,
    UserError,
)
from atoll.wire.codec.fleet import decode_stored_server, encode_server
from atoll.wire.types import ExternalServer, Graded, GradingError, ServerHealth, Verdict
from tests import virtual_clock
from tests.fake_rewards import scored
from tests.fake_servers import ADDRESS, Fake, World, item, now, reward_server, watched
from tests.virtual_clock import timed

AWAY = ServiceUnavailableError("connection refused")
NONSENSE = ProtocolError('got "lots", expected a number')
SILENT = "it does not answer, or not in time"  # what others than the log say of a registered server
WRONG = "it violates its protocol"
BUSY = OverloadedError("the queue is full")
JUDGES: list[Name] = [("reward", "judge"), ("reward", "style")]


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
            assert world.unhealthy() == {"a": SILENT}
            before = len(a.calls)
            await score(world, 30)
            assert len(a.calls) == before
            a.fails = a.probe_fails = None
            await asyncio.sleep(31)  # the longest pause between two probes, and a probe
            assert world.unhealthy() == {}
            await score(world, 30)
            assert len(a.calls) == before + 15

    virtual_clock.run(run())
    assert [record.message for record in caplog.records if "unhealthy" in record.message] == [
        "reward server judge at a is unhealthy and gets no calls: connection refused"
    ]
    assert "reward server judge at a is healthy again" in caplog.messages


@timed
async def test_a_call_that_got_no_answer_is_forgotten_after_one_that_did() -> None:
    world = World(a=Fake())
    async with watched(world, reward_server("a")):
        for _ in range(5):
            for fails in (AWAY, AWAY, None):
                world.fakes["a"].fails = fails
                await asyncio.gather(world.servers.score("judge", [item(0)]), return_exceptions=True)
    assert world.unhealthy() == {}


@timed
async def test_a_server_that_answers_probes_and_calls_with_nonsense_is_asked_less_and_less() -> None:
    world = World(a=Fake(fails=NONSENSE))
    async with watched(world, reward_server("a")):
        rewards = Rewards(8, [ServerGrader(world.servers, "judge", 1.0)], asks_own=False)
        begun = now()
        (verdict,) = await scored(rewards, [item(0)])
    assert isinstance(verdict, GradingError)
    assert (verdict.grader, verdict.cause) == ("server:judge", f"reward server judge at a: {WRONG}")
    times = [time - begun for time in world.fakes["a"].calls]
    gaps = [after - before for before, after in pairwise(times)]
    # unhealthy for 1, 2, 4, ... s, 30 at most, and the time of a probe
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
        assert world.unhealthy() == {"idle": SILENT}


@timed
async def test_a_client_that_stumbles_over_an_answer_costs_its_server_and_not_the_run() -> None:
    world = World(a=Fake(), b=Fake())
    async with watched(world, reward_server("a"), reward_server("b")):
        world.fakes["a"].fails = RecursionError("too deep")
        world.fakes["a"].probe_fails = AWAY
        await score(world, 10)
        assert world.unhealthy() == {"a": WRONG}
        assert len(world.fakes["b"].calls) == 10
        world.fakes["b"].fails = TimeoutError()
        with pytest.raises(ServiceUnavailableError, match=f"^reward server judge at b: {SILENT}$"):
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
        assert set(world.unhealthy()) == {"a", "b"}
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
            assert world.unhealthy() != {}
            world.fakes["a"].probe_fails = None
            await asyncio.sleep(60)
            assert world.unhealthy() == {}
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
            ServiceUnavailableError, match=rf"waited 100 s: no reward server judge is healthy.*{WRONG}"
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
    assert set(later.unhealthy()) == {"a"}
    assert later.servers.missing(JUDGES) == JUDGES
    async with watched(later):
        await asyncio.sleep(1)
        assert later.servers.missing(JUDGES) == JUDGES[1:]
        assert later.servers.health() == (
            ServerHealth(reward_server("a", options={"preset": "slime"}, address=ADDRESS), True),
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
        unknown = [replace(judge, auth=f"env:{name}") for name in ("JUDGE_NO_SUCH", "HOME")]
        for server in unknown:  # one that may be named and is not set, one that is set and may not be named
            await refused(world, server, f"{server.auth}: the variable must be listed", "and set")
        assert world.fakes["a"].probes == []
        world.fakes["a"].probe_fails = NONSENSE
        await refused(world, judge, f"judge at a: {WRONG}; see the coordinator's log")
        world.fakes["a"].probe_fails = AWAY
        await refused(world, judge, f"judge at a: {SILENT}")
        assert world.fakes["a"].num_clients == 0
        with pytest.raises(UserError, match=r"\[\[servers\]\].* at a: connection refused.*atoll register"):
            await world.servers.open([judge])
        world.fakes["a"].probe_fails = None
        await world.servers.open([judge])
        await refused(world, judge, "is listed in the run's config")
        with pytest.raises(UserError, match="is listed in the run's config"):
            await world.servers.remove("reward", "judge", "")
        assert world.store.servers == {}
        world.servers._connect = connect
        await refused(world, replace(judge, url="b", protocol="openenv", kind="tool"), "openenv", "mcp")

    virtual_clock.run(run())
    assert "4711" not in caplog.text
    assert 'reward server judge at a was not added: got "lots", expected a number' in caplog.messages


@timed
async def test_what_a_registered_server_answers_is_shown_to_nobody() -> None:
    world = World(a=Fake(), b=Fake())
    secret_page = ProtocolError("got status 200 and 'AKIA-4711'")
    async with watched(world, reward_server("a")):
        for fails in (secret_page, UserError("the server has AKIA-4711"), OverloadedError("after AKIA-4711")):
            world.fakes["a"].fails = world.fakes["b"].probe_fails = fails
            with pytest.raises(AtollError) as asked:
                await score(world)
            assert "4711" not in f"{asked.value} {world.servers.health()}"
            if not isinstance(fails, OverloadedError):  # who is busy is there
                with pytest.raises(UserError) as registered:
                    await world.servers.add(reward_server("b"))
                assert "4711" not in str(registered.value)


@timed
async def test_a_restarted_coordinator_asks_its_file_again_who_may_be_called() -> None:
    world = World(a=Fake(), b=Fake(), c=Fake())
    await world.servers.add(reward_server("a", address="169.254.169.254"))  # which is not theirs to say
    await world.servers.add(reward_server("b", name="style"))
    kept = {key: decode_stored_server(content) for key, content in world.store.servers.items()}
    assert [server.address for server in kept.values()] == [ADDRESS, ADDRESS]
    moved = {"a": "10.0.0.1", "b": ""}  # no longer listed; of an earlier version
    world.store.servers = {
        key: encode_server(replace(server, address=moved[server.url])).SerializeToString()
        for key, server in kept.items()
    }
    later = World(**world.fakes)
    later.store = later.servers._store = world.store  # type: ignore[assignment]
    await later.servers.restore(resume=True)
    assert later.servers.health() == ()


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
            ServerHealth(replace(env, address=ADDRESS), True),
            ServerHealth(replace(tool, address=ADDRESS), False, WRONG),
        )
        assert world.changes == changes + 1


@timed
async def test_a_busy_external_server_stays_well_and_another_gets_the_call() -> None:
    world = World(a=Fake(fails=BUSY), b=Fake())
    async with watched(world, reward_server("a"), reward_server("b")):
        await score(world, 10)
        assert world.unhealthy() == {}
        world.fakes["b"].fails = BUSY
        with pytest.raises(OverloadedError):
            await score(world)
        assert world.unhealthy() == {}
    assert len(world.fakes["b"].calls) == 11
