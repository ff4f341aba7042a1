"""A trainer rank dies in mid-run: its group comes back and the run goes on, as if nothing had happened."""

import asyncio
import json
import os
import re
import signal
import sys
from asyncio.subprocess import STDOUT, Process
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.cli.launch.launcher import launch
from atoll.config.load import write_resolved
from atoll.config.schema import RunConfig
from atoll.coordinator.control import RunControl
from atoll.coordinator.fleet.registry import Registry, ServiceJoined, ServiceLeft
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.dump import dumps, read_dump
from atoll.runtime.errors import ServiceUnavailableError
from atoll.runtime.ports import reserve_port
from atoll.runtime.store import Store
from atoll.wire.info import RunStatus
from tests.builders import arithmetic_run, run_config
from tests.coordinator_server import serve_coordinator
from tests.scraping import scrape
from tests.tokens import TOKEN

pytestmark = pytest.mark.long

STEPS = 6
ENDLESS = {"steps": 1000}  # so that no death can come after the end; the run is stopped after STEPS
STATES = ("starting", "warming up", "training")
JOIN_TIMEOUT_S = 180  # a start takes ten seconds where the machine has nothing else to do


def make(assets: Path, name: str, **sections: dict[str, Any]) -> RunConfig:
    """Six on-policy steps of 4 x 4 samples with an actor of two ranks, a checkpoint every two steps."""
    tree = {
        "run": {"name": name, "steps": STEPS},
        "coordinator": {"lease_s": 3.0},
        "trainer": {"parallel": {"data": 2}},
        "warmup": {"steps": 10, "rows_per_step": 16, "source": {"path": assets / "warmup.parquet"}},
        "checkpoint": {"every": 2},
    }
    return run_config(arithmetic_run(assets, assets.with_name("fleet")), tree, sections)


def processes() -> dict[str, psutil.Process]:
    """Those of the run in this process, by name; the coordinator and the store among them."""
    named = {}
    for process in psutil.Process().children():
        words = process.cmdline()
        name = words[words.index("--name") + 1] if "--name" in words else Path(words[0]).name
        named["coordinator" if "atoll.coordinator" in words else name] = process
    return named


async def reached(client: CoordinatorClient, state: str, step: int = 0) -> RunStatus:
    """The first that is seen of this state and step, or of a later state."""
    status = await client.status()
    while status.state not in STATES[STATES.index(state) :] or (status.state == state and status.step < step):
        status = await client.status(status.revision)
    return status


async def recovering(client: CoordinatorClient) -> RunStatus:
    status = await client.status()
    while status.state != "recovering":
        status = await client.status(status.revision)
    return status


async def saved(client: CoordinatorClient, checkpoint: Path) -> None:
    """It is written beside the steps, which go on."""
    status = await client.status()
    while not await asyncio.to_thread(checkpoint.exists):
        status = await client.status(status.revision)


class Killer:
    """Follows an endless run, kills ranks at their times or soon after, and stops it in the end; remembers
    who was there before and afterwards."""

    def __init__(self, *deaths: tuple[str, str, int], checkpoint: Path | None = None) -> None:
        """`deaths`: name, state and step at which it is killed, once the checkpoint is there."""
        self._deaths, self._checkpoint = deaths, checkpoint
        self.before: dict[str, psutil.Process] = {}
        self.after: dict[str, psutil.Process] = {}
        self.seen: list[RunStatus] = []

    async def __call__(self, client: CoordinatorClient) -> None:
        for name, state, step in self._deaths:
            await reached(client, state, step)
            if self._checkpoint:
                await saved(client, self._checkpoint)
            self.before = processes()
            self.before[name].send_signal(signal.SIGKILL)
            self.seen.append(await recovering(client))
            self.seen.append(await reached(client, "training"))
            self.after = processes()
        # beyond what was dumped before a death
        await reached(client, "training", max(STEPS, *(status.step + 1 for status in self.seen)))
        await client.stop_run()
        await asyncio.Event().wait()

    def check_who_stayed(self, *restarted: str) -> None:
        assert self.before.keys() == self.after.keys()
        changed = {name for name, process in self.before.items() if process != self.after[name]}
        assert changed == set(restarted)


def rows(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]


def curve(config: RunConfig) -> list[tuple[float, ...]]:
    names = ("step", "critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy")
    return [tuple(row[name] for name in names) for row in rows(config) if "actor/pg_loss" in row]


def consumed(config: RunConfig) -> Counter[str]:
    groups = [group for path in dumps(config.folder / "dumps") for group in read_dump(path)[1]]
    return Counter(str(sample.id).partition("/")[2] for group in groups for sample in group.samples)


def check_as_if_nothing_had_happened(config: RunConfig, whole: RunConfig) -> None:
    steps = [row["step"] for row in rows(config)]
    assert steps == list(range(len(steps)))
    assert curve(config)[:STEPS] == curve(whole)
    assert consumed(config).keys() >= consumed(whole).keys()
    assert len(consumed(config)) == 4 * 4 * steps[-1]
    assert set(consumed(config).values()) == {1}


async def watch(client: CoordinatorClient) -> None:
    await asyncio.Event().wait()


@pytest.fixture(scope="module")
def scraped() -> dict[str, Mapping[tuple[str, ...], float]]:
    """What each process of the whole run serves to Prometheus after its second step."""
    return {}


@pytest.fixture(scope="module")
def whole(assets: Path, scraped: dict[str, Mapping[tuple[str, ...], float]]) -> RunConfig:
    config = make(assets, "whole")

    async def scrape_all(client: CoordinatorClient) -> None:
        await reached(client, "training", 2)
        for target in json.loads((config.folder / "prometheus.json").read_text()):
            assert target["labels"]["run"] == "whole"
            scraped[target["labels"]["service"]] = await asyncio.to_thread(scrape, *target["targets"])
        await watch(client)

    assert launch(config, scrape_all, resume=False)
    return config


def test_every_process_of_a_run_serves_its_metrics(
    whole: RunConfig, scraped: dict[str, Mapping[tuple[str, ...], float]]
) -> None:
    assert scraped.keys() == {"coordinator", "actor-0", "actor-1", "reward-0", "rollout-0"}
    for found in scraped.values():
        assert found["process_resident_memory_bytes",] > 1 << 20
    called = {
        "coordinator": ("Register", "Coordinator"),
        "actor-0": ("OptimStep", "Trainer"),
        "rollout-0": ("Generate", "Rollout"),
        "reward-0": ("Describe", "Reward"),
    }
    for name, (method, service) in called.items():
        assert scraped[name]["grpc_server_handling_seconds_count", "OK", method, f"atoll.v1.{service}"] >= 1
    run = scraped["coordinator"]
    step = run["atoll_step",]
    assert 2 <= step <= STEPS
    assert run["atoll_num_steps",] == STEPS
    assert run["atoll_version",] > 0
    assert run["atoll_metric", "critic/score/mean"] == rows(whole)[int(step)]["critic/score/mean"]
    assert not (whole.folder / "prometheus.json").exists()


@pytest.mark.parametrize(("name", "rank"), [("follower", "actor-1"), ("leader", "actor-0")])
def test_a_killed_rank_takes_its_group_down_and_the_run_goes_on(
    assets: Path, whole: RunConfig, caplog: pytest.LogCaptureFixture, name: str, rank: str
) -> None:
    # a step that saves waits for the save before it: at step 4 that of step 2 is whole
    config, killer = make(assets, name, run=ENDLESS), Killer((rank, "training", 4))
    assert launch(config, killer, resume=False)
    check_as_if_nothing_had_happened(config, whole)
    killer.check_who_stayed("actor-0", "actor-1")
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    first, *log = told.splitlines()
    assert first.startswith(f"restart 1 of 3 of actor-0, actor-1: {rank} died (signal SIGKILL); its log ")
    assert all("another rank" not in line for line in log)
    assert killer.seen[0].error
    assert not killer.seen[1].error
    assert re.search("resuming after step [1-9]", (config.folder / "logs" / "coordinator.log").read_text())


def test_a_warm_up_begins_again_if_a_rank_dies_in_it_and_not_after_it(assets: Path, whole: RunConfig) -> None:
    config = make(assets, "early", run=ENDLESS, checkpoint={"every": 0})
    killer = Killer(("actor-1", "warming up", 2), ("actor-0", "training", 2))
    assert launch(config, killer, resume=False)
    check_as_if_nothing_had_happened(config, whole)
    killer.check_who_stayed("actor-0", "actor-1")
    log = (config.folder / "logs" / "coordinator.log").read_text()
    assert log.count("no checkpoint found") == 1
    assert log.count("resuming after step 0") == 1


def test_a_critic_dies_and_the_actor_that_lives_goes_back_with_it(assets: Path) -> None:
    """What the algorithm carries, too: a coefficient that adapts at every step."""
    recipe: dict[str, dict[str, Any]] = {
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "algorithm": {
            "advantage": {"name": "gae", "lam": 0.95},
            "num_minibatches": 2,
            "kl": {"where": "reward", "estimator": "k1", "target": 0.01, "horizon": 100},
        },
        "trainer": {"optimizer": {"learning_rate": 1e-3}},
    }
    names = (
        *("critic/vf_loss", "critic/values/mean", "critic/grad_norm", "critic/rewards/mean"),
        *("actor/pg_loss", "actor/grad_norm", "actor/kl_coef"),
    )
    whole = make(assets, "whole-ppo", **recipe)
    broken = make(assets, "broken-ppo", run=ENDLESS, **recipe)
    assert launch(whole, watch, resume=False)
    killer = Killer(("critic-0", "training", 4))  # a step that saves waits for the save before it
    assert launch(broken, killer, resume=False)
    killer.check_who_stayed("critic-0")
    curves = [[[row[name] for name in names] for row in rows(config)[1:]] for config in (whole, broken)]
    assert curves[0] == curves[1][:STEPS]
    assert len({tuple(row) for row in curves[0]}) == STEPS
    assert len({coef for *_, coef in curves[0]}) == STEPS
    assert re.search("resuming after step [1-9]", (broken.folder / "logs" / "coordinator.log").read_text())


async def spawn(stack: AsyncExitStack, command: Sequence[str], log: Path) -> Process:
    """A process whose output goes to `log`, and which ends with the stack."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=STDOUT, env=environment, start_new_session=True
        )

    async def end() -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    stack.push_async_callback(end)
    return process


def kill_rank(nodes: Sequence[Process], rank: int) -> None:
    children = [child for node in nodes for child in psutil.Process(node.pid).children()]
    next(child for child in children if child.environ().get("RANK") == str(rank)).kill()


async def test_torchrun_starts_ranks_on_several_hosts_and_starts_them_again(
    assets: Path, tmp_path: Path, store: Store
) -> None:
    """Two nodes of one process each; which of them gets rank 0, torchrun says."""
    config = make(assets, "nodes")
    write_resolved(config, tmp_path / "config.json")
    registry = Registry(store, lease_s=60)
    control = RunControl(trains=True)
    server = await serve_coordinator(control, registry)
    changes = registry.changes()

    async def joined() -> ServiceJoined | ServiceLeft:
        return await asyncio.wait_for(anext(changes), JOIN_TIMEOUT_S)

    async with AsyncExitStack() as stack:
        endpoint = f"127.0.0.1:{stack.enter_context(reserve_port())}"
        command = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "toy"),
            *("--local-addr", "127.0.0.1", "--max-restarts", "1"),
            *("--no-python", str(Path(sys.executable).with_name("atoll")), "serve", "trainer"),
            *("--config", str(tmp_path / "config.json"), "--coordinator", server.address),
        )
        logs = [tmp_path / f"node-{number}.log" for number in range(2)]
        nodes = [await spawn(stack, command, log) for log in logs]
        first = await joined()
        assert isinstance(first, ServiceJoined)
        assert (first.entry.name, first.entry.role) == ("actor-0", "actor")
        kill_rank(nodes, 1)
        assert await joined() == ServiceLeft(first.entry)
        second = await joined()
        assert isinstance(second, ServiceJoined)
        assert second.entry.name == "actor-0"
        assert second.entry.incarnation != first.entry.incarnation
        client = TrainerClient(second.entry.address, Caller(store.epoch, TOKEN))
        stack.push_async_callback(client.close)
        assert (await client.info()).world_size == 2
        kill_rank(nodes, 1)
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            with suppress(ServiceUnavailableError):
                while True:
                    await client.info()
        codes = [await asyncio.wait_for(node.wait(), JOIN_TIMEOUT_S) for node in nodes]
        assert 0 not in codes
    await server.stop(0)
