"""One reward service through real gRPC: verdicts a second, latency under load and overload, hangs."""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from atoll.config.load import TOKEN
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import OverloadedError
from atoll.wire.types import FinishReason, GradingError, GroupId, SampleId, ScoreItem

CALL = 8  # responses in a call: a group
SECONDS = 4.0  # of each open-loop measurement
RESPONSE = "so it is 12 + 34, which is 46.\n" * 30 + "#### 46"  # 1 KB

# `millisecond` costs about that of a core. Over some responses, it sleeps or computes for ever.
GRADER = """
import time

def trivial(item):
    return float(item.response.endswith(item.ground_truth))

def waiting(item):
    time.sleep(0.01)  # as for a judge
    return float(item.response.endswith(item.ground_truth))

def millisecond(item):
    if item.extra.get("does") == "sleep":
        time.sleep(3600)
    while item.extra.get("does") == "spin":
        pass
    sum(i * i for i in range(12_000))
    return float(item.response.endswith(item.ground_truth))
"""


def run() -> dict[str, Any]:
    return asyncio.run(measure_all())


async def measure_all() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(GRADER)
        trivial = {"name": f"{folder}/mine.py:trivial", "concurrency": 2}
        millisecond = {"name": f"{folder}/mine.py:millisecond", "concurrency": 2}
        waiting = {"name": f"{folder}/mine.py:waiting", "concurrency": 8}
        inline = [{"name": "gsm8k"}, {"name": "gsm8k_format"}]
        many = {**millisecond, "concurrency": 32, "deadline_s": 0.5}
        return {
            "inline": await throughput(folder, {"graders": inline}, 40_000),
            "isolated_trivial": await throughput(folder, {"graders": [trivial]}, 10_000),
            "isolated_1ms": await throughput(folder, {"graders": [millisecond]}, 3_000),
            "under_load": await under_load(folder, {"graders": [waiting], "max_queued": 256}),
            "hanging_1_percent": await hanging(folder, {"graders": [many]}, 6_000),
        }


@dataclass(frozen=True, slots=True)
class Service:
    client: RewardClient
    process: psutil.Process

    def cpu_s(self) -> float:
        """Of it and its workers, those that have ended included."""
        seconds = 0.0
        for process in (*reversed(self.process.children(recursive=True)), self.process):
            with suppress(psutil.NoSuchProcess):  # its parent, which comes later, has its seconds
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds


@asynccontextmanager
async def service(folder: str, reward: dict[str, Any]) -> AsyncIterator[Service]:
    """`python -m atoll.reward` as the launcher starts it."""
    config = {"run": {"name": "bench", "steps": 1}, "model": {"path": "."}, "reward": reward}
    config["data"] = {"train": [{"path": "unused.jsonl"}]}
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(config))
    token = secrets.token_urlsafe()
    process, address = await asyncio.to_thread(start, path, token)
    try:
        client = RewardClient(address, Caller(token=token), timeout_s=120.0)
        yield Service(client, psutil.Process(process.pid))
        await client.close()
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait)


def start(config: Path, token: str) -> tuple[subprocess.Popen[bytes], str]:
    """The process and its address, once it serves."""
    ready, write_end = os.pipe()
    command = [sys.executable, "-m", "atoll.reward", "--config", str(config), "--name", "reward-0"]
    process = subprocess.Popen(
        [*command, "--ready-fd", str(write_end)],
        pass_fds=(write_end,),
        env={**os.environ, TOKEN: token, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    with open(ready) as pipe:
        return process, json.loads(pipe.readline())["address"]


def items(first: int, number: int, does: str = "") -> list[ScoreItem]:
    """`does`: every hundredth one, the first of all apart, sleeps or spins."""
    return [
        ScoreItem(
            id=SampleId(GroupId("bench", 0, first), index),
            prompt="12+34=",
            response=RESPONSE,
            ground_truth="46",
            data_source="arithmetic",
            finish_reason=FinishReason.STOP,
            response_length=300,
            extra={"does": does if (first * number + index) % 100 == 99 else ""},
        )
        for index in range(number)
    ]


async def throughput(folder: str, reward: dict[str, Any], total: int, does: str = "") -> dict[str, float]:
    """`total` responses in calls of a group, 64 calls at once: what a step sends."""
    async with service(folder, reward) as served:
        await score(served.client, items(0, 256))  # starts the workers
        calls = iter(range(total // CALL))
        failed = 0

        async def caller() -> None:
            nonlocal failed
            for call in calls:
                verdicts = await served.client.score(items(call, CALL, does))
                failed += sum(isinstance(verdict, GradingError) for verdict in verdicts)

        before, begun = served.cpu_s(), time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(64)))
        seconds, cpu_s = time.perf_counter() - begun, served.cpu_s() - before
        return {
            "verdicts_per_s": total / seconds,
            "service_cpu_us_per_verdict": cpu_s / total * 1e6,
            "failed": failed,
        }


async def score(client: RewardClient, batch: Sequence[ScoreItem]) -> float:
    """Seconds until the last verdict."""
    begun = time.perf_counter()
    assert len(await client.score(batch)) == len(batch)
    return time.perf_counter() - begun


@dataclass(slots=True)
class Arrivals:
    """What became of calls that came at random moments, whether or not earlier ones were answered."""

    latencies: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)

    def summary(self, seconds: float) -> dict[str, float]:
        accepted, refused = len(self.latencies) * CALL, len(self.refusals) * CALL
        latencies = dict(
            zip(("p50_ms", "p99_ms"), np.percentile(self.latencies, (50, 99)) * 1e3, strict=True)
        )
        summary = {"accepted_per_s": accepted / seconds, "refused_per_s": refused / seconds, **latencies}
        if self.refusals:
            summary["refused_p99_ms"] = float(np.percentile(self.refusals, 99)) * 1e3
        return {name: float(value) for name, value in summary.items()}


async def under_load(folder: str, reward: dict[str, Any]) -> dict[str, Any]:
    """Poisson arrivals at half and at three times of what it grades when it has as much as it takes."""
    async with service(folder, reward) as served:
        await score(served.client, items(0, 200))
        most = 200 / min([await score(served.client, items(0, 200)) for _ in range(5)])
        half = await open_loop(served.client, 0.5 * most)
        overload = await open_loop(served.client, 3.0 * most)
        return {"capacity_per_s": most, "max_queued": 256, "load_0.5": half, "load_3": overload}


async def open_loop(client: RewardClient, per_s: float) -> dict[str, float]:
    arrivals = Arrivals()

    async def call(number: int) -> None:
        begun = time.perf_counter()
        try:
            arrivals.latencies.append(await score(client, items(number, CALL)))
        except OverloadedError:
            arrivals.refusals.append(time.perf_counter() - begun)

    gaps = np.random.default_rng(0).exponential(CALL / per_s, int(SECONDS * per_s / CALL))
    begun = time.perf_counter()
    async with asyncio.TaskGroup() as calls:
        for number, moment in zip(count(), begun + np.cumsum(gaps)):
            await asyncio.sleep(max(0.0, moment - time.perf_counter()))
            calls.create_task(call(number))
    return arrivals.summary(time.perf_counter() - begun)


async def hanging(folder: str, reward: dict[str, Any], total: int) -> dict[str, Any]:
    """One response of a hundred hangs, until deadline_s = 0.5 s; beside the same without."""
    clean = await throughput(folder, reward, total)
    result: dict[str, Any] = {"clean": clean}
    for does in ("sleep", "spin"):
        measured = await throughput(folder, reward, total, does)
        result[does] = {**measured, "of_clean": measured["verdicts_per_s"] / clean["verdicts_per_s"]}
    return result
