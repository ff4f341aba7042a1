"""A real run and servers of four kinds in processes of their own: they join it, one dies, one goes mad."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.launch.launcher import launch
from atoll.config.schema import RunConfig
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.dump import read_dump
from atoll.runtime.errors import AtollError, UserError
from atoll.wire.info import RunStatus
from atoll.wire.types import ExternalServer, Trajectory
from tests.builders import arithmetic_run, run_config

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-servers/bin/python"
TOKEN = "sesame-4711"
DEADLINE_S = 180.0  # for any of the events, on a machine that does other things, too
WEIGHTS = {
    "exact_match": 1.0,
    "server:first": 0.25,
    "server:near": 0.5,
    "server:length": 0.125,
    "server:parity": 2.0,
}


@asynccontextmanager
async def serving(script: str, folder: Path, *arguments: str) -> AsyncIterator[tuple[Process, int]]:
    """The process and its port; its further lines go to `folder`/SCRIPT-PORT.log."""
    process = await asyncio.create_subprocess_exec(
        *(PYTHON, ROOT / "tests/servers" / f"{script}.py", *arguments),
        stdout=PIPE,
        stderr=STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    port = int(await asyncio.wait_for(process.stdout.readline(), 60))
    log = asyncio.create_task(keep(process.stdout, folder / f"{script}-{port}.log"))
    try:
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await log


async def keep(lines: asyncio.StreamReader, path: Path) -> None:
    with path.open("wb", buffering=0) as log:
        async for line in lines:
            log.write(line)


async def atoll(*words: str | Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atoll.cli.main", *words), stdout=PIPE, stderr=STDOUT, cwd=ROOT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def until(client: CoordinatorClient, holds: Any) -> RunStatus:
    async with asyncio.timeout(DEADLINE_S):
        status = await client.status()
        while not holds(status):
            status = await client.status(status.revision)
        return status


def unhealthy(status: RunStatus) -> set[str]:
    return {health.server.name for health in status.servers if not health.healthy}


def expected(sample: Trajectory, truth: str) -> dict[str, float]:
    """What the five graders say, worked out anew; see tests/servers."""
    text = sample.text
    is_number = text.isdecimal()
    return {
        "exact_match": float(text.strip() == truth),
        "server:first": float(text[:1] == truth[:1]),
        "server:near": 1 / (1 + abs(int(text) - int(truth))) if is_number else 0.0,
        "server:length": len(text) / 10,
        "server:length/digits": float(sum(letter in "0123456789" for letter in text)),
        "server:parity": float(is_number and int(text) % 2 == int(truth) % 2),
        "server:parity/parity": float(is_number and int(text) % 2 == int(truth) % 2),
    }


class Story:
    """What happens to the run, as a function of its status."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self.at: dict[str, int] = {}  # steps at which things happened
        self.calls_of_second = 0  # when the first died

    async def run(self, client: CoordinatorClient) -> None:
        async with AsyncExitStack() as stack:

            async def start(script: str, *arguments: str) -> tuple[Process, int]:
                return await stack.enter_async_context(serving(script, self.folder, *arguments))

            waiting = await until(client, lambda status: "waiting for external servers" in status.error)
            assert waiting.state == "starting"
            _, first = await start("openenv_sum")
            dying, near = await start("mcp_distance")
            _, second = await start("mcp_distance")
            _, length = await start("http_length")
            _, parity = await start("grpc_parity", TOKEN)
            tool = ("--option", "tool=distance")
            await asyncio.gather(
                self.register("first", f"http://127.0.0.1:{first}", "openenv"),
                self.register("near", f"http://127.0.0.1:{near}/mcp", "mcp", *tool),
                self.register("near", f"http://127.0.0.1:{second}/mcp", "mcp", *tool),
                self.register_http(length),
            )
            await self.refusals(client, parity)
            await client.add_server(
                ExternalServer(
                    "reward", "parity", f"grpc://127.0.0.1:{parity}", "grpc", auth="env:PARITY_TOKEN"
                )
            )
            await self.until_step(client, "killed", 2)
            dying.send_signal(signal.SIGKILL)
            log = self.folder / f"mcp_distance-{second}.log"
            self.calls_of_second = log.read_text().count("graded")
            await until(client, lambda status: unhealthy(status) == {"near"})
            _, text = await atoll("status", self.config.folder)
            assert f"http://127.0.0.1:{near}/mcp  unhealthy: " in text
            assert f"http://127.0.0.1:{second}/mcp  healthy" in text
            await self.until_step(client, "broken", self.at["killed"] + 2)
            assert log.read_text().count("graded") >= self.calls_of_second + 16
            self.post(f"http://127.0.0.1:{length}/break")
            await until(client, lambda status: unhealthy(status) == {"near", "length"})
            _, other = await start("http_length")
            await self.register_http(other)
            await self.until_step(client, "mended", self.at["broken"] + 3)
            await client.stop_run()
            await asyncio.Event().wait()

    async def until_step(self, client: CoordinatorClient, what: str, step: int) -> None:
        status = await until(client, lambda status: status.state == "training" and status.step >= step)
        self.at[what] = status.step

    async def register(self, name: str, url: str, protocol: str, *more: str) -> None:
        code, text = await atoll(
            *("register", "reward", name, url, "--protocol", protocol, *more),
            *("--concurrency", "4", "--timeout", "20", "--run", str(self.config.folder)),
        )
        assert code == 0, text
        assert text == f"reward server {name} at {url} joins\n"

    async def register_http(self, port: int) -> None:
        url = f"http://127.0.0.1:{port}/get_reward"
        await self.register("length", url, "http", "--option", "preset=openrlhf")

    async def refusals(self, client: CoordinatorClient, parity: int) -> None:
        """Each says why; nothing of it is listed."""
        server = ExternalServer("reward", "parity", f"grpc://127.0.0.1:{parity}", "grpc")
        for wrong, reason in (
            (server, "token"),
            (replace(server, auth="env:HOME"), "coordinator.server_secrets"),
            (replace(server, url="http://169.254.169.254/latest", protocol="http"), "metadata addresses"),
            (replace(server, url="http://10.0.0.1/", protocol="http"), "coordinator.server_networks"),
            (replace(server, auth=TOKEN), "environment variable"),
            (
                replace(server, name="near", url=f"http://127.0.0.1:{parity}", protocol="mcp"),
                "tool: Field required",
            ),
        ):
            with pytest.raises(UserError, match=reason) as refusal:
                await client.add_server(wrong)
            assert TOKEN not in str(refusal.value)
        run = ("--protocol", "grpc", "--run", self.config.folder)
        elsewhere, away = await asyncio.gather(
            atoll("register", "reward", "elsewhere", server.url, *run),
            atoll("register", "reward", "parity", "grpc://127.0.0.1:1", *run),
        )
        assert (elsewhere[0], away[0]) == (2, 2)
        assert "server:first, server:near, server:length, server:parity" in elsewhere[1]
        assert "reward server parity at grpc://127.0.0.1:1: connection refused" in away[1]
        assert {health.server.name for health in (await client.status()).servers} == {
            "first",
            "near",
            "length",
        }

    @staticmethod
    def post(url: str) -> None:
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10).close()


def make(assets: Path, folder: Path, **sections: Any) -> RunConfig:
    return run_config(arithmetic_run(assets, folder), {"run": {"name": "external", "steps": 500}}, sections)


@pytest.fixture(scope="module")
def told(assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterable[Story]:
    folder = tmp_path_factory.mktemp("external")
    config = make(
        assets,
        folder,
        coordinator={"server_secrets": ["PARITY_*"]},
        reward={"graders": [{"name": name, "weight": weight} for name, weight in WEIGHTS.items()]},
        warmup={"steps": 20, "rows_per_step": 32, "source": {"path": assets / "warmup.parquet"}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARITY_TOKEN", TOKEN)
        story = Story(config, folder)
        assert launch(config, story.run, resume=False)
        yield story


def rows(story: Story) -> list[dict[str, Any]]:
    text = (story.config.folder / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if "critic/score/mean" in row]


def test_the_run_went_on(told: Story) -> None:
    assert told.at["killed"] < told.at["broken"] < told.at["mended"]
    steps = [row["step"] for row in rows(told)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= told.at["mended"]
    assert sum(row["reward/dropped"] for row in rows(told)) == 0
    assert sum(row["reward/retried"] for row in rows(told)) > 0  # those that got nonsense


def test_all_components_are_right_in_dumps_and_metrics(told: Story) -> None:
    for row, path in zip(rows(told), sorted((told.config.folder / "dumps").glob("step-*.pb")), strict=True):
        step, groups = read_dump(path)
        assert step == row["step"]
        totals: dict[str, float] = {}
        for group in groups:
            for sample in group.samples:
                (reward,) = sample.rewards
                wanted = expected(sample, group.prompt.ground_truth)
                assert reward.components == pytest.approx(wanted)
                assert reward.value == pytest.approx(sum(WEIGHTS[name] * wanted[name] for name in WEIGHTS))
                for name, value in wanted.items():
                    totals[name] = totals.get(name, 0.0) + value / 16
        for name, mean in totals.items():
            assert row[f"reward/{name}/mean"] == pytest.approx(mean)
        name = "reward/server:parity/parity"
        shares = {kind: row.get(f"{name}/{kind}", 0.0) for kind in ("right", "wrong", "no number")}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert shares["right"] == pytest.approx(totals["server:parity"])


def test_the_log_says_what_happened_once_and_holds_no_secret(told: Story) -> None:
    log = (told.config.folder / "logs/coordinator.log").read_text()
    lines = [line for line in log.splitlines() if "is unhealthy and gets no calls" in line]
    assert len(lines) == 2
    assert "reward server near at" in lines[0]
    assert "reward server length at" in lines[1]
    assert "'lots'" in lines[1]
    assert (
        "the run is waiting for external servers: "
        "reward first, reward near, reward length, reward parity; register each: atoll register reward first "
    ) in log
    for path in told.config.folder.rglob("*"):
        if path.is_file():
            assert TOKEN.encode() not in path.read_bytes(), path


def test_servers_of_the_config_do_without_a_reward_service_and_have_to_answer(
    assets: Path, tmp_path: Path
) -> None:
    async def look(client: CoordinatorClient) -> None:
        status = await until(client, lambda status: status.state == "training")
        assert {entry.role for entry in status.services} == {"rollout"}
        assert [health.healthy for health in status.servers] == [True]
        await wait(client)

    async def wait(client: CoordinatorClient) -> None:
        await asyncio.Event().wait()

    with subprocess.Popen([PYTHON, ROOT / "tests/servers/http_length.py"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}/get_reward"
            server = {"kind": "reward", "name": "length", "url": url, "protocol": "http"}
            settings: dict[str, Any] = {
                "run": {"name": "of-config", "steps": 2, "mode": "rollout_only"},
                "reward": {"graders": ["server:length"]},
                "servers": [server | {"options": {"preset": "openrlhf"}}],
            }
            config = make(assets, tmp_path, **settings)
            assert launch(config, look, resume=False)
        finally:
            process.kill()
    dumps = [read_dump(path)[1] for path in sorted((config.folder / "dumps").glob("step-*.pb"))]
    samples = [sample for groups in dumps for group in groups for sample in group.samples]
    assert len(samples) == 2 * 16
    assert [sample.score for sample in samples] == pytest.approx(
        [len(sample.text) / 10 for sample in samples]
    )

    settings["run"] |= {"name": "refused"}
    with pytest.raises(
        AtollError, match=rf"\[\[servers\]\]: reward server length at {url}: the connection failed"
    ):
        launch(make(assets, tmp_path, **settings), wait, resume=False)
