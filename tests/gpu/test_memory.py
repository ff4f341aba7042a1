"""Memory freed by offloading on a GPU, and saved by chunked log-probabilities and recomputation."""

from collections.abc import Callable
from pathlib import Path

import torch

from atoll.config.schema import ParallelConfig
from atoll.trainer.losses.logprobs import token_logprobs
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.offload import MemoryKind, ModelOffloader
from tests.integration.test_trainer_memory import ADAMW, BF16, batch, key
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

VOCABULARY, TOKENS, HIDDEN = 151_936, 16_384, 896  # Qwen2.5-0.5B's


def peak_bytes(function: Callable[[], torch.Tensor]) -> int:
    """Of a forward and backward pass, beyond the memory in use before."""
    function().backward()  # kernels are chosen and compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    assert result.is_cuda
    result.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare_logprobs() -> tuple[int, int]:
    initialize_parallel(ParallelConfig())
    generator = torch.Generator("cuda").manual_seed(0)
    hidden_NH = torch.randn(TOKENS, HIDDEN, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight_VH = torch.randn(VOCABULARY, HIDDEN, device="cuda", generator=generator).bfloat16() / HIDDEN**0.5
    weight_VH.requires_grad_()
    targets_N = torch.randint(VOCABULARY, (TOKENS,), device="cuda", generator=generator)
    # both gradients are allocated before either is measured, so the comparison excludes them
    hidden_NH.grad, weight_VH.grad = torch.zeros_like(hidden_NH), torch.zeros_like(weight_VH)

    def naive() -> torch.Tensor:
        logits_NV = (hidden_NH @ weight_VH.T).float()
        return logits_NV.log_softmax(-1).gather(-1, targets_N[:, None]).sum()

    def chunked() -> torch.Tensor:
        return token_logprobs(hidden_NH, weight_VH, targets_N, 1.0, torch.distributed.group.WORLD)[0].sum()

    torch.testing.assert_close(chunked(), naive(), rtol=1e-3, atol=0)
    return peak_bytes(chunked), peak_bytes(naive)


def test_chunked_logprobs_take_an_eighth_of_the_memory() -> None:
    """Times are in `python -m benchmarks.gpu --only 6`."""
    chunked, naive = run_ranks(compare_logprobs, 1)[0]
    gradients = 2 * (VOCABULARY + TOKENS) * HIDDEN + 4 * TOKENS * HIDDEN  # of both inputs; the latter's sum
    assert chunked - gradients <= naive / 8  # two chunks of logits, against three times the nine of them all


def check_offload(folder: Path) -> None:
    initialize_parallel(ParallelConfig())
    before = torch.cuda.memory_allocated()
    learner = policy_learner(policy_forward(folder, settings=BF16), ADAMW)
    assert all(parameter.is_cuda for parameter in learner.model.parameters)
    learner.forward_backward(key(0), batch(0))
    learner.optim_step(key(0), 1e-4)
    memory, held = ModelOffloader(learner.model, learner), torch.cuda.memory_allocated()
    freed = memory.offload()
    assert held - torch.cuda.memory_allocated() >= freed > 0.9 * (held - before)
    memory.onload(*MemoryKind)
    assert torch.cuda.memory_allocated() >= held


def test_offload_frees_the_device(tiny_qwen2: Path) -> None:
    """The assertions are in check_offload."""
    run_ranks(check_offload, 1, tiny_qwen2)


def check_recomputation(folder: Path) -> None:
    initialize_parallel(ParallelConfig())
    peaks = []
    for recompute in ("none", "selective", "full"):
        settings = ModelSettings(torch.bfloat16, recompute=recompute)
        learner = policy_learner(policy_forward(folder, 100_000, settings=settings), ADAMW)
        assert all(parameter.is_cuda for parameter in learner.model.parameters)
        learner.forward_backward(key(0), batch(0))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        learner.forward_backward(key(1), batch(1))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] > peaks[1] > peaks[2]


def test_recomputation_lowers_the_peak(tiny_qwen2: Path) -> None:
    """The assertions are in check_recomputation."""
    run_ranks(check_recomputation, 1, tiny_qwen2)
