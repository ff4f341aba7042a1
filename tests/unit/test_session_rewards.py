"""What becomes of the number that an agent function returns."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import pytest

from atoll.config.schema import AgentConfig
from atoll.coordinator.background import BackgroundWork
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.rollouts.agent_sessions import AgentSessions
from atoll.runtime.errors import UserError
from atoll.wire.codec.trajectories import encode_payload
from atoll.wire.types import AgentOutcome, SessionEnd, Trajectory
from tests.builders import node, pending, sample, sample_id


async def play(reward: str, returned: float | None, weight: float = 1.0) -> Trajectory:
    """The sample of one session of an agent with this `reward`, whose function returned that."""
    drawn = encode_payload([sample(sample_id(), node([3, 4]))])
    client = MagicMock(
        open=AsyncMock(return_value=("", True)), end=AsyncMock(return_value=(SessionEnd.DONE, drawn))
    )
    link = MagicMock(client=client)
    gateways = MagicMock(choose=AsyncMock(return_value=link))
    gateways.place.return_value.__aenter__.return_value = link
    hosts, agent = (
        AgentHosts(),
        AgentConfig.model_construct(name="solver", reward=reward, reward_weight=weight),
    )
    hosts.add(MagicMock(run=AsyncMock(return_value=AgentOutcome(reward=returned))), {"solver": 1})
    received: asyncio.Queue[Trajectory] = asyncio.Queue()

    async def receive(samples: Sequence[Trajectory], payload: bytes) -> None:
        received.put_nowait(samples[0])

    turns: Any = MagicMock()
    servers = MagicMock()
    servers.lend.return_value.__aenter__.return_value = ()
    sessions = AgentSessions(
        {"solver": agent}, gateways, hosts, servers, turns, receive, AsyncMock(), model="toy"
    )
    group = pending(0, 1)
    group.prompt = replace(group.prompt, agent="solver")
    sessions.submit([group])

    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            sessions.start(tasks)

    work = BackgroundWork(run())
    try:
        return await work.wait_for(received.get())
    finally:
        await work.end()


async def test_it_is_the_score_of_a_session_that_brings_its_reward() -> None:
    assert (await play("session", 0.25)).score == 0.25


async def test_it_is_refused_beside_graders() -> None:
    with pytest.raises(UserError, match=r"returned 0.25, and reward.graders score its sessions: set reward"):
        await play("graders", 0.25)


async def test_beside_graders_it_is_weighed() -> None:
    """Its component stays what the agent said."""
    played = await play("both", 0.25, weight=0.5)
    assert [(reward.value, dict(reward.components)) for reward in played.rewards] == [
        (0.125, {"agent": 0.25})
    ]


async def test_none_leaves_the_score_to_graders() -> None:
    assert (await play("graders", None)).rewards == ()
