"""Our loop beside TRL's GRPOTrainer on the same work and model: `python -m benchmarks.trl_loop`.

The work is the quickstart's: a Qwen2 of one million parameters, 16 prompts x 8 samples, at most 8 new
tokens, one optimizer step a batch. TRL runs in an environment of its own (.venv-trl, made on first use),
in fp32 and bf16 with one thread and two; ours with one thread a process and prompts shared, as one trainer
rank and one replica, as two of each, both dtypes, and one step off-policy. They take turns, and each
side's best wall time counts; the off-policy one is reported apart. Prints the table of docs/benchmarks.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from atoll.cli.tasks.arithmetic import build_arithmetic
from benchmarks import loop

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-trl"
TRL, TORCH, TRANSFORMERS = "trl==1.16.0", "torch==2.13.0", "transformers==5.23.0"  # the two last: as ours

OFF_POLICY = "fp32, 1 rank, 1 replica, one step off-policy"
TWO_OF_EACH = ("trainer.parallel.data=2", "rollout.replicas=2")
OURS: dict[str, tuple[str, ...]] = {
    "fp32, 1 rank, 1 replica": (),
    "fp32, 2 ranks, 2 replicas": TWO_OF_EACH,
    "bf16, 2 ranks, 2 replicas": (*TWO_OF_EACH, "trainer.dtype=bfloat16", "rollout.dtype=bfloat16"),
    OFF_POLICY: ("coordinator.max_staleness=1",),
}
THEIRS = {
    "fp32, 1 thread": ("float32", 1),
    "fp32, 2 threads": ("float32", 2),
    "bf16, 1 thread": ("bfloat16", 1),
    "bf16, 2 threads": ("bfloat16", 2),
}


@dataclass(frozen=True, slots=True)
class Measured:
    wall_s: float  # of a step
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup-steps", type=int, default=5)
    args = parser.parse_args()
    python = trl_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_arithmetic(folder / "assets", seed=0, digits=2)
        atoll: dict[str, Measured] = {}
        trl: dict[str, Measured] = {}
        for (ours, overrides), (theirs, setting) in zip(OURS.items(), THEIRS.items(), strict=True):
            atoll[ours] = run_atoll(folder, overrides, args.steps, args.warmup_steps)
            trl[theirs] = run_trl(python, folder, *setting, args.steps, args.warmup_steps)
    print("\n".join(table(atoll, trl)))


def table(atoll: Mapping[str, Measured], trl: Mapping[str, Measured]) -> Iterator[str]:
    """Markdown: every run, then TRL's best wall time over ours."""
    yield "| | wall s per step | CPU s per step |"
    yield "|---|---|---|"
    for side, runs in (("Atoll", atoll), ("TRL", trl)):
        for name, run in runs.items():
            yield f"| {side}, {name} | {run.wall_s:.3f} | {run.cpu_s:.3f} |"
    theirs = _best(trl)
    on_policy = _best({name: run for name, run in atoll.items() if name != OFF_POLICY})
    for ours in (on_policy, OFF_POLICY):
        ratio = trl[theirs].wall_s / atoll[ours].wall_s
        yield f"\nTRL's best ({theirs}) over Atoll, {ours}: {ratio:.2f}x."


def _best(runs: Mapping[str, Measured]) -> str:
    return min(runs, key=lambda name: runs[name].wall_s)


def run_atoll(folder: Path, overrides: tuple[str, ...], steps: int, warmup_steps: int) -> Measured:
    config = loop.benchmark_config(folder / "assets", folder, warmup_steps + steps + 1, overrides)
    measured = loop.measure(config, steps, warmup_steps)
    return Measured(measured["wall_s_per_step"], measured["cpu_s_per_step"])


def trl_python() -> Path:
    """TRL's interpreter. torch is installed first, on its own: TRL alone may bring another build of it."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        for packages in ([TORCH], [TRL, TRANSFORMERS]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run_trl(python: Path, folder: Path, dtype: str, threads: int, steps: int, warmup_steps: int) -> Measured:
    assets = folder / "assets"
    command: list[str | Path] = [
        *(python, ROOT / "benchmarks" / "trl_trainer.py"),
        *("--model", assets / "model", "--data", assets / "train.parquet", "--out", folder / "trl"),
        *("--steps", str(steps), "--warmup-steps", str(warmup_steps)),
        *("--dtype", dtype, "--threads", str(threads)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(answer.stdout.splitlines()[-1])
    return Measured(measured["wall_s"] / measured["steps"], measured["cpu_s"] / measured["steps"])


if __name__ == "__main__":
    main()
