"""KL estimators against numbers worked by hand; the full divergence against whole logits."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

from atoll.trainer.losses.kl import full_kl, kl_penalty


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


# probabilities 1/2 and 1/4 of the policy, 1/4 and 1/2 of the reference: x = log 2 = 0.6931 and -log 2
#   k2: 0.6931^2 / 2 = 0.2402
#   k3: 1/2 + 0.6931 - 1 = 0.1931 and 2 - 0.6931 - 1 = 0.3069
# x = -5 and 30: k3 would be e^5 - 6 = 142 and, x at most 20, e^-20 + 19: both 10
# x = -1000: e^1000 is no number of 64 bits, and no gradient may come from it
LOG2 = math.log(2)
BY_HAND = {
    "k1": [LOG2, -LOG2, -5, 30, -1000],
    "abs": [LOG2, LOG2, 5, 30, 1000],
    "k2": [LOG2**2 / 2, LOG2**2 / 2, 12.5, 450, 500_000],
    "k3": [LOG2 - 0.5, 1 - LOG2, 10, 10, 10],
}
# of x: 1, the sign, x, and 1 - e^-x where k3 is within its bounds
GRADIENTS = {
    "k1": [1, 1, 1, 1, 1],
    "abs": [1, -1, -1, 1, -1],
    "k2": [LOG2, -LOG2, -5, 30, -1000],
    "k3": [0.5, -1, 0, 0, 0],
}


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "k3+"])
def test_estimators_by_hand(estimator: str) -> None:
    reference = torch.tensor([0.25, 0.5, 0.1, 1e-20, 0.1], dtype=torch.float64).log()
    x = torch.tensor(BY_HAND["k1"], dtype=torch.float64)
    logprobs = (reference + x).requires_grad_()
    kl = kl_penalty(logprobs, reference, estimator)
    (grad,) = torch.autograd.grad(kl.sum(), logprobs)
    plain = estimator.removesuffix("+")
    assert kl.tolist() == pytest.approx(BY_HAND[plain], abs=1e-12)
    assert grad.tolist() == pytest.approx(GRADIENTS["k2" if plain != estimator else plain], abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_estimator_gradients_equal_finite_differences(estimator: str) -> None:
    torch.manual_seed(0)
    reference, difference = torch.randn(2, 20, dtype=torch.float64)
    difference += difference.sign() * 0.1  # away from where |x| has no gradient
    logprobs = (reference + difference).requires_grad_()
    assert gradcheck(lambda x: kl_penalty(x, reference, estimator), logprobs)


def test_what_the_estimators_estimate() -> None:
    """Mean over all tokens by probability: k1 and k3 are the KL, k2 has the gradient of the KL."""
    torch.manual_seed(0)
    logits, other = torch.randn(2, 6, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, reference = logits.log_softmax(-1), other.log_softmax(-1)
    probabilities = logprobs.exp().detach()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    for estimator in ("k1", "k3", "k1+", "k3+"):
        mean = (probabilities * kl_penalty(logprobs, reference, estimator)).sum()
        torch.testing.assert_close(mean, kl, rtol=1e-12, atol=0)
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    for estimator in ("k2", "k1+", "k3+"):
        mean = (probabilities * kl_penalty(logprobs, reference, estimator)).sum()
        (got,) = torch.autograd.grad(mean, logits, retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="'full' is unknown: choose k1, abs"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "full")


def random_policies() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states of 7 tokens and output weights of 11 words; the reference has another width."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(11, 5, dtype=torch.float64)
    ref_hidden, ref_weight = torch.randn(7, 4, dtype=torch.float64), torch.randn(11, 4, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_(), ref_hidden, ref_weight


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_full_kl_equals_the_naive_one(alone: dist.ProcessGroup, rows: int, temperature: float) -> None:
    hidden, weight, ref_hidden, ref_weight = random_policies()
    upstream = torch.randn(7, dtype=torch.float64)
    logp = torch.log_softmax(hidden @ weight.T / temperature, -1)
    logq = torch.log_softmax(ref_hidden @ ref_weight.T / temperature, -1)
    naive = torch.nn.functional.kl_div(logq, logp, reduction="none", log_target=True).sum(-1)
    expected = torch.autograd.grad(naive @ upstream, (hidden, weight))

    kl = full_kl(hidden, weight, ref_hidden, ref_weight, temperature, alone, chunk_logits=2 * 11 * rows)
    got = torch.autograd.grad(kl @ upstream, (hidden, weight))
    torch.testing.assert_close(kl, naive, rtol=0, atol=1e-12)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_full_kl_gradient_equals_finite_differences(alone: dist.ProcessGroup) -> None:
    hidden, weight, ref_hidden, ref_weight = random_policies()
    assert gradcheck(
        lambda h, w: full_kl(h, w, ref_hidden, ref_weight, 0.7, alone, chunk_logits=66), (hidden, weight)
    )


def test_no_gradient_goes_to_the_reference(alone: dist.ProcessGroup) -> None:
    hidden, weight, ref_hidden, ref_weight = random_policies()
    ref_hidden.requires_grad_()
    ref_weight.requires_grad_()
    full_kl(hidden, weight, ref_hidden, ref_weight, 1.0, alone).sum().backward()
    assert ref_hidden.grad is None
    assert ref_weight.grad is None
    assert hidden.grad is not None


def test_full_kl_of_large_logits(alone: dist.ProcessGroup) -> None:
    # logits (1e4, 0) against (0, 0): p = (1, 0), q = (1/2, 1/2), log 2
    hidden, weight = torch.full((1, 1), 1e4), torch.tensor([[1.0], [0.0]])
    kl = full_kl(hidden, weight, torch.zeros(1, 1), weight, 1.0, alone)
    assert kl.item() == pytest.approx(LOG2)
    assert full_kl(hidden, weight, hidden, weight, 1.0, alone).item() == 0


def test_no_tokens(alone: dist.ProcessGroup) -> None:
    hidden, weight = torch.zeros(0, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    full_kl(hidden, weight, hidden.detach(), weight.detach(), 1.0, alone).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0]] * 3
