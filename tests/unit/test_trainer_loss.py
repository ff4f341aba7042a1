"""Losses against numbers worked by hand, and their gradients against finite differences."""

import math

import pytest
import torch

from services.trainer.loss import LOSSES, nll, ppo_clip
from services.wire.types import LossSettings

SETTINGS = LossSettings("ppo_clip", clip_low=0.2, clip_high=0.28, temperature=1.0)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_ppo_clip_by_hand() -> None:
    # ratios 1.5, 0.5, 1.5, 0.5, 1 with advantages 2, 2, -1, -1, 3:
    #   max(-3, -2 * 1.28) = -2.56   clipped
    #   max(-1, -2 * 0.8)  = -1.0    free
    #   max(1.5, 1.28)     =  1.5    free
    #   max(0.5, 0.8)      =  0.8    clipped
    #   max(-3, -3)        = -3.0    on policy
    ratios = tensor(1.5, 0.5, 1.5, 0.5, 1.0)
    old = tensor(-1, -2, -0.5, -0.1, -3)
    weights = tensor(0.1, 0.2, 0.3, 0.4, 0.5)
    loss, sums = ppo_clip(old + ratios.log(), old, tensor(2, 2, -1, -1, 3), weights, SETTINGS)
    assert loss.item() == pytest.approx(-0.256 - 0.2 + 0.45 + 0.32 - 1.5)
    assert sums["actor/pg_clipfrac"].item() == 2
    assert sums["actor/ratio"].item() == pytest.approx(5.0)
    assert sums["actor/ppo_kl"].item() == pytest.approx(-(2 * math.log(1.5) + 2 * math.log(0.5)))


def test_ppo_log_ratio_is_clamped() -> None:
    loss, sums = ppo_clip(tensor(0.0), tensor(-50.0), tensor(-1.0), tensor(1.0), SETTINGS)
    assert loss.item() == pytest.approx(math.exp(20))
    assert sums["actor/ppo_kl"].item() == -20


def test_on_policy_gradient_is_that_of_reinforce() -> None:
    logprobs = tensor(-1.0, -2.0).requires_grad_()
    loss, sums = ppo_clip(logprobs, logprobs.detach(), tensor(2.0, -3.0), tensor(0.5, 0.25), SETTINGS)
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1.0, 0.75]  # -weight * advantage
    assert sums["actor/ratio"].item() == 2
    assert sums["actor/pg_clipfrac"].item() == 0


def test_nll_by_hand() -> None:
    loss, sums = nll(tensor(-1.0, -2.0), tensor(0, 0), tensor(0, 0), tensor(0.5, 0.25), SETTINGS)
    assert loss.item() == 1.0
    assert sums == {}


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_gradients_equal_finite_differences(kind: str) -> None:
    torch.manual_seed(0)
    old = -torch.rand(20, dtype=torch.float64)
    logprobs = (old + 0.3 * torch.randn(20, dtype=torch.float64)).requires_grad_()
    advantages, weights = torch.randn(2, 20, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: LOSSES[kind].apply(x, old, advantages, weights.abs(), SETTINGS)[0], (logprobs,)
    )


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_every_loss_returns_the_sums_that_it_declares(kind: str) -> None:
    x = tensor(-1.0)
    assert tuple(LOSSES[kind].apply(x, x, x, x, SETTINGS)[1]) == LOSSES[kind].means
