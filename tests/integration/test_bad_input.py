"""Bad input to whole runs: each ends with what is wrong and what to do, and loses nothing.

What the command refuses before a service starts is in test_cli.py.
"""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from atoll.cli.launch.launcher import launch
from atoll.config.load import load
from atoll.config.resolve import resolve
from atoll.rollout.engines.local import LocalEngine
from atoll.rollout.service import AS_IN_FOLDER, RolloutService
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.server import Server
from atoll.weights.transport import shm
from atoll.wire.types import Sampling, Trajectory, TurnRequest
from tests.builders import NO_GPUS, group_id, turn_request
from tests.tokens import CALLER, TOKEN

CONFIG = """
[run]
name = "toy"
steps = 4
mode = "rollout_only"
dir = "{folder}/runs"

[model]
path = "{assets}/model"

[data]
train = [{{ path = "{assets}/train.parquet" }}]

[coordinator]
prompts_per_step = 4
samples_per_prompt = 4

[rollout]
sampling = {{ max_new_tokens = 4 }}
local = {{ slots = 16, max_length = 24 }}
"""

SAMPLING = Sampling(4, temperature=0.0)
FILE_LIMIT = 100_000  # bytes: less than the model's


@pytest.fixture
def config(tmp_path: Path, assets: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(CONFIG.format(folder=tmp_path, assets=assets))
    return path


def refused(config: Path, *words: str | Path) -> str:
    """Runs `atoll run`, which fails; what it says, without a traceback and with the log's place."""
    command = [Path(sys.executable).with_name("atoll"), "run", config, *words]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 1
    assert "runs/toy/logs/coordinator.log" in answer.stderr
    return answer.stderr


def test_a_reward_that_never_counts(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "graders.py"
    path.write_text("def broken(item):\n    return 1 / 0\n")
    message = refused(config, "--set", f'reward.graders=[{{name="{path}:broken"}}]')
    assert (
        f"the last: reward {path}:broken: ZeroDivisionError: division by zero (graders.py:2); fix" in message
    )
    assert "coordinator.max_dropped_share = 0.5" in message
    assert "Traceback" not in message
    summary = json.loads((tmp_path / "runs/toy/summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("failed", 0)
    assert "ZeroDivisionError: division by zero" in summary["reason"]


async def step_reached(client: CoordinatorClient, step: int) -> None:
    status = await client.status()
    while status.state != "training" or status.step < step:
        status = await client.status(status.revision)


async def test_a_token_id_outside_the_vocabulary_costs_the_replica_nothing(assets: Path) -> None:
    def ask(*prompt: int) -> TurnRequest:
        return turn_request(prompt, group=group_id(prompt[-1]), sampling=SAMPLING)

    async def generate(*requests: TurnRequest) -> list[Trajectory]:
        stream = client.generate("actor", requests)
        return [sample async for arrival in stream for sample in arrival.samples]

    engine = LocalEngine(
        assets / "model",
        dtype=torch.float32,
        slots=4,
        max_length=24,
        version=AS_IN_FOLDER,
        receiver=shm.ShmReceiver(),
    )
    service = RolloutService(engine, "rollout-0", "a1")
    server = await Server.start(
        "atoll.v1.Rollout", service.add_to, host="127.0.0.1", port=0, token=TOKEN, setting="--port"
    )
    client = RolloutClient(server.address, CALLER, timeout_s=30)
    for bad in (64, -1):
        with pytest.raises(UserError, match=rf"token id {bad}, expected 0 to 63: the tokenizer does not"):
            await generate(ask(3, 5), ask(3, bad))
    assert [sample.num_produced for sample in await generate(ask(3, 5))] == [4]
    await client.close()
    await server.stop(0)
    await service.close()


@pytest.mark.long
def test_a_full_disk_at_checkpoint_time_costs_that_checkpoint_alone(config: Path) -> None:
    settings = ["run.mode=train", "run.steps=12", "checkpoint.every=2", "checkpoint.keep=7"]
    run = resolve(load(config, settings), NO_GPUS)

    async def fill_disk(client: CoordinatorClient) -> None:
        await step_reached(client, 2)
        trainer = next(p for p in psutil.Process().children() if "actor-0" in p.cmdline())
        trainer.rlimit(psutil.RLIMIT_FSIZE, (FILE_LIMIT, FILE_LIMIT))
        await asyncio.Event().wait()

    async def watch(client: CoordinatorClient) -> None:
        await asyncio.Event().wait()

    # of step 2, or, where that was written before the disk was full, of a later one
    cause = r"checkpoint of step (\d+) in .* bytes are free .* last valid one is step (\d+); .*--resume"
    with pytest.raises(AtollError, match=cause) as raised:
        launch(run, fill_disk, resume=False)
    failed, last = map(int, re.search(cause, str(raised.value)).groups())  # type: ignore[union-attr]
    assert last == failed - 2
    valid = [f"step-{step:06d}" for step in range(0, last + 1, 2)]
    assert sorted(path.name for path in (run.folder / "checkpoints").iterdir()) == valid
    assert launch(run, watch, resume=True)
    assert json.loads((run.folder / "summary.json").read_text())["steps"] == 12
