"""How long the coordinator waits for the services of a run."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.directory import ServiceDirectory
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.rewards.rewards import Rewards
from atoll.runtime.errors import ServiceUnavailableError
from tests import virtual_clock
from tests.builders import run_config
from tests.tokens import CALLER


class NoRegistry:
    """Nobody ever joins."""


class NobodyGenerates:
    async def may_generate(self, replica: Replica) -> bool:
        return True

    async def catch_up(self, replica: Replica) -> None:
        raise AssertionError(f"{replica} joined")


def test_a_service_may_load_its_model_for_as_long_as_the_config_says() -> None:
    section = run_config().coordinator

    async def run() -> None:
        replicas = Replicas(CALLER, section.request_timeout_s)
        membership = ServiceDirectory(
            NoRegistry(),  # type: ignore[arg-type]
            replicas,
            Rewards(retries=0),
            AgentHosts(),
            Gateways(),
            CALLER,
            section.request_timeout_s,
            NobodyGenerates(),
            "actor",
            AsyncMock(),
        )
        begun = asyncio.get_running_loop().time()
        with pytest.raises(ServiceUnavailableError, match=r"start_timeout_s\) still missing: 1 x actor, 2 x"):
            await membership.wait_for({"actor": 1, "rollout": 2}, section.start_timeout_s)
        assert asyncio.get_running_loop().time() - begun == section.start_timeout_s >= 3600

    virtual_clock.run(run())
