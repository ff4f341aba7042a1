"""A weight push to a real SGLang server of 256 MiB on a CPU, beside one thread's memory copy."""

import asyncio
import os
import secrets
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from atoll.cli.plan_weights import trainer_shard_layouts
from atoll.cli.tasks.arithmetic import build_arithmetic
from atoll.config.load import TOKEN
from atoll.config.schema import ParallelConfig
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.model_spec import read_spec
from benchmarks.weight_push import Pusher, Worker, Writer, flat, interleaved

PYTHON = Path(".venv-sglang/bin/python")  # made by `make test-sglang`
MODEL = Qwen3Config(
    vocab_size=64,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=5,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=False,
)


def run(rounds: int) -> dict[str, Any]:
    """As weight_push.run. Empty where there is no environment with SGLang."""
    if not PYTHON.exists():
        return {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_arithmetic(folder, seed=0)  # for its tokenizer
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODEL).save_pretrained(folder / "model")  # type: ignore[no-untyped-call]
        command = [str(PYTHON), "-m", "benchmarks.sglang_replica", str(folder / "model")]
        token = secrets.token_urlsafe()
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {TOKEN: token},
        ) as server:
            assert server.stdin
            assert server.stdout
            try:
                return asyncio.run(_push(folder / "model", server.stdout.readline().strip(), token, rounds))
            finally:
                server.stdin.close()


async def _push(folder: Path, address: str, token: str, rounds: int) -> dict[str, Any]:
    shard_layout, num_bytes = flat(trainer_shard_layouts(read_spec(folder), ParallelConfig())[0])
    writer = Worker(0, Writer, num_bytes, "shm")
    try:
        client = RolloutClient(address, Caller(fence=1, token=token), timeout_s=60)
        pusher = Pusher(writer, shard_layout, {client: (await client.info()).shard_layouts}, "shm")
        actions = {"memcpy": lambda: writer("memcpy"), "push": pusher.push}
        measured = await interleaved(actions, rounds, [writer], lambda: writer("train"))
        return {"bytes": num_bytes, **measured, "stall_s": pusher.stall_s}
    finally:
        writer.close()
