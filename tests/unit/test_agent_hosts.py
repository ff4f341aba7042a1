"""Which process of an agent gets the next session."""

import asyncio
from contextlib import AsyncExitStack

from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.runtime.clients.agents import AgentsClient
from tests.tokens import CALLER


def client() -> AgentsClient:
    return AgentsClient("127.0.0.1:9", CALLER)


async def test_sessions_go_to_the_process_with_the_smallest_share_of_places_taken() -> None:
    hosts, small, large, other = AgentHosts(), client(), client(), client()
    hosts.add(small, {"a": 1})
    hosts.add(large, {"a": 3})
    hosts.add(other, {"b": 9})
    async with AsyncExitStack() as places:
        taken = [await places.enter_async_context(hosts.place("a")) for _ in range(4)]
        assert taken == [small, large, large, large]
        assert await places.enter_async_context(hosts.place("b")) is other
    async with hosts.place("a") as chosen:  # all places were given back
        assert chosen is small


async def test_a_session_waits_for_a_place_and_for_a_process() -> None:
    hosts, first, second = AgentHosts(), client(), client()
    waiting = asyncio.Event()

    async def wait() -> AgentsClient:
        waiting.set()
        async with hosts.place("a") as chosen:
            return chosen

    none_yet = asyncio.create_task(wait())
    await waiting.wait()
    hosts.add(first, {"a": 1})
    assert await asyncio.wait_for(none_yet, 30) is first
    async with hosts.place("a"):
        full = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert not full.done()
    assert await asyncio.wait_for(full, 30) is first
    async with hosts.place("a"):
        hosts.remove(first)  # while it holds a session
        hosts.add(second, {"a": 1})
        assert await asyncio.wait_for(wait(), 30) is second


async def test_who_gives_up_waiting_takes_no_place() -> None:
    hosts, host = AgentHosts(), client()
    hosts.add(host, {"a": 1})
    async with hosts.place("a"):
        impatient = asyncio.create_task(hosts.place("a").__aenter__())
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.wait([impatient])
    async with asyncio.timeout(30), hosts.place("a") as chosen:
        assert chosen is host


async def test_places_go_to_those_who_asked_first_and_wake_nobody_else() -> None:
    hosts, host = AgentHosts(), client()
    hosts.add(host, {"a": 1, "b": 1})
    woken: list[int] = []

    async def wait(number: int) -> None:
        async with hosts.place("a"):
            woken.append(number)
            await leave[number].wait()

    leave = [asyncio.Event() for _ in range(4)]
    waiting = [asyncio.create_task(wait(number)) for number in range(4)]
    await asyncio.sleep(0)
    assert woken == [0]
    async with hosts.place("b") as chosen:  # a place for another agent is free
        assert chosen is host
    waiting[1].cancel()
    leave[0].set()  # in the same turn of the loop as the cancellation
    await asyncio.wait(waiting[:2])
    await asyncio.sleep(0)
    assert woken == [0, 2]
    leave[2].set()
    leave[3].set()
    await asyncio.wait(waiting)
    assert woken == [0, 2, 3]


async def test_a_process_is_drained_once_its_sessions_have_ended() -> None:
    hosts, first, second = AgentHosts(), client(), client()
    hosts.add(first, {"a": 1})
    async with hosts.place("a"):
        hosts.add(second, {"a": 1})
        async with hosts.place("a") as chosen:
            assert chosen is second
            draining = asyncio.create_task(hosts.drain(first))
            await asyncio.sleep(0)
        assert not draining.done()  # a session at another process has ended
    async with asyncio.timeout(30):
        await draining
