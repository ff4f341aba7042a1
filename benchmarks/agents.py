"""Two agents learn from nothing but the reward: one calls a tool, one plays a game of several turns.

    python -m benchmarks.agents                        # both, three seeds: about half an hour on two cores
    python -m benchmarks.agents --only guess --seeds 1

For each seed, a run of the example and, for as long and after the same warm-up, one without the tool or with
one turn per game. All scores are those of greedy answers to held-out tasks. Prints JSON, draws
docs/agents_learning.svg, and fails if a score misses its bar. Runs lie in runs/agents.
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from atoll.cli.display.charts import Curve
from atoll.cli.display.svg import svg
from atoll.cli.tasks.guess import GUESSES, SIZE

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "agents_learning.svg"
RUNS = Path("runs/agents")
BEST_SCORE, MAX_ABLATED, MAX_SECONDS = 0.8, 0.4, 360.0  # bars: shares of the optimum; seconds of a run
SERVER_S = 60.0  # for a server to listen


@cache
def chance(numbers: int, guesses: int) -> float:
    """Of finding one of so many numbers by the best strategy: a first guess either finds it or leaves the
    `i` numbers below or the others above, each as likely as it has numbers."""
    if numbers == 0 or guesses == 0:
        return 0.0
    return max(
        (1 + i * chance(i, guesses - 1) + (numbers - 1 - i) * chance(numbers - 1 - i, guesses - 1)) / numbers
        for i in range(numbers)
    )


@dataclass(frozen=True, slots=True)
class Task:
    example: str
    data: str  # of `atoll data`
    port: int  # of examples/EXAMPLE/server.py
    score: str  # metric of the held-out tasks
    optimum: float
    max_warm: float  # score after the warm-up
    ablation: Mapping[str, str]  # settings


TASKS = {
    "calculator": Task(
        "calculator",
        "tools",
        8901,
        "val/sums/avg@1",
        optimum=1.0,
        max_warm=0.3,
        ablation={
            "agents": "[]",
            "servers": "[]",
            "data.train": '[{path = "runs/data/tools/train.parquet"}]',
            "validation.sets": '[{name = "sums", path = "runs/data/tools/validation.parquet", '
            "max_prompts = 128}]",
        },
    ),
    "guess": Task(
        "guess",
        "guess",
        8902,
        "val/ranges/avg@1",
        optimum=chance(SIZE, GUESSES),
        max_warm=1.0,
        ablation={
            "agents": '[{name = "player", reward = "session", max_turns = 1, '
            'environment = {server = "guess"}}]'
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    warm: float  # held-out score after the warm-up
    final: float
    steps: int
    seconds: float  # from the first process to the last
    scores: Sequence[tuple[float, float]]  # seconds since the warm-up, held-out score


@dataclass(frozen=True, slots=True)
class Result:
    task: str
    seed: int
    agent: Run
    ablated: Run
    share_of_optimum: float
    misses: Sequence[str]  # bars


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--only", choices=TASKS, help="one of the two")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(TASKS)
    results = []
    for task in (TASKS[name] for name in names):
        with server(task.example, task.port):
            results += [measure(task, seed) for seed in range(arguments.seeds)]
    PICTURE.write_text(svg({f"{name}: held-out score by seconds": curves(results, name) for name in names}))
    print(json.dumps([asdict(result) for result in results], indent=2))
    if misses := [miss for result in results for miss in result.misses]:
        sys.exit("\n".join(misses))


@contextmanager
def server(example: str, port: int) -> Iterator[None]:
    """The example's own, until the context exits."""
    program = ROOT / "examples" / example / "server.py"
    if is_listening(port):
        raise RuntimeError(f"port {port} is taken, and {program} needs it: end that server first")
    process = subprocess.Popen([sys.executable, program, str(port)], stdout=sys.stderr)
    try:
        deadline = time.monotonic() + SERVER_S
        while not is_listening(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{program}: no server at port {port}: see its output above")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait()


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def measure(task: Task, seed: int) -> Result:
    shutil.rmtree(ROOT / "runs" / "data" / task.data, ignore_errors=True)
    subprocess.run([atoll(), "data", task.data, "--seed", str(seed)], cwd=ROOT, check=True, stdout=sys.stderr)
    agent = train(task, f"{task.example}-{seed}", {"run.seed": str(seed)})
    ablated = train(
        task,
        f"{task.example}-{seed}-ablated",
        {"run.seed": str(seed), "run.steps": "1000000", **task.ablation},
        stop_after_s=agent.seconds,
    )
    return Result(
        task.example, seed, agent, ablated, agent.final / task.optimum, check(task, seed, agent, ablated)
    )


def check(task: Task, seed: int, agent: Run, ablated: Run) -> list[str]:
    """A sentence for each bar that is missed."""
    figures = (
        ("after the warm-up", agent.warm, agent.warm <= task.max_warm),
        ("at the end", agent.final, agent.final >= BEST_SCORE * task.optimum),
        ("of the ablation", ablated.final, ablated.final <= MAX_ABLATED * task.optimum),
        ("seconds", agent.seconds, agent.seconds <= MAX_SECONDS),
    )
    return [
        f"{task.example}, seed {seed}: {name}: {value:.3f}" for name, value, is_good in figures if not is_good
    ]


def train(task: Task, name: str, settings: Mapping[str, str], stop_after_s: float | None = None) -> Run:
    """Runs from scratch in RUNS/name; stops it after `stop_after_s` seconds."""
    folder = ROOT / RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    settings = {"run.dir": str(RUNS), "run.name": name, "checkpoint.at_end": "false", **settings}
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    began = time.monotonic()
    process = subprocess.Popen(
        [atoll(), "run", f"examples/{task.example}.toml", *overrides], cwd=ROOT, stdout=sys.stderr
    )
    try:
        exit_code = process.wait(stop_after_s)
    except subprocess.TimeoutExpired:
        subprocess.run([atoll(), "stop", folder], cwd=ROOT, check=True, stdout=sys.stderr)
        process.wait()
        exit_code = 0  # whatever it says of steps that are in no checkpoint
    if exit_code != 0:
        raise RuntimeError(f"{name} failed: see {folder / 'logs'}")
    return read(task, folder, time.monotonic() - began)


def read(task: Task, folder: Path, seconds: float) -> Run:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    begin = rows[0]["time"]
    scores = [(row["time"] - begin, row[task.score]) for row in rows if task.score in row]
    return Run(scores[0][1], scores[-1][1], rows[-1]["step"], seconds, scores)


def atoll() -> Path:
    return Path(sys.executable).with_name("atoll")


def curves(results: Sequence[Result], task: str) -> dict[str, Curve]:
    chosen = [result for result in results if result.task == task]
    return {f"agent, seed {result.seed}": result.agent.scores for result in chosen} | {
        f"without tool or turns, seed {result.seed}": result.ablated.scores for result in chosen
    }


if __name__ == "__main__":
    main()
