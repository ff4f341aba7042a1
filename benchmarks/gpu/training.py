"""One trainer rank with random weights: part 8."""

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from atoll.config.schema import TrainerSection
from atoll.runtime.memory import rank_memory
from atoll.runtime.model_spec import read_spec
from atoll.trainer.megatron.forward import Budget
from atoll.trainer.megatron.model import ModelSettings
from atoll.trainer.offload import MemoryKind, ModelOffloader
from atoll.trainer.step import Learner
from atoll.wire.types import StepKey
from benchmarks.gpu.report import Row
from benchmarks.gpu.timing import milliseconds
from benchmarks.updates import OPTIMIZER, Work, build_learner, draw_work, join_alone, to_batch

CUDA = torch.device("cuda")
PEAK_FLOPS = 989e12  # of an H100 SXM in bfloat16, without sparsity
QWEN_1_5B = Qwen2Config(
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 16, 512, 224  # 16,384 tokens
STEPS = 3


def update(
    device: torch.device = CUDA,
    model: Qwen2Config = QWEN_1_5B,
    response_tokens: int = RESPONSE_TOKENS,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Row]:
    """Speed, host-device synchronisations, kernels, memory beside its estimate, and off-loading."""
    work = draw_work(
        np.random.default_rng(0),
        model.vocab_size,
        np.full(PROMPTS, PROMPT_TOKENS),
        np.full((PROMPTS, SAMPLES), response_tokens),
    )
    num_tokens = PROMPTS * (PROMPT_TOKENS + SAMPLES * response_tokens)
    join_alone()
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(Path(name), model, device)
        settings = ModelSettings(dtype, recompute="selective")
        learner = build_learner(folder, "shared_prefix", settings, Budget(num_tokens, num_tokens))
        spec = read_spec(folder)
    assert {parameter.device.type for parameter in learner.model.parameters} == {device.type}
    num_parameters = sum(parameter.numel() for parameter in learner.model.parameters)
    yield Row("parameters, tokens of an update", f"{num_parameters:,}, {num_tokens:,}")

    for number in range(STEPS):
        took = milliseconds(lambda number=number: _step(learner, work, number), device)  # type: ignore[misc]
        rate = num_tokens / took * 1e3
        share = 6 * num_parameters * rate / PEAK_FLOPS
        yield Row(f"update {number}", f"{took:,.0f} ms, {rate:,.0f} tokens/s, {share:.1%} of 989 TFLOP/s")
    print(_profile(learner, work), flush=True)
    if device.type == "cuda":
        section = TrainerSection(
            dtype="bfloat16", recompute="selective", max_tokens_per_microbatch=num_tokens
        )
        estimate = rank_memory(spec, section, 0, "update").total
        yield Row(
            "peak memory, its estimate",
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f}, {estimate / 2**30:.1f} GiB",
        )
        yield Row("synchronisations in an update", str(_synchronisations(learner, work)))

    offloader = ModelOffloader(learner.model, learner)
    for attempt in ("first", "second"):  # the first one pins the memory
        freed = 0

        def away() -> None:
            nonlocal freed
            freed = offloader.offload()

        there = milliseconds(away, device)
        back = milliseconds(lambda: offloader.onload(*MemoryKind), device)
        speeds = f"{freed / there / 1e6:.1f} GB/s there, {freed / back / 1e6:.1f} GB/s back"
        yield Row(f"off-load, {attempt}", f"{freed / 2**30:.2f} GiB, {speeds}")


def write_random_model(folder: Path, config: Qwen2Config, device: torch.device) -> Path:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def _step(learner: Learner, work: Work, number: int) -> None:
    key = StepKey("benchmark", number, 0, "actor")
    learner.forward_backward(key, to_batch(work))
    learner.optim_step(key, OPTIMIZER.learning_rate)


def _profile(learner: Learner, work: Work) -> str:
    """The 30 operations that take most of one update."""
    with torch.profiler.profile() as profile:
        _step(learner, work, STEPS)
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=by, row_limit=30))


def _synchronisations(learner: Learner, work: Work) -> int:
    """Waits of the host for the GPU that PyTorch knows of."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _step(learner, work, STEPS + 1)
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)
