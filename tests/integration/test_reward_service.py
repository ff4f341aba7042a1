"""A reward service over real gRPC, with graders that hang, crash and misbehave."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from services.config.schema import GraderConfig
from services.reward.service import RewardService
from services.runtime.clients import Caller, RewardClient
from services.runtime.errors import UserError
from services.runtime.server import Server
from services.wire.types import FinishReason, Graded, GradingError, GroupId, SampleId, ScoreItem

GRADER = """
import os, re

def grade(item):
    if item.response == "hang":
        if "fifo" in item.extra:
            open(item.extra["fifo"], "w").close()  # tells the test that grading has begun
        re.match(r"(a+)+$", "a" * 64 + "b")  # holds the interpreter lock for ages
    if item.response == "crash":
        os.abort()
    if item.response == "raise":
        raise LookupError("no such column")
    if item.response == "nan":
        return float("nan")
    return float(item.extra["length"]) / 10
"""


def item(index: int, response: str) -> ScoreItem:
    return ScoreItem(
        id=SampleId(GroupId("toy", 0, 7), index),
        prompt="12+34=",
        response=response,
        ground_truth="46",
        data_source="arithmetic",
        finish_reason=FinishReason.LENGTH,
        response_length=3,
        extra={"length": str(index)},
    )


@asynccontextmanager
async def serving(
    graders: Sequence[GraderConfig], timeout_s: float = 20.0
) -> AsyncIterator[tuple[RewardClient, RewardService]]:
    service = RewardService(graders, timeout_s)
    server = await Server.start(
        "atoll.v1.Reward", service.add_to, host="127.0.0.1", port=0, token=None, setting="--port"
    )
    client = RewardClient(server.address, Caller(), timeout_s=60.0)
    try:
        yield client, service
    finally:
        await client.close()
        await server.stop(0)
        await service.close()


@pytest.fixture
def grader(tmp_path: Path) -> GraderConfig:
    (tmp_path / "mine.py").write_text(GRADER)
    return GraderConfig(name=f"{tmp_path / 'mine.py'}:grade", weight=2.0)


def graders_of_this_test() -> list[psutil.Process]:
    """Spawned processes only; multiprocessing's resource tracker stays for the life of the parent."""
    return [p for p in psutil.Process().children() if "spawn_main" in " ".join(p.cmdline())]


async def test_scores_with_every_grader(grader: GraderConfig) -> None:
    async with serving([GraderConfig(name="exact_match"), grader]) as (client, _):
        assert await client.describe() == ("exact_match", grader.name)
        verdicts = await client.score([item(1, "46"), item(2, "45")])
        assert verdicts == [
            Graded(item(1, "").id, 1.2, {"exact_match": 1.0, grader.name: 0.1}),
            Graded(item(2, "").id, 0.4, {"exact_match": 0.0, grader.name: 0.2}),
        ]
        assert await client.score([]) == []
    assert graders_of_this_test() == []


async def test_errors_stay_with_their_items(grader: GraderConfig) -> None:
    async with serving([grader]) as (client, _):
        raised, graded, nan = await client.score([item(0, "raise"), item(1, "46"), item(2, "nan")])
    assert raised == GradingError(item(0, "").id, grader.name, "LookupError: no such column", False)
    assert graded == Graded(item(1, "").id, 0.2, {grader.name: 0.1})
    assert nan == GradingError(
        item(2, "").id, grader.name, "ValueError: got nan, expected a finite number", False
    )


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("hang", "no verdict within 1 s (reward.timeout_s)"),
        ("crash", "the grading process died (signal SIGABRT); see the reward service's log"),
    ],
)
async def test_a_grader_that_hangs_or_crashes_costs_one_verdict(
    grader: GraderConfig, response: str, cause: str
) -> None:
    async with serving([grader], timeout_s=1.0) as (client, _):
        batch = [item(1, "46"), item(2, response), item(3, "46")]
        answers = asyncio.create_task(client.score(batch))
        # the service answers other calls meanwhile
        await asyncio.wait_for(client.describe(), 5)
        verdicts = await answers
        assert verdicts == [
            Graded(item(1, "").id, 0.2, {grader.name: 0.1}),
            GradingError(item(2, "").id, grader.name, cause, retryable=True),
            Graded(item(3, "").id, 0.6, {grader.name: 0.3}),
        ]
        assert len(graders_of_this_test()) == 1
        assert await client.score([item(5, "46")]) == [Graded(item(5, "").id, 1.0, {grader.name: 0.5})]


async def test_a_grading_process_that_is_killed_is_replaced(grader: GraderConfig) -> None:
    async with serving([grader]) as (client, _):
        (process,) = graders_of_this_test()
        os.kill(process.pid, signal.SIGKILL)
        assert await client.score([item(1, "46")]) == [
            GradingError(
                item(1, "").id,
                grader.name,
                "the grading process died (signal SIGKILL); see the reward service's log",
                retryable=True,
            )
        ]
        assert await client.score([item(1, "46")]) == [Graded(item(1, "").id, 0.2, {grader.name: 0.1})]


async def test_graders_that_can_be_loaded_no_more_are_the_services_end(
    grader: GraderConfig, tmp_path: Path
) -> None:
    async with serving([grader]) as (client, service):
        (tmp_path / "mine.py").unlink()
        with pytest.raises(UserError, match="no such file"):
            await client.score([item(1, "crash")])
        with pytest.raises(UserError, match="no such file"):
            await asyncio.wait_for(service.failed(), 5)


async def test_a_grader_that_hangs_does_not_hold_up_the_end(grader: GraderConfig, tmp_path: Path) -> None:
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    async with serving([grader], timeout_s=60.0) as (client, _):
        hangs = dataclasses.replace(item(1, "hang"), extra={"fifo": str(fifo)})
        hanging = asyncio.create_task(client.score([hangs]))
        await asyncio.wait_for(asyncio.to_thread(fifo.read_bytes), 30)
        hanging.cancel()
        begun = time.monotonic()
    assert time.monotonic() - begun < 30
    assert graders_of_this_test() == []


async def test_graders_that_cannot_be_loaded_stop_the_start(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("import absent_module\ndef f(item): return 1.0\n")
    with pytest.raises(UserError, match=r"fails\.py cannot be imported: ModuleNotFoundError"):
        RewardService([GraderConfig(name=f"{tmp_path / 'fails.py'}:f")], timeout_s=1.0)
    (tmp_path / "dies.py").write_text("import os\nos._exit(3)\ndef f(item): return 1.0\n")
    with pytest.raises(UserError, match=r"the process died while loading them \(exit code 3\)"):
        RewardService([GraderConfig(name=f"{tmp_path / 'dies.py'}:f")], timeout_s=1.0)
    assert graders_of_this_test() == []


def start(tmp_path: Path, grader: str) -> tuple[subprocess.Popen[bytes], str]:
    """`python -m services.reward` as the launcher starts it; its address, or "" where it ended."""
    config = {
        "run": {"name": "toy", "steps": 1},
        "model": {"path": "unused"},
        "data": {"train": [{"path": "unused.jsonl"}]},
        "reward": {"graders": [{"name": grader}]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ready, write_end = os.pipe()
    arguments = [
        "--config",
        str(tmp_path / "config.json"),
        "--name",
        "reward-0",
        "--ready-fd",
        str(write_end),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "services.reward", *arguments, "--coordinator", "127.0.0.1:1"],
        pass_fds=(write_end,),
        stderr=subprocess.PIPE,
    )
    os.close(write_end)
    with open(ready) as pipe:
        line = pipe.readline()  # ends when the process does
    return process, json.loads(line)["address"] if line else ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_the_process_takes_its_grading_process_with_it(tmp_path: Path, number: signal.Signals) -> None:
    process, address = start(tmp_path, "exact_match")
    children = psutil.Process(process.pid).children(recursive=True)
    try:
        client = RewardClient(address, Caller(), timeout_s=20.0)
        assert await client.score([item(1, "46")]) == [Graded(item(1, "").id, 1.0, {"exact_match": 1.0})]
        await client.close()
        assert children
    finally:
        process.send_signal(number)
        _, log = process.communicate(timeout=20)
    assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL), log.decode()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_the_process_says_which_grader_it_lacks(tmp_path: Path) -> None:
    process, address = start(tmp_path, "exact")
    _, log = process.communicate(timeout=20)
    assert (address, process.returncode) == ("", 1)
    assert (
        log.decode()
        .strip()
        .endswith(
            "reward.graders = 'exact': no such function; did you mean exact_match? "
            "Known: exact_match, gsm8k, gsm8k_format, overlong, length_cost, or file.py:function of your own"
        )
    )
