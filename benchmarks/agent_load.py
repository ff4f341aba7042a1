"""Agent sessions at scale: real coordinator, gateways, agents and store; engine and trainer are stand-ins in
this process. `python -m benchmarks.agent_load --json`
"""

import argparse
import asyncio
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from atoll.cli.audit import audit
from atoll.cli.launch.launcher import agent_groups, coordinator_group, gateway_groups, gateway_listeners
from atoll.cli.launch.processes import Fleet as Processes
from atoll.config.load import validate, write_resolved
from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.runtime.dump import DUMPS, dumps, read_dump
from atoll.runtime.store import EmbeddedServer, run_embedded_server
from atoll.runtime.tokenizer import tokenizer_digest
from benchmarks.agent_load_engine import Engine
from benchmarks.coordinator_fleet import StandIns, trainer_handlers
from tests.gateway.model_folders import make_folder

PROMPT: Final = "You are in a maze of twisty little passages, all alike. " * 16
REPLICAS: Final = 8
GROUP_SIZE: Final = 8
READING_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    sessions: int  # at once
    rounds: int  # of sessions in all: the first and the last are not measured
    turns: int  # of a session
    turn_s: float
    tokens: int  # of a turn
    gateways: int = 1
    agent_processes: int = 2

    @property
    def prompts_per_step(self) -> int:
        """A quarter of the sessions: while groups gather for a step, the others are played."""
        return max(self.sessions // (4 * GROUP_SIZE), 1)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * GROUP_SIZE

    @property
    def steps(self) -> int:
        return self.rounds * self.sessions // self.samples_per_step


@dataclass(frozen=True, slots=True)
class Reading:
    time: float
    drawn: int  # turns
    cpu_s: Mapping[str, float]  # by process
    rss: Mapping[str, int]


def run(sessions: int, turns: int, turn_s: Sequence[float], tokens: int, rounds: int) -> dict[str, Any]:
    """With an engine that takes `turn_s` for a turn, each in turn."""
    loads = [Load(sessions, rounds, turns, seconds, tokens) for seconds in turn_s]
    return {f"{load.turn_s:g} s a turn": measure(load) for load in loads}


def measure(load: Load) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, environment_port() as port:
        config = prepared_run(load, Path(folder), port)
        engine = Engine(config.model.path, load.turn_s, load.tokens)
        plain = asyncio.run(drive_plainly(load, engine))
        with run_embedded_server(config.folder / "store") as store:
            readings = asyncio.run(drive(load, config, store))
        return report(load, readings) | account(load, config) | {"plain_turns_per_s": plain}


@contextmanager
def environment_port() -> Iterator[int]:
    """Of the environment's server, a process of its own."""
    command = (sys.executable, "-m", "benchmarks.agent_load_environment")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def prepared_run(load: Load, folder: Path, port: int) -> RunConfig:
    """Writes a model's folder without weights, and rows. `port`: of the environment."""
    make_folder(folder / "model", "qwen2.5")
    row = {
        "data_source": "maze",
        "prompt": [{"role": "user", "content": PROMPT}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "environment": {"turns": load.turns},
    }
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * load.steps * load.prompts_per_step)
    tree = {
        "run": {"name": "load", "dir": folder, "steps": load.steps},
        "model": {"path": folder / "model"},
        "data": {"train": [{"path": folder / "rows.jsonl", "agent": "player"}]},
        "coordinator": {
            "prompts_per_step": load.prompts_per_step,
            "samples_per_prompt": GROUP_SIZE,
            "max_staleness": 7,  # twice as many samples as sessions at once
            "dump": "all",
        },
        "rollout": {
            "replicas": REPLICAS,
            "sampling": {"max_new_tokens": 4 * load.tokens},
            "local": {"max_length": 1 << 14},
        },
        "agents": [
            {
                "name": "player",
                "environment": {"server": "maze"},
                "processes": load.agent_processes,
                "concurrency": load.sessions // load.agent_processes,
            }
        ],
        "servers": [
            {
                "kind": "env",
                "name": "maze",
                "url": f"http://127.0.0.1:{port}",
                "protocol": "openenv",
                "concurrency": load.sessions,
            }
        ],
        "gateway": {"instances": load.gateways},
        "checkpoint": {"every": 4},
        "weights": {"canary_every": 0},
    }
    config = resolve(validate(tree, "load"), ())
    config.folder.mkdir()
    write_resolved(config, config.folder / "config.json")
    return config


async def drive(load: Load, config: RunConfig, store: EmbeddedServer) -> list[Reading]:
    """Readings up to the last step: every session that was begun has to be in a batch by then."""
    token = secrets.token_hex(8)
    environment = {"ATOLL_TOKEN": token, "PYTHONPATH": str(Path(__file__).parents[1])}
    engine = Engine(config.model.path, load.turn_s, load.tokens)
    readings: list[Reading] = []
    with gateway_listeners(config) as listeners:
        async with Processes(config.folder / "logs", environment) as processes:
            address = await processes.start(coordinator_group(config, store.url, resume=False))
            stand_ins = StandIns(address, token)
            serving = asyncio.create_task(serve(stand_ins, engine, load, config))
            try:
                registered = ("--coordinator", address)
                for group in (
                    *gateway_groups(config, store.url, listeners, *registered),
                    *agent_groups(config, *registered),
                ):
                    await processes.start(group)
                ended = asyncio.create_task(processes.wait_for_exit("coordinator"))
                while not ended.done():
                    readings.append(read(engine))
                    await asyncio.wait([ended, serving], timeout=READING_S, return_when="FIRST_COMPLETED")
                    if serving.done():
                        serving.result()
            finally:
                serving.cancel()
                await asyncio.wait([serving])
    return readings


async def serve(stand_ins: StandIns, engine: Engine, load: Load, config: RunConfig) -> None:
    """Until it is cancelled."""
    digest = tokenizer_digest(config.model.path)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stand_ins.serve("Trainer", "actor", "actor-0", trainer_handlers(digest)))
            for name in (f"rollout-{number}" for number in range(REPLICAS)):
                handlers = engine.handlers(name, load.sessions)
                tasks.create_task(stand_ins.serve("Rollout", "rollout", name, handlers))
    finally:
        await stand_ins.close()


async def drive_plainly(load: Load, engine: Engine) -> float:
    """Turns per second of the plain loop. Sessions ask in waves, so that whole waves are measured."""
    stand_ins = StandIns("127.0.0.1:1", "")  # nobody registers there
    address = await stand_ins.listen("Rollout", engine.handlers("rollout-0", load.sessions))
    numbers = map(str, (load.sessions, load.turns + 1))  # the last turn is not measured
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.agent_load_plain", address, *numbers
    )
    ended = asyncio.create_task(process.wait())
    times = []
    try:
        for rounds in (1, load.turns):
            drawn = asyncio.create_task(engine.wait_for(rounds * load.sessions))
            await asyncio.wait([drawn, ended], return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise RuntimeError("the plain loop has failed: see above")
            times.append((time.perf_counter(), engine.num_drawn))
        await ended  # by itself: with calls left open, gRPC may never end its thread
    finally:
        if not ended.done():
            process.kill()
            await ended
        await stand_ins.close()
    (begun, first), (end, last) = times
    return (last - first) / (end - begun)


def read(engine: Engine) -> Reading:
    """Names processes by their module; the engine is this process."""
    cpu_s: dict[str, float] = {}
    rss: dict[str, int] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            modules = (
                word for word in process.cmdline() if word.startswith(("atoll.", "benchmarks.agent_load_"))
            )
            name = next(modules, "engine" if process.pid == psutil.Process().pid else "store")
            times = process.cpu_times()
            cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system
            rss[name] = rss.get(name, 0) + process.memory_info().rss
    return Reading(time.perf_counter(), engine.num_drawn, cpu_s, rss)


def report(load: Load, readings: Sequence[Reading]) -> dict[str, Any]:
    """Between the end of the first round of sessions and the beginning of the last."""
    a_round = load.sessions * load.turns
    begin, end = (
        next(n for n, reading in enumerate(readings) if reading.drawn >= rounds * a_round)
        for rounds in (1, load.rounds - 1)
    )
    measured = readings[begin : end + 1]
    first, last = measured[0], measured[-1]
    turns, seconds = last.drawn - first.drawn, last.time - first.time
    cpu_ms = {name: 1000 * (last.cpu_s[name] - first.cpu_s[name]) / turns for name in first.cpu_s}
    rss_mib = {name: [reading.rss[name] / 2**20 for reading in measured] for name in first.rss}
    return {
        "load": asdict(load),
        "seconds": seconds,
        "turns": turns,
        "turns_per_s": turns / seconds,
        "cpu_ms_per_turn": cpu_ms,
        "cpu_ms_per_turn_of_all": sum(cpu_ms.values()),
        "rss_mib_first_last_most": {
            name: [round(mib) for mib in (rss[0], rss[-1], max(rss))] for name, rss in rss_mib.items()
        },
    }


def account(load: Load, config: RunConfig) -> dict[str, Any]:
    """What has become of everything that was begun."""
    samples = [
        sample
        for path in dumps(config.folder / DUMPS)
        for group in read_dump(path)[1]
        for sample in group.samples
    ]
    rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    expected = load.steps * load.samples_per_step
    return {
        "samples_expected": expected,
        "samples_lost": expected - len({sample.id for sample in samples}),
        "turns_lost": expected * load.turns - sum(len(sample.turns) for sample in samples),
        "sessions_repeated": sum(row["rollout/num_retried"] + row["rollout/num_dropped"] for row in rows),
        "audit": audit(config.folder).wrong,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sessions", type=int, default=1000, help="at once")
    parser.add_argument("--turns", type=int, default=8, help="of a session")
    parser.add_argument("--turn-s", type=float, nargs="+", default=[4.0, 0.05], help="that the engine takes")
    parser.add_argument("--tokens", type=int, default=64, help="of a turn")
    parser.add_argument("--rounds", type=int, default=4, help="of sessions")
    arguments = parser.parse_args()
    result = run(arguments.sessions, arguments.turns, arguments.turn_s, arguments.tokens, arguments.rounds)
    print(json.dumps(result, indent=None if arguments.json else 2))
