"""Whether two runs are the same, bit for bit: the numbers of every step, and every sample that was trained.

    python -m tests.compare_runs BEFORE AFTER

BEFORE and AFTER are folders of runs with coordinator.dump = "all". Times, rates, memory (LEFT_OUT) and
incarnations are left out, and so is the run's name in the ids of its samples. If both folders have
recorded/step-*.npz, these are compared, too: `ids` [N] of samples, and arrays [R] that `offsets` [N+1] cut by
sample, such as the advantages of their tokens.

Prints the first differences of each kind and how many there are. Exit code 1 if there is any.
"""

import argparse
import json
import math
import re
import struct
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.runtime.telemetry import ROW_KEYS
from tests.dumped import DumpedSample, read_samples

SHOWN = 10  # differences of a kind
LEFT_OUT = {
    r"perf/throughput|.*_per_s": "a rate",
    r"timing_s/.*|.*_s|.*/stall_share": "a time",
    r"(perf|memory)/.*memory.*": "memory",
    r"checkpoint/num_bytes": "the size of a file that has times in it, as text",
}
Array = NDArray[Any]


class Differences:
    def __init__(self) -> None:
        self._first: dict[str, list[str]] = {}
        self._number: dict[str, int] = {}
        self._largest: dict[str, float] = {}

    def add(self, kind: str, what: str, size: float = 0.0) -> None:
        """`size`: by how much two numbers differ; 0 for anything else."""
        self._first.setdefault(kind, [])
        if len(self._first[kind]) < SHOWN:
            self._first[kind].append(what)
        self._number[kind] = self._number.get(kind, 0) + 1
        self._largest[kind] = max(self._largest.get(kind, 0.0), size)

    @property
    def total(self) -> int:
        return sum(self._number.values())

    def lines(self) -> list[str]:
        lines = []
        for kind, first in self._first.items():
            size = f", by {self._largest[kind]:.3g} at most" if self._largest[kind] else ""
            lines.append(f"{kind}: {self._number[kind]} differ{size}")
            lines += [f"  {what}" for what in first]
        return lines


def compare(before: Path, after: Path) -> tuple[Differences, list[str]]:
    """The differences, and what was and was not compared."""
    differences = Differences()
    notes = [
        *compare_metrics(before / "metrics.jsonl", after / "metrics.jsonl", differences),
        compare_dumps(before / "dumps", after / "dumps", differences),
        compare_recorded(before / "recorded", after / "recorded", differences),
    ]
    return differences, notes


def compare_metrics(before: Path, after: Path, differences: Differences) -> list[str]:
    rows, others = _rows(before), _rows(after)
    compared, left_out = set(), set()
    for step in _in_both("metrics", "step", rows, others, differences):
        row, other = rows[step], others[step]
        names = row.keys() | other.keys()
        left_out |= {name for name in names if _why_left_out(name)}
        for name in sorted(names - left_out):
            compared.add(name)
            if name not in row or name not in other:
                where = "BEFORE" if name in row else "AFTER"
                differences.add(name, f"step {step}: only in {where}")
            elif _bits(row[name]) != _bits(other[name]):
                size = _distance(row[name], other[name])
                differences.add(name, f"step {step}: {row[name]!r}, {other[name]!r}", size)
    return [
        f"metrics of {len(rows)} and {len(others)} rows: {', '.join(sorted(compared))}",
        *(f"left out, {_why_left_out(name)}: {name}" for name in sorted(left_out)),
    ]


def _rows(path: Path) -> dict[int, dict[str, float | None]]:
    """By step."""
    rows = map(json.loads, path.read_text().splitlines())
    return {row["step"]: {name: row[name] for name in row if name not in ROW_KEYS} for row in rows}


def _why_left_out(name: str) -> str:
    return next((why for pattern, why in LEFT_OUT.items() if re.fullmatch(pattern, name)), "")


def compare_dumps(before: Path, after: Path, differences: Differences) -> str:
    paths, others = _by_step(before, "pb"), _by_step(after, "pb")
    if not paths:
        differences.add("dumps", f"there is none in {before}")
    number = 0
    for step in _in_both("dumps", "step", paths, others, differences):
        batch, other_batch = read_samples(paths[step]), read_samples(others[step])
        samples, other = ({sample.id: sample for sample in side} for side in (batch, other_batch))
        shared = _in_both("samples", f"step {step}: sample", samples, other, differences)
        if samples.keys() == other.keys() and [s.id for s in batch] != [s.id for s in other_batch]:
            differences.add("order", f"step {step}: the same samples in another order, or one of them twice")
        for id in shared:
            _compare_sample(f"step {step}: sample {id}", samples[id], other[id], differences)
        number += len(shared)
    return f"dumps of {len(paths)} and {len(others)} steps, {number} samples"


def _compare_sample(name: str, sample: DumpedSample, other: DumpedSample, differences: Differences) -> None:
    for kind in ("token_ids", "mask", "logprobs", "versions"):
        compare_arrays(kind, name, getattr(sample, kind), getattr(other, kind), differences)
    for reward in sorted(sample.rewards.keys() | other.rewards.keys()):
        value, another = sample.rewards.get(reward), other.rewards.get(reward)
        if _bits(value) != _bits(another):
            what = f"{name}: {reward}: {value!r}, {another!r}"
            differences.add("rewards", what, _distance(value, another))


def compare_recorded(before: Path, after: Path, differences: Differences) -> str:
    if not (before.exists() and after.exists()):
        return "advantages: not compared, since not both folders have them in recorded/"
    paths, others = _by_step(before, "npz"), _by_step(after, "npz")
    kinds: set[str] = set()
    for step in _in_both("recorded", "step", paths, others, differences):
        samples, other = _recorded(paths[step]), _recorded(others[step])
        for id in _in_both("recorded", f"step {step}: sample", samples, other, differences):
            name = f"step {step}: sample {id}"
            for kind in _in_both("recorded", f"{name}:", samples[id], other[id], differences):
                compare_arrays(f"recorded {kind}", name, samples[id][kind], other[id][kind], differences)
                kinds.add(kind)
    return f"recorded of {len(paths)} and {len(others)} steps: {', '.join(sorted(kinds))}"


def _recorded(path: Path) -> dict[str, dict[str, Array]]:
    """By sample, then by name."""
    with np.load(path) as file:
        columns = {name: file[name] for name in file.files}
    ids, offsets = columns.pop("ids"), columns.pop("offsets")
    return {
        str(id): {name: column[start:end] for name, column in columns.items()}
        for id, (start, end) in zip(ids, pairwise(offsets), strict=True)
    }


def compare_arrays(kind: str, name: str, values: Array, others: Array, differences: Differences) -> None:
    """Adds one difference at most, which names the first element that differs."""
    if len(values) != len(others):
        differences.add(kind, f"{name}: {len(values)} and {len(others)} tokens")
    elif values.dtype != others.dtype:
        differences.add(kind, f"{name}: {values.dtype} and {others.dtype}")
    elif values.tobytes() != others.tobytes():
        bits, other_bits = (array.view(np.uint8).reshape(len(array), -1) for array in (values, others))
        at = np.flatnonzero((bits != other_bits).any(axis=1))
        size = float(np.abs(values.astype(np.float64) - others.astype(np.float64)).max())
        what = f"token {at[0]}" + (f" and {len(at) - 1} more" if len(at) > 1 else "")
        differences.add(kind, f"{name}, {what}: {values[at[0]]!s}, {others[at[0]]!s}", size)


def _in_both(
    kind: str, what: str, items: Mapping[Any, Any], others: Mapping[Any, Any], differences: Differences
) -> list[Any]:
    """Keys of both, in the order of `items`; one that is missing on either side is a difference."""
    for key in sorted(items.keys() ^ others.keys()):
        differences.add(kind, f"{what} {key} only in {'BEFORE' if key in items else 'AFTER'}")
    return [key for key in items if key in others]


def _by_step(folder: Path, ending: str) -> dict[int, Path]:
    return {int(path.stem.removeprefix("step-")): path for path in sorted(folder.glob(f"step-*.{ending}"))}


def _bits(value: float | None) -> bytes | None:
    """Tells 0.0 from -0.0; None: not finite, or not there."""
    return None if value is None else struct.pack("<d", value)


def _distance(value: float | None, other: float | None) -> float:
    return math.inf if value is None or other is None else abs(value - other)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="the folder of a run")
    parser.add_argument("after", type=Path, help="and of another one")
    arguments = parser.parse_args()
    differences, notes = compare(arguments.before, arguments.after)
    print("\n".join([*notes, *differences.lines(), f"{differences.total} differences"]))
    return 1 if differences.total else 0


if __name__ == "__main__":
    sys.exit(main())
