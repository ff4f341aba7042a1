"""The trainer's update beside a plain padded transformers loop, its memory, and how evenly work is spread.

Sides run interleaved in one process on one thread, fp32, in CPU seconds; every round draws new tokens.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from atoll.cli.tasks.arithmetic import build_arithmetic
from benchmarks import balance, chunked_logprobs
from benchmarks.memory import measured_apart
from benchmarks.updates import (
    EXPERTS_MODEL,
    LONG_TAILED_MODEL,
    PLAIN,
    SIDES,
    Update,
    Work,
    build_sides,
    join_alone,
    long_tailed_work,
    short_work,
    write_model,
)

FIRST_ROUNDS = 2  # fill caches and are not counted


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_arithmetic(folder, seed=0)
        write_model(folder / "long", LONG_TAILED_MODEL)
        write_model(folder / "experts", EXPERTS_MODEL)
        join_alone()
        short, long, experts = (build_sides(folder / name) for name in ("model", "long", "experts"))
        shared = partial(long_tailed_work, num_prompts=4, num_samples=4)
        return {
            "short_answers": measure(short, short_work, rounds=30),
            "short_answers_64_experts": measure(experts, short_work, rounds=10),
            "long_tailed": measure(long, long_tailed_work, rounds=5),
            "long_tailed_4_samples_a_prompt": measure(long, shared, rounds=5),
            "long_tailed_peak_mib_above_the_weights": {
                side: measured_apart("benchmarks.updates", side, str(folder / "long")) for side in SIDES
            },
            "chunked_logprobs": chunked_logprobs.run(),
            "largest_to_mean_load": balance.run(),
        }


def measure(
    sides: Mapping[str, Update], draw: Callable[[np.random.Generator], Work], rounds: int
) -> dict[str, Any]:
    """Medians over rounds: useful tokens per CPU second, ratios of them to the padded loop's, and the waste
    factor: padded over useful tokens, which a loop without padding saves."""
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    wastes: list[float] = []
    for number in range(FIRST_ROUNDS + rounds):
        work = draw(rng)
        seconds = {name: _cpu_seconds(update, work) for name, update in sides.items()}
        if number >= FIRST_ROUNDS:
            wastes.append(work.num_padded_tokens / work.num_tokens)
            for name in sides:
                rates[name].append(work.num_tokens / seconds[name])
    ratios = {name: np.divide(rates[name], rates[PLAIN]) for name in sides if name != PLAIN}
    return {
        "tokens_per_cpu_s": {name: median(values) for name, values in rates.items()},
        "ratio_to_padded": {name: float(np.median(ratio)) for name, ratio in ratios.items()},
        "waste_factor": median(wastes),
        "ratio_over_waste_factor": {name: float(np.median(ratio / wastes)) for name, ratio in ratios.items()},
    }


def _cpu_seconds(update: Update, work: Work) -> float:
    start = time.process_time()
    update(work)
    return time.process_time() - start
