"""Updates in bfloat16 on a GPU against a transformers loop on it: the CPU test on another device."""

from pathlib import Path

import pytest
import torch

from atoll.config.schema import ParallelConfig
from atoll.trainer.megatron.model import initialize_parallel
from tests.integration.test_trainer_memory import ADAMW, BF16, check_half_precision, plain_loop
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner


def test_bfloat16_updates_equal_a_plain_loop(tiny_qwen2: Path) -> None:
    """The assertions are in check_half_precision."""
    half, single = (plain_loop(tiny_qwen2, dtype, "cuda") for dtype in (torch.bfloat16, torch.float32))
    assert run_ranks(check_half_precision, 1, tiny_qwen2, half, single, 1) == ["cuda"]


def optimizer_class(folder: Path) -> str:
    initialize_parallel(ParallelConfig())
    learner = policy_learner(policy_forward(folder, settings=BF16), ADAMW)
    assert all(parameter.is_cuda for parameter in learner.model.parameters)
    return type(learner.optimizer.chained_optimizers[0].optimizer).__name__


def test_transformer_engine_brings_its_optimizer(tiny_qwen2: Path) -> None:
    """With it, the test above compares FusedAdam with torch.optim.AdamW."""
    pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
    assert run_ranks(optimizer_class, 1, tiny_qwen2) == ["FusedAdam"]
