"""How many bfloat16 weights an update changes, and what a delta of them takes, by learning rate.

A Qwen2 of 29 million parameters with the initial weights of large models (standard deviation 0.02), the
trainer's own update (AdamW with float32 copies), policy gradients of random tokens with random advantages:
almost noise, as those of a real run are.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from atoll.config.schema import OptimizerConfig
from atoll.runtime.model_spec import read_spec
from atoll.trainer.losses.loss import ppo_clip
from atoll.trainer.megatron import cpu_compat
from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.forward import Forward
from atoll.trainer.megatron.hf import load_model
from atoll.trainer.megatron.model import ModelSettings
from atoll.trainer.megatron.shards import shard_layout
from atoll.trainer.objective import PolicyObjective, PolicySettings
from atoll.trainer.step import Learner
from atoll.weights.delta import decode, encode
from atoll.wire.types import PolicyBatch, StepKey
from benchmarks.updates import BUDGET, CLIP, join_alone, short_work, to_batch

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
STEPS = (1, 10)  # AdamW's first moves every weight by the learning rate; later ones by less
PART_ELEMENTS = 16 << 20
MODEL = Qwen2Config(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def run() -> dict[str, Any]:
    """By learning rate and step: share of weights that changed, bytes over full bytes, GB/s of full bytes."""
    command = [sys.executable, "-m", "benchmarks.weight_delta"]  # a rank lives in a process of its own
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return answer


def measured() -> dict[str, Any]:
    torch.set_num_threads(1)
    join_alone()
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODEL).save_pretrained(name)  # type: ignore[no-untyped-call]
        return {f"lr_{rate:g}": _train(Path(name), rate) for rate in LEARNING_RATES}


def _train(folder: Path, learning_rate: float) -> dict[str, Any]:
    with cpu_compat.apply():
        model = load_model(folder, read_spec(folder), ModelSettings())
        forward = Forward(model, BUDGET, BACKENDS["shared_prefix"], temperature=1.0)
        objective = PolicyObjective(forward, PolicySettings(partial(ppo_clip, clip_low=CLIP, clip_high=CLIP)))
        optimizer = OptimizerConfig(learning_rate=learning_rate)
        learner = Learner("actor", forward, {PolicyBatch: objective}, optimizer)
    _, buffers = shard_layout(model)
    rng, found = np.random.default_rng(0), {}
    for step in range(1, max(STEPS) + 1):
        old = torch.cat([buffer.bfloat16() for buffer in buffers])
        key = StepKey("benchmark", step, 0, "actor")
        learner.forward_backward(key, to_batch(short_work(rng)))
        learner.optim_step(key, learning_rate)
        if step in STEPS:
            found[f"step_{step}"] = _compare(old, torch.cat([buffer.bfloat16() for buffer in buffers]))
    return found


def _compare(old: torch.Tensor, new: torch.Tensor) -> dict[str, float]:
    """In parts, as they travel; one that is not worth a delta counts in full."""
    num_bytes, encode_s, decode_s = 0, 0.0, 0.0
    for begin in range(0, len(new), PART_ELEMENTS):
        old_N, new_N = old[begin:][:PART_ELEMENTS], new[begin:][:PART_ELEMENTS]
        delta, seconds = _timed(partial(encode, old_N, new_N))
        encode_s += seconds
        num_bytes += new_N.nbytes if delta is None else len(delta)
        if delta is not None:
            into = old_N.clone()
            decode_s += _timed(partial(decode, delta, into))[1]
            assert torch.equal(into.view(torch.int16), new_N.view(torch.int16))
    return {
        "share_changed": (old.view(torch.int16) != new.view(torch.int16)).double().mean().item(),
        "bytes_to_full": num_bytes / new.nbytes,
        "encode_gb_per_s": new.nbytes / encode_s / 1e9,
        "decode_gb_per_s": new.nbytes / decode_s / 1e9 if decode_s else 0.0,
    }


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return action(), time.perf_counter() - started


if __name__ == "__main__":
    print(json.dumps(measured()))
