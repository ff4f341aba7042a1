"""Pushes from a trainer fleet to real SGLang servers, of one rank and of two, and to a `local` replica.

The services run in SGLang's environment, this test and the trainer in the main one.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from atoll.config.schema import ParallelConfig
from atoll.wire.types import ServiceEntry
from tests.trainer_fleet import Fleet, fleet, update
from tests.weight_pushes import (
    LOCAL,
    Rollouts,
    assert_hold,
    check_kill,
    check_layout,
    connected,
    push,
    rollouts,
)

pytestmark = pytest.mark.long

PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"


def sglang(tp_size: int) -> dict[str, object]:
    settings = {"device": "cpu", "tp_size": tp_size, "log_level": "error", "max_total_tokens": 8192}
    return {"engine": "sglang", "python": PYTHON, "sglang": settings}


LAYOUTS = (
    ParallelConfig(),
    ParallelConfig(data=2),
    ParallelConfig(pipeline=2),
    ParallelConfig(tensor=2, sequence=True, pipeline=2),
    ParallelConfig(tensor=2),
)


def test_push(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Pushes to all three at once, from every layout; in the end an SGLang replica dies."""
    with rollouts(tmp_path, tiny_qwen3) as services:
        entries = services.start({"rollout-0": LOCAL, "rollout-1": sglang(1), "rollout-2": sglang(2)})
        for number, layout in enumerate(LAYOUTS):
            folder = tmp_path / str(number)
            folder.mkdir()
            with fleet(folder, tiny_qwen3, layout) as running:
                asyncio.run(check_layout(running, entries, tiny_qwen3, folder, layout))
                if layout is LAYOUTS[-1]:
                    asyncio.run(kill(running, services, entries, tiny_qwen3, folder))


def test_push_of_experts(tmp_path: Path, tiny_qwen3_moe: Path) -> None:
    layout = ParallelConfig(expert=2, data=2)
    with (
        rollouts(tmp_path, tiny_qwen3_moe) as services,
        fleet(tmp_path, tiny_qwen3_moe, layout) as running,
    ):
        entries = services.start({"rollout-0": sglang(1), "rollout-1": LOCAL})
        asyncio.run(check_layout(running, entries, tiny_qwen3_moe, tmp_path, layout))


def test_push_of_adapters(tmp_path: Path, tiny_qwen3: Path) -> None:
    """Only adapters are pushed; replicas compute the same as the trainer's merged model."""
    layout = ParallelConfig(tensor=2)
    lora = {"rank": 4, "alpha": 6.0, "push": "adapter"}
    trainer = {"parallel": layout, "max_tokens_per_microbatch": 32, "lora": lora}
    with (
        rollouts(tmp_path, tiny_qwen3, trainer) as services,
        fleet(tmp_path, tiny_qwen3, layout, trainer=trainer) as running,
    ):
        entries = services.start({"rollout-0": sglang(2), "rollout-1": LOCAL})
        asyncio.run(check_layout(running, entries, tiny_qwen3, tmp_path, layout))


def test_push_in_bfloat16(tmp_path: Path, tiny_qwen3: Path) -> None:
    """The trainer's weights are float32; they are pushed in the replicas' dtype, as `cast` asserts."""
    bf16 = {"dtype": "bfloat16"}
    with rollouts(tmp_path, tiny_qwen3) as services, fleet(tmp_path, tiny_qwen3, ParallelConfig()) as running:
        entries = services.start({"rollout-0": sglang(1) | bf16, "rollout-1": LOCAL | bf16})
        asyncio.run(cast(running, entries, tiny_qwen3, tmp_path))


async def cast(running: Fleet, entries: Sequence[ServiceEntry], model: Path, folder: Path) -> None:
    async with connected(running, entries, model, finish_running=False, dtype=torch.bfloat16) as run:
        await update(run.trainer, 0)
        report = await run.sync.push(run.version(1))
        assert (report.failed, report.num_replicas) == ({}, 2)
        await run.trainer.export_hf(folder / "exported")
        await assert_hold(run.members, folder / "exported", run.version(1), torch.bfloat16)


async def kill(
    running: Fleet, services: Rollouts, entries: Sequence[ServiceEntry], model: Path, folder: Path
) -> None:
    async with connected(running, entries, model, finish_running=False) as run:
        await push(run, 1)
        await check_kill(run, services, folder / "3", 3)
