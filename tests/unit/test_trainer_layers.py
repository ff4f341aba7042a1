"""The hand-written gradients against torch's norm and finite differences."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from atoll.trainer.megatron.layers import Replay, RMSNorm, silu_gate
from atoll.trainer.megatron.model import uses_transformer_engine


def test_transformer_engine_counts_if_its_part_for_pytorch_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not uses_transformer_engine()


def test_norm_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    torch.manual_seed(0)
    config = SimpleNamespace(params_dtype=torch.float32, sequence_parallel=True)
    norm = RMSNorm(config, hidden_size=6, eps=1e-3)  # type: ignore[arg-type]
    assert norm.weight.sequence_parallel
    torch.nn.init.normal_(norm.weight)
    # neither is contiguous in memory
    x = torch.randn(3, 4, 6).transpose(0, 1).requires_grad_()
    upstream = torch.randn(4, 3, 12)[..., ::2]
    got, expected = norm(x), torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-3)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    for grad, expected_grad in zip(
        torch.autograd.grad(got, (x, norm.weight), upstream),
        torch.autograd.grad(expected, (x, norm.weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=5e-6)


def test_norm_is_torchs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is one kernel; PyTorch's device without memory, which stands for a GPU here, splits it up."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("meta"))
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=False)
    norm = RMSNorm(config, hidden_size=6, eps=1e-3)  # type: ignore[arg-type]
    x = torch.empty(4, 1, 6, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with patch("atoll.trainer.megatron.layers.rms_norm", wraps=torch.nn.functional.rms_norm) as torchs:
        normed = norm(x)
    torchs.assert_called_once_with(x, (6,), norm.weight, 1e-3)
    assert (normed.shape, normed.dtype) == (x.shape, x.dtype)


def test_gate_equals_its_definition_and_its_gradient_is_exact() -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(5, 1, 8, dtype=torch.float64, requires_grad=True)
    gate, up = gate_up[..., :4], gate_up[..., 4:]
    torch.testing.assert_close(silu_gate(gate_up), gate / (1 + (-gate).exp()) * up, rtol=0, atol=1e-14)
    assert torch.autograd.gradcheck(silu_gate, (gate_up,))


def test_a_router_replays_what_is_recorded_and_chooses_the_rest() -> None:
    """Of rows that do not name two different experts of four, its own two count."""
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).repeat(5, 1).requires_grad_()
    routes = torch.tensor([[0, 2], [255, 255], [1, 1], [3, 4], [3, 0]], dtype=torch.uint8)
    chosen_scores, chosen = Replay(routes).get_replay_topk(
        scores, 2, None, None, lambda scores, topk, **_: scores.topk(topk)
    )
    assert chosen.tolist() == [[0, 2], [3, 2], [3, 2], [3, 2], [3, 0]]
    torch.testing.assert_close(chosen_scores[0], torch.tensor([0.1, 0.3]))
    chosen_scores.sum().backward()  # type: ignore[no-untyped-call]
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1, 0, 1, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [1, 0, 0, 1]]
    negative = torch.tensor([[-1, 2]], dtype=torch.int16)
    _, chosen = Replay(negative).get_replay_topk(scores[:1], 2, None, None, lambda s, k, **_: s.topk(k))
    assert chosen.tolist() == [[3, 2]]
