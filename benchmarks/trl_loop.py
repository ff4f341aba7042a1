"""Our loop beside TRL's GRPOTrainer on the same work and model: `python -m benchmarks.trl_loop`.

The work is the quickstart's: a Qwen2 of one million parameters, 16 prompts x 8 samples, at most 8 new
tokens, one optimizer step a batch. TRL runs in an environment of its own (.venv-trl, made on first use),
in fp32 and bf16 with one thread and two; ours in fp32 with one thread a process, as one trainer rank and
one replica, as two of each, and one step off-policy. They take turns, and each side's best wall time
counts; the off-policy one is reported apart. Prints JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import loop
from services.cli.arithmetic import build_arithmetic

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-trl"
TRL, TORCH, TRANSFORMERS = "trl==1.16.0", "torch==2.13.0", "transformers==5.23.0"  # the two last: as ours


OFF_POLICY = "1 rank, 1 replica, one step off-policy"
TWO_OF_EACH = ("trainer.parallel.data=2", "rollout.replicas=2")
OURS: dict[str, tuple[str, ...]] = {
    "1 rank, 1 replica": (),
    "2 ranks, 2 replicas": TWO_OF_EACH,
    OFF_POLICY: ("coordinator.max_staleness=1",),
    "2 ranks, 2 replicas, again": TWO_OF_EACH,
}
THEIRS = {
    "fp32, 1 thread": ("float32", 1),
    "fp32, 2 threads": ("float32", 2),
    "bf16, 1 thread": ("bfloat16", 1),
    "bf16, 2 threads": ("bfloat16", 2),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup-steps", type=int, default=5)
    args = parser.parse_args()
    python = trl_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_arithmetic(folder / "assets", seed=0, digits=2)
        atoll: dict[str, dict[str, Any]] = {}
        trl: dict[str, dict[str, Any]] = {}
        for (ours, overrides), (theirs, setting) in zip(OURS.items(), THEIRS.items(), strict=True):
            config = loop.benchmark_config(
                folder / "assets", folder, args.warmup_steps + args.steps + 1, overrides
            )
            atoll[ours] = loop.measure(config, args.steps, args.warmup_steps)
            trl[theirs] = run_trl(python, folder, *setting, args)
    off_policy = atoll[OFF_POLICY]["wall_s_per_step"]
    best_of_atoll = min((name for name in atoll if name != OFF_POLICY), key=lambda name: _wall(atoll[name]))
    best_of_trl = min(trl, key=lambda name: _wall(trl[name]))
    report = {
        "atoll": atoll,
        "trl": trl,
        "best_of_atoll": best_of_atoll,
        "best_of_trl": best_of_trl,
        "speedup": _wall(trl[best_of_trl]) / _wall(atoll[best_of_atoll]),
        "speedup_one_step_off_policy": _wall(trl[best_of_trl]) / off_policy,
    }
    print(json.dumps(report, indent=2))


def _wall(measured: dict[str, Any]) -> float:
    return float(measured["wall_s_per_step"])


def trl_python() -> Path:
    """TRL's interpreter. torch is installed first, on its own: TRL alone may bring another build of it."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        for packages in ([TORCH], [TRL, TRANSFORMERS]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run_trl(python: Path, folder: Path, dtype: str, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    assets = folder / "assets"
    command: list[str | Path] = [
        *(python, ROOT / "benchmarks" / "trl_trainer.py"),
        *("--model", assets / "model", "--data", assets / "train.parquet", "--out", folder / "trl"),
        *("--steps", str(args.steps), "--warmup-steps", str(args.warmup_steps)),
        *("--dtype", dtype, "--threads", str(threads)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured = json.loads(answer.stdout.splitlines()[-1])
    samples = measured["steps"] * 128
    return {
        "wall_s_per_step": measured["wall_s"] / measured["steps"],
        "cpu_s_per_step": measured["cpu_s"] / measured["steps"],
        "samples_per_s": samples / measured["wall_s"],
    }


if __name__ == "__main__":
    main()
