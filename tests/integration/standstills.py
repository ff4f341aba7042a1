"""Every service but store and coordinator stands still for half a lease: none is lost, no step is repeated.

SURVIVAL_SEEDS is how many seeds choose the moments; run by `make test-survival`.
"""

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.cli.launch.launcher import launch
from atoll.runtime.clients.coordinator import CoordinatorClient
from tests.survival.checks import check_generated_once, check_history, check_nothing_left, last_step
from tests.survival.moments import Moments
from tests.survival.runs import LEASE_S, Seeded, launched, make, make_with_agents, reached, steps_on

SEEDS = range(int(os.environ.get("SURVIVAL_SEEDS", "1")))


@dataclass
class Standstills:
    """Follows a run under the launcher, whose services stand still one after the other."""

    seeded: Seeded
    names: tuple[str, ...]

    async def __call__(self, client: CoordinatorClient) -> None:
        async with self.seeded.seen:
            before = (await reached(client, 1)).services
            for name in self.names:
                process = launched(name)
                async with self.seeded.moment():
                    process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(LEASE_S / 2)  # real, since leases are
                process.send_signal(signal.SIGCONT)
                await steps_on(client)
            assert (await client.status()).services == before
            await client.stop_run()
            await asyncio.Event().wait()


@pytest.mark.parametrize("seed", SEEDS)
def test_services_stand_still(assets: Path, survival: Path, seed: int) -> None:
    config, seeded = make(assets, survival), Seeded(random.Random(seed), Moments(survival))
    assert launch(config, Standstills(seeded, ("actor-0", "rollout-0", "reward-0")), resume=False)
    check_history(config, last_step(config))
    check_generated_once(config)
    check_nothing_left(config)


@pytest.mark.parametrize("seed", SEEDS)
def test_services_of_agents_stand_still(survival: Path, seed: int) -> None:
    config, seeded = make_with_agents(survival), Seeded(random.Random(seed), Moments(survival))
    assert launch(config, Standstills(seeded, ("gateway-0", "agents-0")), resume=False)
    check_history(config, last_step(config))
    check_generated_once(config)
    check_nothing_left(config)
