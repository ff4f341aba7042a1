"""How evenly a long-tailed batch lies on data-parallel ranks and in their micro-batches.

`benchmarks/lengths.json` holds 512 prompts x 8 samples; `python -m benchmarks.balance` writes it again.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from atoll.trainer.batch import plan_microbatches
from atoll.wire.types import Segments

LENGTHS = Path(__file__).with_name("lengths.json")
HOW = (
    "[prompt, its 8 responses] in tokens: prompts log-normal around 150 (sigma 0.5, 32 to 1024); responses "
    "log-normal (sigma 0.6, 16 to 8192) around their prompt's difficulty, itself log-normal around 400 "
    "(sigma 0.9), so that a prompt's samples are of like length; numpy default_rng(0)"
)
RANKS, PROMPTS_OF_A_SMALL_STEP = 8, 64
MAX_TOKENS = 65_536  # of a micro-batch; the largest group has 45,125 and is never split


def run() -> dict[str, Any]:
    """Largest over mean load, in tokens: of 8 ranks, and of a rank's micro-batches (the worst rank's)."""
    groups = json.loads(LENGTHS.read_text())["groups"]
    small = [groups[i : i + PROMPTS_OF_A_SMALL_STEP] for i in range(0, len(groups), PROMPTS_OF_A_SMALL_STEP)]
    ranks, microbatches = loads(groups)
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        f"ranks_of_{PROMPTS_OF_A_SMALL_STEP}_prompts_worst_of_{len(small)}": max(
            loads(part)[0] for part in small
        ),
    }


def loads(groups: list[list[int]]) -> tuple[float, float]:
    lengths = np.concatenate(groups)
    first = np.cumsum([0, *map(len, groups)])[:-1]  # each group's prompt
    group_S = np.repeat(np.arange(len(groups)), list(map(len, groups)))
    parents = first[group_S]
    parents[first] = -1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    segments = Segments(
        np.zeros(offsets[-1], np.int32), offsets, parents.astype(np.int32), group_S.astype(np.int32)
    )
    plan = plan_microbatches(segments, np.ones(offsets[-1], bool), MAX_TOKENS, RANKS)
    tokens = [np.array([lengths[part].sum() for part in parts]) for parts in plan]
    of_ranks = np.array([parts.sum() for parts in tokens])
    return float(of_ranks.max() / of_ranks.mean()), float(max(parts.max() / parts.mean() for parts in tokens))


def write() -> None:
    rng = np.random.default_rng(0)
    prompts = np.exp(rng.normal(np.log(150), 0.5, 512)).astype(int).clip(32, 1024)
    difficulty = rng.normal(np.log(400), 0.9, (512, 1))
    responses = np.exp(rng.normal(difficulty, 0.6, (512, 8))).astype(int).clip(16, 8192)
    rows = np.concatenate([prompts[:, None], responses], axis=1).tolist()
    lines = ",\n".join(json.dumps(row) for row in rows)
    LENGTHS.write_text(f'{{"how": {json.dumps(HOW)},\n"groups": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    write()
