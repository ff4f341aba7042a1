"""The real coordinator, journal and store under the load of a large run; its other services are stand-ins."""

import asyncio
import json
import math
import secrets
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from atoll.cli.launch.processes import Fleet as Processes
from atoll.cli.launch.processes import ServiceCommand, ServiceGroup
from atoll.cli.tasks.arithmetic import SHAPE, SPECIAL, build_arithmetic
from atoll.cli.tasks.assets import prompt_row, write_model, write_rows
from atoll.config.load import validate, write_resolved
from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.store import EmbeddedServer, run_embedded_server
from atoll.runtime.tokenizer import tokenizer_digest
from benchmarks.coordinator_fleet import Fleet

PROMPT_TOKENS = 128
PROMPTS = 4096
MAX_STEPS_BEFORE = 10  # that a measurement of CPU leaves out
SETTLING = 1.2  # times the samples in flight are trained on before memory is watched: until then they gather
CHECKPOINT_EVERY = 5  # steps
OF_A_STEP = ("take", "prepare", "push", "checkpoint")
AIMED_AT = ("decode", "journal", "grading", "take")  # parts of at most 40 microseconds together


@dataclass(frozen=True, slots=True)
class Load:
    replicas: int
    reward_workers: int
    rate: float  # samples per second
    in_flight: int  # samples between issue and publish
    tokens: int  # of a response
    group_size: int

    @property
    def prompts_per_step(self) -> int:
        """A step in two seconds, if as many are in flight: a push to all replicas takes part of one."""
        return max(min(int(2 * self.rate), self.in_flight // 2) // self.group_size, 1)

    @property
    def steps_in_flight(self) -> int:
        return max(self.in_flight // (self.prompts_per_step * self.group_size), 1)


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds since the start of each process, and what was done by then."""

    time: float
    step: int
    finished: int  # samples, by the stand-ins
    stand_ins: float
    store: float


def run(
    replicas: int,
    reward_workers: int,
    rate: float,
    seconds: float,
    in_flight: int,
    tokens: int,
    group_size: int,
    memory_rate: float,
    memory_seconds: float,
) -> dict[str, Any]:
    """CPU per sample by part, with `in_flight` samples and with a tenth of them; then memory over time."""
    load = Load(replicas, reward_workers, rate, in_flight, tokens, group_size)
    result = {}
    for each in (load, replace(load, in_flight=in_flight // 10)):
        left_out = min(each.steps_in_flight, MAX_STEPS_BEFORE)
        result[f"{each.in_flight:_}_in_flight"] = measure(each, seconds, left_out)
    if memory_seconds:
        slow = replace(load, rate=memory_rate)
        result["memory"] = measure(slow, memory_seconds, math.ceil(SETTLING * slow.steps_in_flight))
    return result


def measure(load: Load, seconds: float, left_out: int) -> dict[str, Any]:
    """`left_out`: steps before the first that is measured."""
    with tempfile.TemporaryDirectory() as folder:
        config = prepared_run(load, Path(folder))
        with run_embedded_server(config.folder / "store") as store:
            return asyncio.run(drive(load, seconds, left_out, config, store))


def prepared_run(load: Load, folder: Path) -> RunConfig:
    """Writes a model's folder and prompts."""
    build_arithmetic(folder, seed=0)
    tokenizer = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    shape = replace(SHAPE, max_positions=PROMPT_TOKENS + load.tokens)
    write_model(folder / "model", shape, tokenizer, SPECIAL, None, seed=0)
    text = "what is the sum of the two? " * PROMPT_TOKENS
    rows = [prompt_row(f"{i}: {text}"[:PROMPT_TOKENS], str(i), "bench", {"index": i}) for i in range(PROMPTS)]
    write_rows(folder / "train.parquet", rows)
    config = resolve(
        validate(
            {
                "run": {"name": "bench", "dir": folder, "steps": 1_000_000},
                "model": {"path": folder / "model"},
                "data": {"train": [{"path": folder / "train.parquet"}]},
                "coordinator": {
                    "prompts_per_step": load.prompts_per_step,
                    "samples_per_prompt": load.group_size,
                    "max_staleness": load.steps_in_flight - 1,
                },
                "rollout": {"replicas": load.replicas, "sampling": {"max_new_tokens": load.tokens}},
                "checkpoint": {"every": CHECKPOINT_EVERY},
                "weights": {"canary_every": 0},
            },
            "bench",
        ),
        (),
    )
    config.folder.mkdir()
    write_resolved(config, config.folder / "config.json")
    return config


async def drive(
    load: Load, seconds: float, left_out: int, config: RunConfig, store: EmbeddedServer
) -> dict[str, Any]:
    """Starts everything, leaves out the first steps, measures, and stops the run after a step."""
    readings, token = config.folder / "readings.jsonl", secrets.token_hex(8)
    path = str(config.folder / "config.json")
    command = (sys.executable, "-m", "benchmarks.coordinator_parts", str(readings))
    service = ServiceCommand(
        "coordinator", (*command, "--config", path, "--store", store.url), {"ATOLL_TOKEN": token}
    )
    coordinator = ServiceGroup((service,))
    async with Processes(config.folder / "logs") as processes:
        address = await processes.start(coordinator)
        client = CoordinatorClient(address, Caller(token=token), timeout_s=60.0)
        fleet = Fleet(
            address,
            token,
            rate=load.rate,
            slots=-(-load.in_flight // load.replicas),
            num_tokens=load.tokens,
            vocab_size=SHAPE.vocab_size,
        )
        digest = tokenizer_digest(config.model.path)
        serving = asyncio.create_task(fleet.run(load.replicas, load.reward_workers, digest))
        watched = [serving, asyncio.create_task(processes.watch(coordinator))]
        try:
            measuring = asyncio.create_task(steps_of(client, fleet, store, left_out, seconds))
            await asyncio.wait([measuring, *watched], return_when=asyncio.FIRST_COMPLETED)
            for task in watched:
                if task.done():
                    task.result()
            first, last = measuring.result()
            await client.stop_run()
            await processes.wait_for_exit("coordinator")
        finally:
            await client.close()
            for task in watched:
                task.cancel()
            await asyncio.wait(watched)
    return report(load, first, last, [json.loads(line) for line in readings.read_text().splitlines()])


async def steps_of(
    client: CoordinatorClient, fleet: Fleet, store: EmbeddedServer, left_out: int, seconds: float
) -> tuple[Reading, Reading]:
    """Readings at the ends of two steps that are at least `seconds` apart; `left_out` steps come before."""
    first: Reading | None = None
    revision, step = 0, 0
    while True:
        status = await client.status(revision)
        revision = status.revision
        if status.step == step:
            continue
        step = status.step
        reading = read(step, fleet, store)
        if first is None and step >= left_out:
            first = reading
        elif first is not None and reading.time >= first.time + seconds:
            return first, reading


def read(step: int, fleet: Fleet, store: EmbeddedServer) -> Reading:
    times = psutil.Process(store.process.pid).cpu_times()
    return Reading(time.time(), step, fleet.num_finished, time.process_time(), times.user + times.system)


def report(load: Load, first: Reading, last: Reading, readings: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Microseconds of CPU per sample between two readings: of those that were trained on in the parts of a
    step, of those that finished in all others. At a steady pace these are equally many."""
    samples = (last.step - first.step) * load.prompts_per_step * load.group_size
    times = np.array([reading["time"] for reading in readings])

    finished = last.finished - first.finished

    def per_sample(name: str, values: list[float]) -> float:
        before, after = np.interp([first.time, last.time], times, values)
        of_a_step = name.partition(":")[0] in OF_A_STEP
        return float(after - before) / (samples if of_a_step else finished) * 1e6

    def by_name(key: str) -> dict[str, float]:
        names = readings[-1][key]
        table = {name: per_sample(name, [at[key].get(name, 0.0) for at in readings]) for name in names}
        return dict(sorted(table.items(), key=lambda item: -item[1]))

    parts = by_name("parts")
    parts["other threads"] = per_sample("", [reading["other_threads"] for reading in readings])
    rss = [reading["rss"] for reading in readings if first.time <= reading["time"] <= last.time]
    wall_s = last.time - first.time
    return {
        "in_flight": load.in_flight,
        "seconds": wall_s,
        "samples": samples,
        "samples_per_s": samples / wall_s,
        "samples_finished": finished,
        "decode_journal_grading_take_us": sum(parts.get(part, 0.0) for part in AIMED_AT),
        "coordinator_us": sum(parts.values()),
        "coordinator_us_by_part": parts,
        "stand_ins_us": (last.stand_ins - first.stand_ins) / finished * 1e6,
        "store_us": (last.store - first.store) / finished * 1e6,
        "coordinator_mb_first": rss[0] / 2**20,
        "coordinator_mb_last": rss[-1] / 2**20,
        "coordinator_mb_most": max(rss) / 2**20,
        "hottest_us": dict(list(by_name("functions").items())[:20]),
    }
