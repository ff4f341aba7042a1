"""Trainer ranks as processes of their own, as the launcher starts them, and batches for them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atoll.config.load import write_resolved
from atoll.config.schema import ParallelConfig
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.ports import reserve_port
from atoll.wire.types import PolicyBatch, Segments, StepKey
from tests.builders import run_config

TEMPERATURE = 0.5


@dataclass
class Fleet:
    ranks: list[subprocess.Popen[bytes]]
    logs: list[Path]
    address: str


@contextmanager
def fleet(
    folder: Path, model: Path, parallel: ParallelConfig, role: str = "actor", **tables: Mapping[str, Any]
) -> Iterator[Fleet]:
    """They serve alone: no coordinator knows of them."""
    section = {"parallel": parallel, "max_tokens_per_microbatch": 32}
    sections: dict[str, Any] = {
        "run": {"dir": folder.parent, "name": folder.name},
        "model": {"path": model},
        "rollout": {"sampling": {"temperature": TEMPERATURE}},
        "trainer" if role == "actor" else role: section,
    }
    config = run_config(**sections | tables)
    write_resolved(config, folder / "config.json")
    ranks, logs, ready, stack = [], [], [], ExitStack()
    port = stack.enter_context(reserve_port())
    try:
        for rank in range(parallel.world_size):
            read_end, write_end = os.pipe()
            logs.append(folder / f"{role}-{rank}.log")
            with logs[-1].open("ab") as log:
                ranks.append(
                    subprocess.Popen(
                        [
                            *(sys.executable, "-m", "atoll.trainer", "--config", folder / "config.json"),
                            *("--role", role, "--name", f"{role}-{rank}"),
                            *("--ready-fd", str(write_end)),
                        ],
                        stdout=log,
                        stderr=log,
                        pass_fds=(write_end,),
                        env=os.environ
                        | {"RANK": str(rank), "WORLD_SIZE": str(parallel.world_size), "OMP_NUM_THREADS": "1"}
                        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
                    )
                )
            os.close(write_end)
            ready.append(read_end)
        lines = [read_line(fd) for fd in ready]
        assert all(lines), "\n".join(log.read_text() for log in logs)
        yield Fleet(ranks, logs, json.loads(lines[0])["address"])
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for fd in ready:
            os.close(fd)
        stack.close()


def read_line(fd: int) -> bytes:
    """Up to the newline, or nothing if the process died."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, 1000)
        if not data:
            break
        line += data
    return line


def key(step: int, role: str = "actor") -> StepKey:
    return StepKey("a3f0", step, 0, role)


def batch(seed: int) -> PolicyBatch:
    """Three groups: a prompt of 4 tokens and two responses of 3."""
    rng = np.random.default_rng(seed)
    lengths = [4, 3, 3] * 3
    is_response = np.repeat(np.array([False, True, True] * 3), lengths)
    segments = Segments(
        rng.integers(3, 64, sum(lengths)).astype(np.int32),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.array([-1, 0, 0, -1, 3, 3, -1, 6, 6], np.int32),
        np.repeat(np.arange(3, dtype=np.int32), 3),
    )
    return PolicyBatch(
        segments,
        samples=np.repeat(np.array([-1, 0, 1, -1, 2, 3, -1, 4, 5], np.int32), lengths),
        loss_weights=np.where(is_response, 1 / 18, 0).astype(np.float32),
        advantages=rng.normal(size=sum(lengths)).astype(np.float32),
        rollout_logprobs=np.where(is_response, -4, 0).astype(np.float32),
        old_logprobs=None,
        ref_logprobs=None,
    )


async def update(client: TrainerClient, step: int) -> float:
    metrics = await client.forward_backward(key(step), batch(step))
    await client.optim_step(key(step), 1e-2)
    return metrics["actor/pg_loss"] + metrics["actor/entropy"]
