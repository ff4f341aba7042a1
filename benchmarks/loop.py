"""The whole loop, launched as `atoll run` does: the quickstart's work without warm-up and validation."""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from atoll.cli.display import progress
from atoll.cli.launch.launcher import launch
from atoll.cli.tasks.arithmetic import build_arithmetic
from atoll.config.load import load
from atoll.config.schema import RunConfig
from atoll.runtime.gpus import resolve_here
from atoll.wire.info import RunStatus

EXAMPLE = Path(__file__).parents[1] / "examples" / "arithmetic.toml"


@dataclass(frozen=True, slots=True)
class Reading:
    wall_s: float
    cpu_s: dict[str, float]  # by module, such as atoll.rollout


class Stopwatch:
    """Reads the clocks whenever a step has ended."""

    def __init__(self) -> None:
        self.readings: dict[int, Reading] = {}  # by step

    def show(self, status: RunStatus) -> None:
        if status.state == "training" and status.step not in self.readings:
            self.readings[status.step] = Reading(time.perf_counter(), cpu_seconds())


def cpu_seconds() -> dict[str, float]:
    """Of every process that this one started, threads and their children included."""
    seconds: dict[str, float] = {}
    for process in psutil.Process().children(recursive=True):
        modules = (word for word in process.cmdline() if word.startswith("atoll."))
        name = next(modules, process.name())
        times = process.cpu_times()
        seconds[name] = seconds.get(name, 0.0) + times.user + times.system
    return seconds


def run(steps: int = 50, warmup_steps: int = 5) -> dict[str, Any]:
    """Wall and CPU seconds of `steps` steps that follow `warmup_steps`; 128 samples a step."""
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder) / "assets"
        build_arithmetic(assets, seed=0, digits=2)
        return measure(benchmark_config(assets, Path(folder), warmup_steps + steps + 1), steps, warmup_steps)


def benchmark_config(assets: Path, folder: Path, steps: int, overrides: Sequence[str] = ()) -> RunConfig:
    """The quickstart's config, cut down to its loop."""
    settings = {
        "run.dir": folder,
        "run.name": f"benchmark-{len(list(folder.iterdir()))}",  # another one each time
        "run.steps": steps,
        "run.target_reward": 2.0,  # never reached
        "model.path": assets / "model",
        "data.train": f'[{{path = "{assets / "train.parquet"}"}}]',
        "warmup": "{}",
        "validation.sets": [],
        "checkpoint.every": 0,
        "checkpoint.at_end": "false",
    }
    return resolve_here(load(EXAMPLE, [*(f"{key}={value}" for key, value in settings.items()), *overrides]))


def measure(config: RunConfig, steps: int, warmup_steps: int) -> dict[str, Any]:
    stopwatch = Stopwatch()
    launch(config, lambda client: progress.follow(client, stopwatch.show), resume=False)
    first, last = stopwatch.readings[warmup_steps], stopwatch.readings[warmup_steps + steps]
    samples = steps * config.coordinator.prompts_per_step * config.coordinator.samples_per_prompt
    wall_s = last.wall_s - first.wall_s
    cpu_s = {name: last.cpu_s[name] - first.cpu_s[name] for name in first.cpu_s}
    return {
        "steps": steps,
        "samples": samples,
        "wall_s_per_step": wall_s / steps,
        "cpu_s_per_step": sum(cpu_s.values()) / steps,
        "samples_per_s": samples / wall_s,
        "coordinator_cpu_us_per_sample": cpu_s["atoll.coordinator"] / samples * 1e6,
        "cpu_s_per_step_by_process": {name: seconds / steps for name, seconds in cpu_s.items()},
    }
