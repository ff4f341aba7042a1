"""First measurements on one GPU: ten parts, each below ten minutes on an H100.

`python -m benchmarks.gpu` runs them all, each in a process of its own, prints what it measures as it goes and
writes a table. `--only N` runs one. Figures of the table belong into docs/benchmarks.md.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.gpu import checks, commits, kernels, report, training
from benchmarks.gpu.report import Row

EXIT_NO_GPU = 2

PARTS: Mapping[int, tuple[str, Callable[[], Iterator[Row]]]] = {
    1: ("Facts", checks.facts),
    2: ("Forked ranks: off-loading, recomputation, updates", checks.forks),
    3: ("Attention backends against dense attention", checks.attention),
    4: ("Transports", checks.transports),
    5: ("Pushes of merged adapters", checks.merged_adapters),
    6: ("Log-probabilities", kernels.logprobs),
    7: ("Attention in new shapes", kernels.attention),
    8: ("An update of a 1.5B model", training.update),
    9: ("Pushes between processes", commits.pushes),
    10: ("Commits under load", commits.commits),
}


def run(number: int) -> list[Row]:
    """One part, in a process of its own. A failure is the last row."""
    title, part = PARTS[number]
    print(f"\n{number}. {title}", flush=True)
    rows = []
    try:
        for row in part():
            print(f"   {row.what}: {row.value}", flush=True)
            rows.append(row)
    except Exception as error:
        rows.append(Row("failed", f"{type(error).__name__}: {error}".splitlines()[0]))
        print(f"   failed: {error}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--only", type=int, choices=PARTS, metavar="N", help="run part N; default: all")
    parser.add_argument("--out", type=Path, default=Path("gpu.md"), help="file for the table")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is here: run this on a machine with a GPU, with the extra `trainer`")
        return EXIT_NO_GPU
    measured: dict[str, list[Row]] = {}
    for number in [arguments.only] if arguments.only else PARTS:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            measured[f"{number}. {PARTS[number][0]}"] = process.submit(run, number).result()
            machine = process.submit(report.machine).result()
        arguments.out.write_text(report.markdown(machine, measured))
    print(f"\nwrote {arguments.out}")
    return int(any(row.what == "failed" for rows in measured.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
