"""Our loop beside TRL's GRPOTrainer on the same work and model: `python -m benchmarks.trl_loop`.

The work is the quickstart's: a Qwen2 of one million parameters, 16 prompts x 8 samples, at most 8 new
tokens, one optimizer step a batch. TRL runs in an environment of its own (.venv-trl, made on first use),
in fp32 and bf16 with one thread and two; its best wall time counts. Prints JSON.
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup-steps", type=int, default=5)
    args = parser.parse_args()
    python = trl_python()
    with tempfile.TemporaryDirectory() as folder:
        assets = Path(folder) / "assets"
        build_arithmetic(assets, seed=0, digits=2)
        config = loop.benchmark_config(assets, Path(folder), args.warmup_steps + args.steps + 1)
        atoll = loop.measure(config, args.steps, args.warmup_steps)
        trl = {
            f"{dtype}, {threads} threads": run_trl(python, assets, Path(folder), dtype, threads, args)
            for dtype in ("float32", "bfloat16")
            for threads in (1, 2)
        }
    best = min(trl, key=lambda name: trl[name]["wall_s_per_step"])
    ratio = trl[best]["wall_s_per_step"] / atoll["wall_s_per_step"]
    print(json.dumps({"atoll": atoll, "trl": trl, "best_of_trl": best, "speedup": ratio}, indent=2))


def trl_python() -> Path:
    """TRL's interpreter. torch is installed first, on its own: TRL alone may bring another build of it."""
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        for packages in ([TORCH], [TRL, TRANSFORMERS]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run_trl(
    python: Path, assets: Path, folder: Path, dtype: str, threads: int, args: argparse.Namespace
) -> dict[str, Any]:
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
