"""The supervised mode beside a plain transformers loop over the same rows: losses, rates, weights, resume."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from atoll.cli.launch.launcher import launch
from atoll.config.load import validate
from atoll.config.resolve import resolve
from atoll.config.schema import RunConfig
from atoll.runtime.clients.coordinator import CoordinatorClient
from tests.builders import NO_GPUS

pytestmark = [pytest.mark.long, pytest.mark.rerun_once]

STEPS, ROWS_PER_STEP, WARMUP_STEPS, RATE, WEIGHT_DECAY, MAX_NORM = 30, 6, 4, 3e-3, 0.1, 0.5
NUM_HELD_OUT = 5
NAMES = ("step", "actor/nll_loss", "actor/grad_norm", "actor/lr", "data/epoch")


def config(assets: Path, folder: Path, name: str) -> RunConfig:
    return resolve(
        validate(
            {
                "run": {"name": name, "dir": folder, "steps": STEPS, "mode": "supervised"},
                "model": {"path": assets / "model"},
                "data": {"train": [{"path": assets / "warmup.parquet"}], "shuffle": False},
                "coordinator": {"prompts_per_step": ROWS_PER_STEP},
                "trainer": {
                    "max_tokens_per_microbatch": 20,  # rows of 6 or 7 tokens: two or three of them
                    "optimizer": {
                        "learning_rate": RATE,
                        "weight_decay": WEIGHT_DECAY,
                        "max_grad_norm": MAX_NORM,
                        "schedule": "cosine",
                        "warmup_steps": WARMUP_STEPS,
                    },
                },
                "validation": {
                    "every": 10,
                    "sets": [
                        {"name": "sums", "path": assets / "validation.parquet", "max_prompts": NUM_HELD_OUT}
                    ],
                    "best": "sums/nll",
                },
                "checkpoint": {"every": 5},
            },
            "supervised",
        ),
        NO_GPUS,
    )


async def watch(client: CoordinatorClient) -> None:
    await asyncio.Event().wait()


async def stop_soon(client: CoordinatorClient) -> None:
    status = await client.status()
    while status.state != "training" or status.step < 1:  # the other steps take some seconds
        status = await client.status(status.revision)
    await client.stop_run()
    await asyncio.Event().wait()


def rows_of(config: RunConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]


Encode = Callable[[str], list[int]]


def mean_loss(model: torch.nn.Module, encode: Encode, rows: list[dict[str, Any]]) -> Tensor:
    """Over the response tokens of all rows, each row alone."""
    total, count = torch.zeros(()), 0
    for row in rows:
        prompt, response = encode(row["prompt"][0]["content"]), [*encode(row["response"]), 1]  # 1: <eos>
        ids = torch.tensor([prompt + response])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum")
        count += len(response)
    return total / count


def plain_loop(assets: Path) -> tuple[list[list[float]], dict[int, float], torch.nn.Module]:
    """Loss, gradient norm and rate of each step; the loss of the held-out rows after every tenth."""
    model = AutoModelForCausalLM.from_pretrained(assets / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    rows, held_out = (
        pq.read_table(assets / f"{name}.parquet").to_pylist() for name in ("warmup", "validation")
    )

    def encode(text: str) -> list[int]:
        return tokenizer(text)["input_ids"]

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, STEPS)
    steps, validated = [], {}
    for step in range(STEPS):
        batch = [rows[i % len(rows)] for i in range(step * ROWS_PER_STEP, (step + 1) * ROWS_PER_STEP)]
        loss = mean_loss(model, encode, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        # its warm-up is one step behind ours: see coordinator/schedule.py
        rate = RATE * (step + 1) / WARMUP_STEPS if step < WARMUP_STEPS else schedule.get_last_lr()[0]
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        steps.append([loss.item(), norm.item(), rate])
        if (step + 1) % 10 == 0:
            with torch.no_grad():
                validated[step + 1] = mean_loss(model, encode, held_out[:NUM_HELD_OUT]).item()
    return steps, validated, model


def test_a_supervised_run_is_a_plain_loop_that_can_be_resumed_and_exported(
    assets: Path, tmp_path: Path
) -> None:
    whole = config(assets, tmp_path, "whole")
    assert launch(whole, watch, resume=False)
    rows = rows_of(whole)
    assert {path.stem for path in (whole.folder / "logs").iterdir()} == {"coordinator", "actor-0"}

    steps, validated, model = plain_loop(assets)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    for row, (loss, norm, rate) in zip(rows[1:], steps, strict=True):
        # What rounding differs by, which depends on the processor, thirty steps of Adam amplify.
        is_early = row["step"] <= 3
        assert row["actor/nll_loss"] == pytest.approx(loss, abs=1e-5 if is_early else 2e-4)
        assert row["actor/grad_norm"] == pytest.approx(norm, rel=1e-4 if is_early else 2e-3)
        assert row["actor/lr"] == pytest.approx(rate)
    measured = {row["step"]: row["val/sums/nll"] for row in rows[1:] if "val/sums/nll" in row}
    assert measured == pytest.approx(validated, abs=2e-4)
    best = min(validated, key=lambda step: validated[step])
    summary = json.loads((whole.folder / "summary.json").read_text())
    assert summary["best"] == {"step": best, "value": measured[best]}

    broken = config(assets, tmp_path, "broken")
    assert launch(broken, stop_soon, resume=False)
    assert rows_of(broken)[-1]["step"] < STEPS
    assert launch(broken, watch, resume=True)
    assert [[row[name] for name in NAMES] for row in rows_of(broken)[1:]] == [
        [row[name] for name in NAMES] for row in rows[1:]
    ]

    command = [Path(sys.executable).with_name("atoll"), "export", whole.folder, "--out", tmp_path / "out"]
    subprocess.run(command, check=True, timeout=120)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(3, 43).view(2, 20)
    torch.testing.assert_close(exported(ids).logits, model(ids).logits, rtol=0, atol=1e-3)
