"""Weight pushes: their speed beside a memory copy, what they move, and how long generation stands still."""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from atoll.cli.display import progress
from atoll.cli.launch.launcher import launch
from atoll.cli.tasks.arithmetic import build_arithmetic
from benchmarks import plan_scale, weight_delta, weight_push, weight_sglang, weight_shards
from benchmarks.loop import benchmark_config
from benchmarks.weight_push import Setting

SETTINGS = {
    "local": Setting(),
    "local_2_readers": Setting(num_readers=2),
    "sglang_receiver": Setting(in_place=True),
    "tcp": Setting(transport="tcp"),
}


def run(megabytes: int = 256, rounds: int = 7) -> dict[str, Any]:
    pushes = {name: weight_push.run(megabytes << 20, rounds, setting) for name, setting in SETTINGS.items()}
    seconds = pushes["local_2_readers"]["wall_s"]
    return {
        **pushes,
        "hand_off_time_2_to_1": seconds["hand_off_2"] / seconds["hand_off_1"],
        "sglang_server": weight_sglang.run(rounds),
        "bytes_by_target": weight_shards.run(),
        "delta_of_a_training_step": weight_delta.run(),
        "short_run": _short_run(),
        "plan_at_scale": plan_scale.run(),
    }


def _short_run(steps: int = 25, warmup_steps: int = 5) -> dict[str, float]:
    """The quickstart's loop: medians of its pushes' metrics."""
    with tempfile.TemporaryDirectory() as name:
        build_arithmetic(Path(name) / "assets", seed=0)
        config = benchmark_config(Path(name) / "assets", Path(name), steps)
        launch(config, lambda client: progress.follow(client, lambda status: None), resume=False)
        rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    metrics = ("weights/push_s", "weights/stall_s", "weights/stall_share")
    return {metric: median(row[metric] for row in rows[warmup_steps:]) for metric in metrics}
