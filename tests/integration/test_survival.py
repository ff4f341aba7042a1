"""Services join, leave, get SIGTERM and stand still while a run of real processes trains: no sample is lost,
none is generated twice, no step is repeated, and nothing is left behind.

SURVIVAL_SEEDS is how many seeds choose the moments.
"""

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from atoll.cli.launch.launcher import launch
from atoll.config.schema import RunConfig
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.ports import reserve_port
from tests.survival.checks import (
    check_generated_once,
    check_history,
    check_no_work_after,
    check_nothing_left,
    check_saved,
    generated_step,
    last_step,
    processes,
)
from tests.survival.moments import Moments
from tests.survival.runs import (
    Seeded,
    bounded,
    launched,
    make,
    make_with_agents,
    reached,
    registered,
    routed,
    start_all,
    steps_on,
)
from tests.survival.services import Services

pytestmark = pytest.mark.long

SEEDS = range(int(os.environ.get("SURVIVAL_SEEDS", "1")))
MORE_STEPS = 3
STANDSTILL_S = 30.0


async def terminate(client: CoordinatorClient, seeded: Seeded, name: str) -> None:
    """A service of the launcher's; ends with two steps of its successor."""
    before = await registered(client, name)
    async with seeded.moment():
        launched(name).send_signal(signal.SIGTERM)
    await registered(client, name, before)
    await steps_on(client)


@dataclass
class Disturbance:
    """Follows a run under the launcher: a replica joins by hand, every service gets SIGTERM, and at last the
    launcher."""

    config: RunConfig
    seeded: Seeded

    async def __call__(self, client: CoordinatorClient) -> None:
        async with self.seeded.seen, Services(self.config) as services:
            await reached(client, 1)
            await services.start("rollout", "by-hand", client.address)
            await routed(client, 2)
            for name in ("rollout-0", "reward-0", "actor-0"):
                await terminate(client, self.seeded, name)
            await routed(client, 2)
            async with self.seeded.moment("decode"):
                step = generated_step(self.config)
                services.processes["by-hand"].send_signal(signal.SIGTERM)
            assert await services.wait("by-hand") == 0
            await steps_on(client)
            check_no_work_after(self.config, "by-hand", step)
            async with self.seeded.moment():
                os.kill(os.getpid(), signal.SIGTERM)  # to the launcher, which stops the coordinator
            await asyncio.Event().wait()


@dataclass
class CoordinatorEnds:
    """Follows a resumed run under the launcher: after `step`, the coordinator itself gets SIGTERM."""

    step: int
    seeded: Seeded

    async def __call__(self, client: CoordinatorClient) -> None:
        async with self.seeded.seen:
            await reached(client, self.step)
            async with self.seeded.moment():
                launched("atoll.coordinator").send_signal(signal.SIGTERM)
            await asyncio.Event().wait()


@dataclass
class AgentsDisturbance:
    """Follows a run with agents under the launcher: their process and the gateway get SIGTERM."""

    seeded: Seeded

    async def __call__(self, client: CoordinatorClient) -> None:
        async with self.seeded.seen:
            await reached(client, 1)
            for name in ("gateway-0", "agents-0"):
                await terminate(client, self.seeded, name)
            await client.stop_run()
            await asyncio.Event().wait()


def check_left_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """Every service, with exit code 0: of any other, the launcher warns."""
    assert [message for message in caplog.messages if message.startswith("restart")] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_under_the_launcher(
    assets: Path, survival: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    config = make(assets, survival)
    seeded = Seeded(random.Random(seed), Moments(survival))
    assert not launch(config, Disturbance(config, seeded), resume=False)
    check_left_in_order(caplog)
    steps = last_step(config)
    check_history(config, steps)
    check_generated_once(config)
    check_saved(config, steps)
    check_nothing_left(config)
    seeded = Seeded(seeded.rng, Moments(survival))
    assert launch(config, CoordinatorEnds(steps + MORE_STEPS, seeded), resume=True)
    steps = last_step(config)
    check_history(config, steps)
    check_saved(config, steps)
    check_nothing_left(config)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_agents(survival: Path, caplog: pytest.LogCaptureFixture, seed: int) -> None:
    config = make_with_agents(survival)
    assert launch(config, AgentsDisturbance(Seeded(random.Random(seed), Moments(survival))), resume=False)
    check_left_in_order(caplog)
    check_history(config, last_step(config))
    check_nothing_left(config)


@pytest.mark.parametrize("seed", SEEDS)
async def test_without_a_launcher(assets: Path, survival: Path, seed: int) -> None:
    """Two runs at once, since one of them mostly waits."""
    async with asyncio.TaskGroup() as both:
        both.create_task(every_service_gets_sigterm(assets, survival / "sigterm", seed))
        both.create_task(the_coordinator_stands_still(assets, survival / "sigstop", seed))


async def every_service_gets_sigterm(assets: Path, folder: Path, seed: int) -> None:
    """A replica joins, and another one leaves; then every service ends once and is started again."""
    with reserve_port() as port:
        config = make(assets, folder, coordinator={"port": port})
        async with Services(config) as services, Moments(folder) as seen:
            seeded = Seeded(random.Random(seed), seen)
            await start_all(services)
            client = services.client()
            await reached(client, 1)
            await services.start("rollout", "rollout-1")
            await routed(client, 2)
            async with seeded.moment("decode"):
                step = generated_step(config)
                services.processes["rollout-0"].send_signal(signal.SIGTERM)
            assert await services.wait("rollout-0") == 0
            await steps_on(client)
            check_no_work_after(config, "rollout-0", step)
            for role, name in (("reward", "reward-0"), ("trainer", "actor-0"), ("rollout", "rollout-1")):
                async with seeded.moment():
                    services.processes[name].send_signal(signal.SIGTERM)
                assert await services.wait(name) == 0
                await services.start(role, name)
                await steps_on(client)
            check_generated_once(config)
            async with seeded.moment():
                services.processes["coordinator"].send_signal(signal.SIGTERM)
            assert await services.wait("coordinator") == 0
            await client.close()
            steps = last_step(config)
            check_saved(config, steps)
            await services.start_coordinator(bounded(config, steps + MORE_STEPS))
            assert set((await services.wait_for_all()).values()) == {0}
            assert await services.terminate("store") == 0
    check_history(config, steps + MORE_STEPS)
    check_nothing_left(config)


async def the_coordinator_stands_still(assets: Path, folder: Path, seed: int) -> None:
    """For several leases; then everything is stopped, the coordinator first."""
    with reserve_port() as port:
        config = make(assets, folder, coordinator={"port": port})
        async with Services(config) as services, Moments(folder) as seen:
            seeded = Seeded(random.Random(seed), seen)
            await start_all(services)
            client = services.client()
            before = (await reached(client, 1)).services
            async with seeded.moment():
                services.processes["coordinator"].send_signal(signal.SIGSTOP)
            await asyncio.sleep(STANDSTILL_S)  # real, since leases are
            services.processes["coordinator"].send_signal(signal.SIGCONT)
            await steps_on(client, 4)
            assert (await client.status()).services == before
            assert " leaves" not in (config.folder / "logs" / "coordinator.log").read_text()
            await client.close()
            assert {process.pid for process in services.processes.values()} < {
                process.pid for process in processes(config)
            }
            for name in ("coordinator", "actor-0", "rollout-0", "reward-0", "store"):
                assert await services.terminate(name) == 0
    check_history(config, last_step(config))
    check_generated_once(config)
    check_nothing_left(config)
