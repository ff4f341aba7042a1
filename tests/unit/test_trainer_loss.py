"""Losses against numbers worked by hand, and their gradients against finite differences."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from atoll.trainer.losses.loss import LOSSES, SELECTIONS, TRAITS, PolicyTokens, value_loss

NAMES = sorted(LOSSES)
# such that some tokens of the random cases below are clipped and some are not
PARAMETERS: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.02},
}


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    lengths: tuple[int, ...] = (),
    chosen: tuple[int, ...] = (),
) -> PolicyTokens:
    """Samples of `lengths` one after the other; none: each token is a sample."""
    lengths = lengths or (1,) * len(logprobs)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    is_chosen = torch.zeros(len(logprobs), dtype=torch.bool)
    is_chosen[list(chosen)] = True
    return PolicyTokens(logprobs, old_logprobs, advantages, sample, is_chosen)


def random_tokens(seed: int, lengths: tuple[int, ...]) -> PolicyTokens:
    """Ratios within and without every loss's bounds; one advantage per sample."""
    torch.manual_seed(seed)
    old = -3 * torch.rand(sum(lengths), dtype=torch.float64) - 1
    logprobs = (old + 0.6 * torch.randn(len(old), dtype=torch.float64)).clamp(max=-0.01).requires_grad_()
    of_samples = torch.randn(len(lengths), dtype=torch.float64)
    advantages = torch.repeat_interleave(of_samples, torch.tensor(lengths))
    return tokens(logprobs, old, advantages, lengths, tuple(range(0, len(old), 3)))


def with_logprobs(batch: PolicyTokens, logprobs: Tensor) -> PolicyTokens:
    return PolicyTokens(logprobs, batch.old_logprobs_N, batch.advantages_N, batch.sample_N, batch.chosen_N)


def apply(name: str, batch: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
    return LOSSES[name](batch, **PARAMETERS.get(name, {}))


def gradient(name: str, batch: PolicyTokens) -> Tensor:
    """Of the sum of the tokens' losses."""
    return torch.autograd.grad(apply(name, batch)[0].sum(), batch.logprobs_N)[0]


def assert_close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_ppo_clip_by_hand() -> None:
    # ratios 1.5, 0.5, 1.5, 0.5, 1, 4 with advantages 2, 2, -1, -1, 3, -2:
    #   max(-3, -2 * 1.28) = -2.56   clipped
    #   max(-1, -2 * 0.8)  = -1.0    free
    #   max(1.5, 1.28)     =  1.5    free
    #   max(0.5, 0.8)      =  0.8    clipped
    #   max(-3, -3)        = -3.0    on policy
    #   max(8, 2 * 1.28)   =  8, above 2 * 3 = 6: capped
    ratios, old = tensor(1.5, 0.5, 1.5, 0.5, 1.0, 4.0), tensor(-1, -2, -0.5, -0.1, -3, -2)
    batch = tokens(old + ratios.log(), old, tensor(2, 2, -1, -1, 3, -2))
    loss, values = LOSSES["ppo_clip"](batch, clip_high=0.28)
    assert_close(loss, tensor(-2.56, -1, 1.5, 0.8, -3, 6))
    assert values["actor/pg_clipfrac"].tolist() == [True, False, False, True, False, False]
    assert values["actor/pg_clipfrac_lower"].tolist() == [False] * 5 + [True]
    assert_close(values["actor/ratio"], ratios)
    assert_close(values["actor/ppo_kl"], -ratios.log())


def test_log_ratio_is_clamped() -> None:
    loss, values = LOSSES["ppo_clip"](tokens(tensor(0), tensor(-50), tensor(-1)), dual_clip=1e12)
    assert loss.item() == pytest.approx(math.exp(20))
    assert values["actor/ppo_kl"].item() == -20


@pytest.mark.parametrize("name", LOSSES)
def test_a_token_far_off_leaves_loss_and_ppo_kl_finite_and_the_same_in_every_loss(name: str) -> None:
    for advantage in (1.0, -1.0):
        batch = tokens(tensor(0, 0), tensor(-2000, 1), tensor(advantage, advantage), (2,))
        loss, values = apply(name, batch)
        assert loss.isfinite().all()
        assert values["actor/ppo_kl"].tolist() == [-20, 1]


def test_decoupled_ppo_is_ppo_clip_with_the_behaviour_weight_in_the_advantages() -> None:
    # behaviour probability 0.2, proximal 0.4, trained 0.6: weight 2, ratio 1.5 around the proximal policy
    #   A =  1: -2 min(1.5, 1.2)  = -2.4
    #   A = -1: -2 min(-1.5, -1.2) = 3
    behaviour, proximal, trained = tensor(0.2, 0.2).log(), tensor(0.4, 0.4).log(), tensor(0.6, 0.6).log()
    advantages = (proximal - behaviour).exp() * tensor(1, -1)
    loss, _ = LOSSES["ppo_clip"](tokens(trained, proximal, advantages))
    assert_close(loss, tensor(-2.4, 3))


def test_gspo_by_hand() -> None:
    # sequence ratios: sqrt(1.21 * 1) = 1.1; sqrt(0.25 * 1) = 0.5; 1.5; 1.5; clipped to [0.9, 1.2]
    #   A =  2: max(-2.2, -2.2) free      A = -1: max(0.5, 0.9) clipped
    #   A =  1: max(-1.5, -1.2) clipped   A = -1: max(1.5, 1.2) free
    ratios, old = tensor(1.21, 1, 0.25, 1, 1.5, 1.5), tensor(-1, -2, -0.5, -2, -3, -2)
    logprobs = (old + ratios.log()).requires_grad_()
    batch = tokens(logprobs, old, tensor(2, 2, -1, -1, 1, -1), (2, 2, 1, 1))
    loss, values = LOSSES["gspo"](batch, clip_low=0.1, clip_high=0.2)
    assert_close(loss, tensor(-2.2, -2.2, 0.9, 0.9, -1.2, 1.5))
    assert values["actor/pg_clipfrac"].tolist() == [False, False, True, True, True, False]
    assert_close(values["actor/ratio"], tensor(1.1, 1.1, 0.5, 0.5, 1.5, 1.5))
    assert_close(values["actor/ppo_kl"], -ratios.log())
    # a token's own logprob carries -A s where it is free
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], tensor(-2.2, -2.2, 0, 0, 0, 1.5))


def test_gspo_has_the_gradient_of_the_sequence_objective() -> None:
    """Weighted as seq_mean_token_mean: here finite differences move the sequence ratio too."""
    lengths = (3, 1, 4, 2)
    batch = random_tokens(1, lengths)
    weights = torch.repeat_interleave(1 / (4 * torch.tensor(lengths).double()), torch.tensor(lengths))
    _, values = apply("gspo", batch)
    assert 0 < values["actor/pg_clipfrac"].sum() < len(weights)
    assert gradcheck(lambda x: apply("gspo", with_logprobs(batch, x))[0] @ weights, batch.logprobs_N)


def test_gmpo_by_hand() -> None:
    # log ratios 0.6, -1 | 0.6, -1 | 0.2 with clips of 0.4:
    #   A =  2: 0.4, -1   mean -0.3: -2 e^-0.3
    #   A = -1: 0.6, -0.4 mean  0.1: e^0.1
    #   A =  1: 0.2: -e^0.2
    differences, old = tensor(0.6, -1, 0.6, -1, 0.2), tensor(-1, -2, -3, -2, -1)
    batch = tokens(old + differences, old, tensor(2, 2, -1, -1, 1), (2, 2, 1))
    loss, values = LOSSES["gmpo"](batch)
    good, bad, free = math.exp(-0.3), math.exp(0.1), math.exp(0.2)
    assert_close(loss, tensor(-2 * good, -2 * good, bad, bad, -free))
    assert values["actor/pg_clipfrac"].tolist() == [True, False, False, False, False]
    assert values["actor/pg_clipfrac_lower"].tolist() == [False, False, False, True, False]
    assert_close(values["actor/ratio"], tensor(good, good, bad, bad, free))


def test_sapo_by_hand() -> None:
    # A =  2, r = 1.5: gate sigmoid(0.5) * 4 = 4 / (1 + e^-0.5)
    # A = -1, r = 0.5: gate sigmoid(1.05 * -0.5) * 4 / 1.05
    # A =  3, r = 1:   gate sigmoid(0) * 4 = 2
    ratios, old = tensor(1.5, 0.5, 1), tensor(-1, -2, -3)
    loss, _ = LOSSES["sapo"](tokens(old + ratios.log(), old, tensor(2, -1, 3)))
    expected = (-2 * 4 / (1 + math.exp(-0.5)), 4 / 1.05 / (1 + math.exp(0.525)), -6)
    assert_close(loss, tensor(*expected))


def test_cispo_by_hand() -> None:
    # ratios 1.5, 0.5, 1.1 clipped to [0.8, 1.2]: 1.2, 0.8, 1.1
    #   A =  2, logprob -1: -1.2 * 2 * -1 =  2.4    gradient -2.4
    #   A = -1, logprob -2: 0.8 * -2      = -1.6    gradient  0.8
    #   A =  1, logprob -3: -1.1 * -3     =  3.3    gradient -1.1
    logprobs = tensor(-1, -2, -3).requires_grad_()
    batch = tokens(logprobs, logprobs.detach() - tensor(1.5, 0.5, 1.1).log(), tensor(2, -1, 1))
    loss, values = LOSSES["cispo"](batch, clip_low=0.2)
    assert_close(loss, tensor(2.4, -1.6, 3.3))
    assert values["actor/pg_clipfrac"].tolist() == [True, True, False]
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], tensor(-2.4, 0.8, -1.1))
    loss, values = LOSSES["cispo"](batch)  # no lower bound: 0.5 * -2
    assert_close(loss, tensor(2.4, -1.0, 3.3))
    assert values["actor/pg_clipfrac"].tolist() == [True, False, False]


def test_dppo_tv_by_hand() -> None:
    # probability 0.5 from 0.3, up by 0.2:    A =  1 too far, 0    A = -1: 0.5 / 0.3 log 0.5
    # probability 0.1 from 0.3, down by 0.2:  A = -1 too far, 0    A =  1: -0.1 / 0.3 log 0.1
    # probability 0.1 from 0.001, ratio 100, counts as 20:         A =  1: -20 log 0.1
    probabilities, old = tensor(0.5, 0.5, 0.1, 0.1, 0.1), tensor(0.3, 0.3, 0.3, 0.3, 0.001)
    logprobs = probabilities.log().requires_grad_()
    loss, values = LOSSES["dppo_tv"](tokens(logprobs, old.log(), tensor(1, -1, -1, 1, 1)))
    assert_close(loss, tensor(0, 5 / 3 * math.log(0.5), 0, -math.log(0.1) / 3, -20 * math.log(0.1)))
    assert values["actor/pg_clipfrac"].tolist() == [True, False, True, False, False]
    assert values["actor/pg_clipfrac_lower"].tolist() == [False] * 4 + [True]
    assert_close(torch.autograd.grad(loss.sum(), logprobs)[0], tensor(0, 5 / 3, 0, -1 / 3, -20))


def test_clip_cov_and_kl_cov_by_hand() -> None:
    # ratios 1.5, 0.5, 1.5, 0.5 with advantages 2, 2, -1, -1: clipped at 0.2, -2.4, -1, 1.5, 0.8;
    # free -3, -1, 1.5, 0.5. The first and the last are chosen: |log 1.5| = 0.405, |log 0.5| = 0.693.
    ratios, old = tensor(1.5, 0.5, 1.5, 0.5), tensor(-1, -2, -0.5, -0.1)
    batch = tokens(old + ratios.log(), old, tensor(2, 2, -1, -1), chosen=(0, 3))
    loss, values = LOSSES["clip_cov"](batch)
    assert_close(loss, tensor(0, -1, 1.5, 0))
    assert values["actor/pg_clipfrac"].tolist() == [True, False, False, True]
    loss, _ = LOSSES["kl_cov"](batch, coef=0.1)
    assert_close(loss, tensor(-3 + 0.1 * math.log(1.5), -1, 1.5, 0.5 + 0.1 * math.log(2)))


def test_reinforce_by_hand() -> None:
    loss, values = LOSSES["reinforce"](tokens(tensor(-1, -2), tensor(-1.5, -2), tensor(2, -3)))
    assert loss.tolist() == [2, -6]
    assert values["actor/ppo_kl"].tolist() == [-0.5, 0]


def test_value_loss_by_hand() -> None:
    # clip 0.5 around old values of 0:
    #   v = 1,   R = 2: max(1, (0.5 - 2)^2 = 2.25) / 2 = 1.125    clipped
    #   v = 1,   R = 0: max(1, 0.25) / 2               = 0.5      free
    #   v = 0.2, R = 1: max(0.64, 0.64) / 2            = 0.32     within
    #   v = -1,  R = -2: as the first                  = 1.125    clipped
    values = tensor(1, 1, 0.2, -1).requires_grad_()
    loss, means = value_loss(values, tensor(0, 0, 0, 0), tensor(2, 0, 1, -2), 0.5)
    assert_close(loss, tensor(1.125, 0.5, 0.32, 1.125))
    assert means["vf_clipfrac"].tolist() == [True, False, False, True]
    assert means["vpred_mean"].tolist() == [1, 1, 0.2, -1]
    # gradient v - R where free, 0 where clipped
    assert_close(torch.autograd.grad(loss.sum(), values)[0], tensor(0, 1, -0.8, 0))


def test_value_loss_gradient_equals_finite_differences() -> None:
    torch.manual_seed(0)
    values, old, returns = torch.randn(3, 20, dtype=torch.float64)
    assert 0 < value_loss(values, old, returns, 0.5)[1]["vf_clipfrac"].sum() < 20
    assert gradcheck(lambda x: value_loss(x, old, returns, 0.5)[0], values.requires_grad_())


def holding_stopped(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What `function` detaches stays as it was at its first call: else finite differences would move it."""
    detach, held = Tensor.detach, list[Tensor]()

    def call(x: Tensor) -> Tensor:
        is_first, replayed = not held, iter(tuple(held))

        def hold(tensor: Tensor) -> Tensor:
            if not is_first:
                return next(replayed)
            held.append(detach(tensor).clone())
            return held[-1]

        with mock.patch.object(Tensor, "detach", hold):
            return function(x)

    return call


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_without_ratio_looks_at_no_old_policy(name: str) -> None:
    batch = random_tokens(0, (3, 2, 4))
    loss_N, _ = apply(name, batch)
    moved_N, _ = apply(name, replace(batch, old_logprobs_N=batch.old_logprobs_N - 0.1))
    assert torch.equal(loss_N, moved_N) == ("without_ratio" in TRAITS.get(name, ()))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_finite_differences(name: str) -> None:
    batch = random_tokens(0, (3, 1, 5, 2, 4, 5))
    clipped = apply(name, batch)[1].get("actor/pg_clipfrac")
    assert clipped is None or 0 < clipped.sum() < len(clipped)
    loss = holding_stopped(lambda x: apply(name, with_logprobs(batch, x))[0])
    assert gradcheck(loss, batch.logprobs_N)


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_gradient_is_that_of_reinforce(name: str) -> None:
    """-A, for one advantage per sample."""
    batch = random_tokens(0, (3, 1, 2))
    on_policy = PolicyTokens(
        batch.logprobs_N, batch.logprobs_N.detach(), batch.advantages_N, batch.sample_N, batch.chosen_N
    )
    expected = -batch.advantages_N
    if name == "clip_cov":
        expected = expected * ~batch.chosen_N
    assert_close(gradient(name, on_policy), expected)
    ratio = apply(name, on_policy)[1]["actor/ratio"]
    assert_close(ratio.detach(), torch.ones_like(ratio))


def test_gmpo_gives_all_tokens_of_a_sample_its_mean_advantage() -> None:
    logprobs = tensor(-1, -2).requires_grad_()
    batch = tokens(logprobs, logprobs.detach(), tensor(3, -1), (2,))
    assert_close(gradient("gmpo", batch), tensor(-1, -1))  # -(3 - 1) / 2


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name: str) -> None:
    empty = tokens(tensor(), tensor(), tensor())
    loss, values = apply(name, empty)
    assert loss.shape == (0,)
    assert values.keys() == apply(name, random_tokens(0, (2,)))[1].keys()
    assert all(value.shape == (0,) for value in values.values())


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)  # a busy machine is no failure
@given(seed=st.integers(0, 1000), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5), data=st.data())
def test_samples_may_come_in_any_order_and_company(
    name: str, seed: int, lengths: list[int], data: st.DataObject
) -> None:
    """A sample's losses, gradients and reported values are the same alone as among others in any order."""
    batch = random_tokens(seed, tuple(lengths))
    loss, values = apply(name, batch)
    grad = gradient(name, batch)
    company = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True))
    source = torch.cat([(batch.sample_N == sample).nonzero()[:, 0] for sample in company])
    others = PolicyTokens(
        batch.logprobs_N.detach()[source].requires_grad_(),
        batch.old_logprobs_N[source],
        batch.advantages_N[source],
        torch.repeat_interleave(torch.arange(len(company)), torch.tensor([lengths[i] for i in company])),
        batch.chosen_N[source],
    )
    other_loss, other_values = apply(name, others)
    assert_close(other_loss, loss[source])
    assert_close(gradient(name, others), grad[source])
    for key, value in values.items():
        assert_close(other_values[key].double(), value[source].double())


def test_clip_cov_chooses_by_hand() -> None:
    # mean A 0, mean logprob -2: covariances 2 * 1 = 2, -2 * -1 = 2, 0, 0
    logprobs, advantages = tensor(-1, -3, -2, -2), tensor(2, -2, 0, 0)
    choose = SELECTIONS["clip_cov"]
    chosen = choose(logprobs, logprobs, advantages, 0, share=0.5)  # int(0.5 * 4) = 2 of 2 candidates
    assert chosen.tolist() == [True, True, False, False]
    chosen = choose(logprobs, logprobs, advantages, 0, share=1.0)  # no more candidates than these
    assert chosen.tolist() == [True, True, False, False]
    old = logprobs - tensor(1.5, 1, 1, 1).log()  # the ratio already clips the first
    assert choose(logprobs, old, advantages, 0, share=0.5).tolist() == [False, True, False, False]
    assert not choose(logprobs, logprobs, advantages, 0, min_cov=2.0).any()  # the bounds are open
    assert not choose(logprobs, logprobs, advantages, 0, max_cov=2.0).any()


def test_clip_cov_draws_with_the_seed() -> None:
    logprobs, advantages = tensor(-1, -3, -2, -2), tensor(2, -2, 0, 0)
    drawn = [SELECTIONS["clip_cov"](logprobs, logprobs, advantages, seed) for seed in range(200)]
    assert all(chosen.sum() == 1 for chosen in drawn)  # max(1, int(0.0002 * 4))
    first = sum(bool(chosen[0]) for chosen in drawn)
    assert 60 < first < 140  # 100 expected, with a standard deviation of 7
    again = SELECTIONS["clip_cov"](logprobs, logprobs, advantages, 7)
    assert again.equal(drawn[7])


def test_kl_cov_chooses_by_hand() -> None:
    # mean A 5, mean logprob -2: covariances 3 * 1 = 3, -1 * 0 = 0, -2 * -2 = 4, 0
    logprobs, advantages = tensor(-1, -2, -4, -1), tensor(8, 4, 3, 5)
    choose = SELECTIONS["kl_cov"]
    assert choose(logprobs, logprobs, advantages, 0).tolist() == [False, False, True, False]
    assert choose(logprobs, logprobs, advantages, 0, share=0.5).tolist() == [True, False, True, False]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000))
def test_kl_cov_chooses_the_same_in_any_order(seed: int) -> None:
    batch = random_tokens(seed, (20,))
    logprobs, advantages = batch.logprobs_N.detach(), torch.randn(20, dtype=torch.float64)
    order = torch.randperm(20)
    chosen = SELECTIONS["kl_cov"](logprobs, batch.old_logprobs_N, advantages, 0, share=0.2)
    again = SELECTIONS["kl_cov"](
        logprobs[order], batch.old_logprobs_N[order], advantages[order], 0, share=0.2
    )
    assert chosen.sum() == 4
    assert again.equal(chosen[order])


@pytest.mark.parametrize("name", sorted(SELECTIONS))
def test_selections(name: str) -> None:
    assert SELECTIONS[name](tensor(), tensor(), tensor(), 0).shape == (0,)
    # both are called with the same parameters, so their names and defaults agree
    of_loss, of_selection = (inspect.signature(f).parameters for f in (LOSSES[name], SELECTIONS[name]))
    keyword_only = [{k: v for k, v in p.items() if v.kind is v.KEYWORD_ONLY} for p in (of_loss, of_selection)]
    assert keyword_only[0] == keyword_only[1]
