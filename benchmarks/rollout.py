"""Decoding by the local engine beside `transformers.generate`, on the work of the quickstart.

Interleaved in one process on one thread, in CPU seconds of the whole process: prompts of 6 tokens,
8 forced new tokens, sampled at temperature 1. "groups" are 16 prompts with 8 samples each; the engine
also returns logprobs and text, transformers only tokens.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from atoll.cli.tasks.arithmetic import build_arithmetic
from atoll.rollout.engines.local import LocalEngine
from atoll.weights.transport import shm
from atoll.wire.types import GroupId, SampleId, Sampling, TurnId, TurnRequest, Version

PROMPT_TOKENS, NEW_TOKENS = 6, 8
FIRST_TOKEN, VOCAB_SIZE = 3, 64  # below: special tokens
WORK = {"batch_1": (1, 1), "batch_16": (16, 1), "batch_128": (128, 1), "groups_16x8": (16, 8)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def run(rounds: int = 9) -> dict[str, Any]:
    """Tokens per CPU second of both, and the ratio: medians over `rounds`, per dtype and kind of work."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        build_arithmetic(Path(folder), seed=0)
        return {dtype: asyncio.run(_run(Path(folder) / "model", dtype, rounds)) for dtype in DTYPES}


async def _run(model: Path, dtype: str, rounds: int) -> dict[str, dict[str, float]]:
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[dtype])
    ours = LocalEngine(
        model,
        dtype=DTYPES[dtype],
        slots=128,
        max_length=16,
        version=Version("", 0),
        receiver=shm.ShmReceiver(),
    )
    try:
        return {
            name: await _compare(ours, theirs, num_prompts, num_samples, rounds)
            for name, (num_prompts, num_samples) in WORK.items()
        }
    finally:
        await ours.close()


async def _compare(
    ours: LocalEngine, theirs: Any, num_prompts: int, num_samples: int, rounds: int
) -> dict[str, float]:
    num_tokens = num_prompts * num_samples * NEW_TOKENS
    repeats = max(1, 8 // (num_prompts * num_samples))  # of one timing: tens of milliseconds
    timings = []
    for number in range(rounds + 1):
        prompts = np.random.default_rng(number).integers(
            FIRST_TOKEN, VOCAB_SIZE, (num_prompts, PROMPT_TOKENS)
        )

        async def local(prompts: np.ndarray = prompts, seed: int = number) -> None:
            sampling = Sampling(NEW_TOKENS, seed=seed)
            requests = [
                TurnRequest(
                    tuple(TurnId(SampleId(GroupId("bench", 0, row), i), 0) for i in range(num_samples)),
                    prompt.astype(np.int32),
                    sampling,
                )
                for row, prompt in enumerate(prompts)
            ]
            async for _ in ours.generate(requests):
                pass

        async def transformers(prompts: np.ndarray = prompts) -> None:
            input_ids = torch.from_numpy(prompts)
            theirs.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=True,
                top_k=0,
                num_return_sequences=num_samples,
                eos_token_id=None,
                pad_token_id=0,
            )

        timings.append([await _cpu_seconds(side, repeats) for side in (local, transformers)])
    local_s, transformers_s = zip(*timings[1:], strict=True)  # the first round warms up
    return {
        "local_tokens_per_cpu_s": num_tokens / median(local_s),
        "transformers_tokens_per_cpu_s": num_tokens / median(transformers_s),
        "ratio": median(t / s for s, t in zip(local_s, transformers_s, strict=True)),
    }


async def _cpu_seconds(work: Callable[[], Awaitable[None]], repeats: int) -> float:
    started = time.process_time()
    for _ in range(repeats):
        await work()
    return (time.process_time() - started) / repeats
