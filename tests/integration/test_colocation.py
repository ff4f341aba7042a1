"""A run whose models and replicas take turns on the same devices, and the same run with devices apart."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.launch.launcher import launch
from atoll.runtime.clients.coordinator import CoordinatorClient
from tests.builders import arithmetic_run, run_config

TIMES = {"timing_s/release", "timing_s/offload", "timing_s/resume"}


async def watch(client: CoordinatorClient) -> None:
    """Lets the run end by itself."""
    await asyncio.Event().wait()


def rows(assets: Path, folder: Path, mode: str) -> list[dict[str, Any]]:
    """Of a run of 20 steps."""
    config = run_config(
        arithmetic_run(assets, folder),
        {
            "run": {"name": mode, "steps": 20},
            "placement": {"mode": mode},
            "algorithm": {"kl": {"coef": 0.01}},
            "reference": {"placement": "colocated", "offload": True},
            "trainer": {"offload": True},
            "warmup": {"steps": 20, "rows_per_step": 32, "source": {"path": assets / "warmup.parquet"}},
            "checkpoint": {"every": 10},
        },
    )
    assert launch(config, watch, resume=False)
    return [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]


def names(row: dict[str, Any]) -> set[str]:
    """Without those of checkpoints, which are written beside the steps: their row depends on the disk."""
    return {name for name in row if not name.startswith("checkpoint/")}


def test_a_colocated_run_learns_what_the_split_run_does(assets: Path, tmp_path: Path) -> None:
    split, colocated = (rows(assets, tmp_path, mode)[1:] for mode in ("split", "colocated"))
    assert len(split) == len(colocated) == 20
    assert any(row["actor/grad_norm"] > 0 for row in split)
    for apart, together in zip(split, colocated, strict=True):
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"):
            assert together[name] == pytest.approx(apart[name], abs=1e-6)
        assert together["rollout_corr/logprob_diff_max"] < 1e-4
        assert names(together) - names(apart) == TIMES
