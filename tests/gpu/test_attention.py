"""Attention backends on a GPU, in its dtypes."""

import pytest
import torch

from tests.tree_layouts import CASES, check_dense


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", ["shared_prefix", "varlen", "flash"])
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_equals_dense_attention(gpu: torch.device, case: str, name: str, num_ranks: int) -> None:
    """Tolerance 1/50 of the largest: a few roundings to 8 bits, in scores, weights, outputs and their
    gradients."""
    if name == "flash":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    check_dense(name, num_ranks, CASES[case], gpu, torch.bfloat16, 1 / 50)
