"""Chunked logprobs and entropy against the naive computation on whole logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.trainer.losses.kl import full_kl
from atoll.trainer.losses.logprobs import CHUNK_LOGITS, token_logprobs
from tests.torch_ranks import run_ranks


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def random_policy(vocabulary: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [7, 5], output weight [vocabulary, 5], targets [7]."""
    torch.manual_seed(0)
    hidden = (3 * torch.randn(7, 5, dtype=torch.float64)).requires_grad_()
    weight = torch.randn(vocabulary, 5, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(vocabulary, (7,))


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    table = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return table[torch.arange(len(targets)), targets], -(table.exp() * table).sum(-1)


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


# what the loss is made of: upstream factors of the logprobs and of the entropy, 0: not differentiated
@pytest.mark.parametrize("factors", [(1, 0), (0, 1), (1, -0.3)])
@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_naive_ones(
    alone: dist.ProcessGroup, rows: int, temperature: float, factors: tuple[float, float]
) -> None:
    hidden, weight, targets = random_policy()
    upstream = torch.randn(2, 7, dtype=torch.float64)

    def gradients(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        terms = [f * (x @ u) for f, x, u in zip(factors, outputs, upstream, strict=True) if f]
        return torch.autograd.grad(torch.stack(terms).sum(), (hidden, weight))

    expected = naive(hidden, weight, targets, temperature)
    got = token_logprobs(hidden, weight, targets, temperature, alone, chunk_logits=11 * rows)
    for ours, theirs in zip((*got, *gradients(got)), (*expected, *gradients(expected)), strict=True):
        assert_close(ours, theirs)


def test_a_weight_that_does_not_learn_gets_no_gradient_and_changes_none(alone: dist.ProcessGroup) -> None:
    hidden, weight, targets = random_policy()
    frozen = weight.detach()
    (expected,) = torch.autograd.grad(naive(hidden, weight, targets, 0.7)[0].sum(), hidden)
    (got,) = torch.autograd.grad(token_logprobs(hidden, frozen, targets, 0.7, alone, 33)[0].sum(), hidden)
    assert_close(got, expected)


def test_gradients_equal_finite_differences(alone: dist.ProcessGroup) -> None:
    hidden, weight, targets = random_policy()
    assert gradcheck(
        lambda h, w: token_logprobs(h, w, targets, 0.7, alone, chunk_logits=33), (hidden, weight)
    )


def test_an_entropy_that_is_not_differentiated_has_no_part_in_the_gradient(alone: dist.ProcessGroup) -> None:
    # logits 0, 0 and -inf: probabilities 1/2, 1/2, 0, while 0 * log 0 leaves the entropy without a value
    weight = torch.tensor([[0.0], [0.0], [-torch.inf]], requires_grad=True)
    logprobs, entropy = token_logprobs(torch.ones(1, 1), weight, torch.tensor([0]), 1.0, alone)
    logprobs.sum().backward()
    assert entropy.isnan()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0.5], [-0.5], [0]]


def test_large_logits_do_not_overflow(alone: dist.ProcessGroup) -> None:
    hidden = torch.full((1, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]), 1.0, alone)
    assert logprobs.item() == -1e4
    assert entropy.item() == 0
    entropy.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.item() == 0  # of a word that never comes, p (log p + H) is 0


def test_no_tokens(alone: dist.ProcessGroup) -> None:
    hidden, weight = torch.zeros(0, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    logprobs, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, alone)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0]] * 3


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, without those of logits: of matrices without a dimension of
    `hidden_size`."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or func is torch.ops.aten.empty_like.default):  # type: ignore[attr-defined]
            self.nbytes += sum(
                leaf.nbytes
                for leaf in tree_leaves((args, result))  # what `out` names is the result
                if isinstance(leaf, Tensor) and (leaf.dim() < 2 or self._hidden_size in leaf.shape)
            )
        return result


def test_a_chunk_moves_no_more_bytes_than_the_weight_has(alone: dist.ProcessGroup) -> None:
    """On a GPU, in bfloat16, emulated by PyTorch's device without memory: Qwen2.5-0.5B, 16,384 tokens."""
    num_tokens, vocabulary, size = 16_384, 151_936, 896
    hidden = torch.empty(num_tokens, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(vocabulary, size, dtype=torch.bfloat16, device="meta", requires_grad=True)
    targets = torch.empty(num_tokens, dtype=torch.long, device="meta")
    with Traffic(size) as forward:
        logprobs, _ = token_logprobs(hidden, weight, targets, 1.0, alone)
    with Traffic(size) as backward:
        logprobs.sum().backward()
    rows, columns = CHUNK_LOGITS // vocabulary, CHUNK_LOGITS // num_tokens
    assert forward.nbytes / -(-num_tokens // rows) < 1.2 * weight.nbytes
    assert backward.nbytes / -(-vocabulary // columns) < 1.2 * weight.nbytes


def test_vocabulary_split_over_two_ranks() -> None:
    """The assertions are in _check_split_vocabulary, on both ranks."""
    run_ranks(_check_split_vocabulary, 2)


def _check_split_vocabulary() -> None:
    """Of logprobs, entropy and the full KL, the latter here so that the ranks start once."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    hidden, weight, targets = random_policy(vocabulary=12)
    targets[:2] = torch.tensor([5, 6])  # both sides of the cut
    ref_hidden, ref_weight = torch.randn(7, 4, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    upstream = torch.randn(3, 7, dtype=torch.float64)
    share = slice(6 * group.rank(), 6 * group.rank() + 6)
    own = weight.detach()[share].requires_grad_()

    def ours(h: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropy = token_logprobs(h, w, targets, 0.7, group, chunk_logits=18)
        return logprobs, entropy, full_kl(h, w, ref_hidden, ref_weight[share], 0.7, group, chunk_logits=36)

    logq = torch.log_softmax(ref_hidden @ ref_weight.T / 0.7, -1)
    logp = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    expected = (*naive(hidden, weight, targets, 0.7), (logp.exp() * (logp - logq)).sum(-1))
    got = ours(hidden, own)
    assert_close(torch.stack(got), torch.stack(expected))
    for mine, theirs, u in zip(got, expected, upstream, strict=True):
        grad_hidden, grad_own = torch.autograd.grad(mine @ u, (hidden, own), retain_graph=True)
        expected_hidden, expected_weight = torch.autograd.grad(
            theirs @ u, (hidden, weight), retain_graph=True
        )
        assert_close(grad_hidden, expected_hidden)
        assert_close(grad_own, expected_weight[share])
    # of the hidden states alone: they are what both ranks can move at the same time
    assert gradcheck(lambda h: ours(h, own.detach()), hidden)
    dist.destroy_process_group()
