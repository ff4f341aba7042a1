"""Chunked logprobs against the naive computation on whole logits."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from services.trainer.logprobs import token_logprobs


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_naive_ones(
    alone: dist.ProcessGroup, rows: int, temperature: float
) -> None:
    torch.manual_seed(0)
    hidden = (3 * torch.randn(7, 5, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (7,))
    upstream = torch.randn(7, dtype=torch.float64)

    table = torch.log_softmax(hidden @ weight.T / temperature, -1)
    naive = table[torch.arange(7), targets]
    expected = torch.autograd.grad(naive @ upstream, (hidden, weight))

    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature, alone, chunk_logits=11 * rows)
    got = torch.autograd.grad(logprobs @ upstream, (hidden, weight))

    torch.testing.assert_close(logprobs, naive, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1), rtol=0, atol=1e-12)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_large_logits_do_not_overflow(alone: dist.ProcessGroup) -> None:
    hidden = torch.full((1, 1), 1e4)
    logprobs, entropy = token_logprobs(hidden, torch.tensor([[1.0], [0.0]]), torch.tensor([1]), 1.0, alone)
    assert logprobs.item() == -1e4
    assert entropy.item() == 0


def test_no_tokens(alone: dist.ProcessGroup) -> None:
    hidden, weight = torch.zeros(0, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, alone)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0]] * 3
