"""The policy's loss with entropy bonus, KL and chosen tokens, against autograd on transformers' logits.

One launch per layout makes all its assertions.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from torch import Tensor

from atoll.config.schema import KLConfig, OptimizerConfig, ParallelConfig, RunConfig
from atoll.runtime.errors import UserError
from atoll.trainer.losses.loss import (
    PolicyTokens,
    choose_clip_cov,
    choose_kl_cov,
    clip_cov,
    gspo,
    kl_cov,
    ppo_clip,
)
from atoll.trainer.megatron.forward import Forward
from atoll.trainer.megatron.model import initialize_parallel
from atoll.trainer.megatron.names import tensor_slices
from atoll.trainer.megatron.shards import chunk_of
from atoll.trainer.objective import PolicySettings
from atoll.trainer.roles import build_roles, join_ranks
from atoll.trainer.step import Learner
from atoll.wire.types import PolicyBatch, StepKey
from tests.attention_trees import Tree, draw_tree
from tests.builders import run_config
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

TEMPERATURE = 0.8
ENTROPY_COEF, KL_COEF = 0.3, 0.5
ADAMW = OptimizerConfig()
KEY = StepKey("a3f0", 3, 1, "actor")
TREE = draw_tree(0)


class Reference:
    """Both policies' distributions of the tree's N trained tokens, from padded rows."""

    def __init__(self, folder: Path, reference_folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        frozen = AutoModelForCausalLM.from_pretrained(reference_folder, dtype=torch.float32)
        self.table_NV = table(self.model, TREE)
        self.ref_table_NV = table(frozen, TREE).detach()
        ids_N = torch.from_numpy(TREE.segments.token_ids[TREE.trained]).long()
        self.logprobs_N = self.table_NV.gather(1, ids_N[:, None])[:, 0]
        self.ref_logprobs_N = self.ref_table_NV.gather(1, ids_N[:, None])[:, 0]
        self.entropy_N = -(self.table_NV.exp() * self.table_NV).sum(-1)

        rng = np.random.default_rng(0)
        draw = (
            rng.normal(0, 0.3, len(ids_N)),
            rng.normal(0, 0.1, len(ids_N)),
            rng.uniform(0.01, 0.05, len(ids_N)),
        )
        noise, gap, weights = (torch.from_numpy(x).float() for x in draw)
        self.old_N = self.logprobs_N.detach() + noise
        self.rollout_N = self.old_N + gap
        self.weights_N = weights
        self.numbers_N = torch.from_numpy(TREE.samples[TREE.trained]).long()
        advantages = torch.from_numpy(rng.normal(size=int(self.numbers_N.max()) + 1)).float()
        self.advantages_N = advantages[self.numbers_N]

    def batch(self, with_reference: bool) -> PolicyBatch:
        def spread(values_N: Tensor) -> np.ndarray:
            values_T = np.zeros(len(TREE.samples), np.float32)
            values_T[TREE.trained] = values_N.detach().numpy()
            return values_T

        return PolicyBatch(
            TREE.segments,
            samples=TREE.samples,
            loss_weights=spread(self.weights_N),
            advantages=spread(self.advantages_N),
            rollout_logprobs=spread(self.rollout_N),
            old_logprobs=spread(self.old_N),
            ref_logprobs=spread(self.ref_logprobs_N) if with_reference else None,
        )

    def ppo(self) -> Tensor:
        """[N] with clip 0.2 and dual clip 3."""
        ratio_N = (self.logprobs_N - self.old_N).exp()
        loss_N = -torch.minimum(self.advantages_N * ratio_N, self.advantages_N * ratio_N.clamp(0.8, 1.2))
        return torch.where(self.advantages_N < 0, loss_N.clamp(max=-3 * self.advantages_N), loss_N)

    def gspo(self) -> Tensor:
        """[N] with clip 0.1, from the ratio of the whole sample (arXiv:2507.18071, eq. 13)."""
        of_sample_NN = (self.numbers_N[:, None] == self.numbers_N).float()
        mean_N = of_sample_NN @ (self.logprobs_N - self.old_N).detach() / of_sample_NN.sum(1)
        ratio_N = mean_N.exp() * (self.logprobs_N - self.logprobs_N.detach()).exp()
        return -torch.minimum(self.advantages_N * ratio_N, self.advantages_N * ratio_N.clamp(0.9, 1.1))

    def k3(self) -> Tensor:
        gap_N = self.ref_logprobs_N - self.logprobs_N
        return gap_N.exp() - gap_N - 1

    def full_kl(self) -> Tensor:
        return (self.table_NV.exp() * (self.table_NV - self.ref_table_NV)).sum(-1)

    def kl_cov(self, share: float) -> Tensor:
        """-A r, and |logprob - old logprob| more for the share of tokens of highest covariance."""
        logprobs_N, old_N, advantages_N = self.logprobs_N.detach(), self.old_N, self.advantages_N
        covariance_N = (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())
        chosen = covariance_N.topk(int(share * len(old_N))).indices
        loss_N = -advantages_N * (self.logprobs_N - old_N).exp()
        return loss_N.index_add(0, chosen, (self.logprobs_N - old_N).abs()[chosen])

    def gradients(self, loss_N: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad()
        (self.weights_N * loss_N).sum().backward(retain_graph=True)
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def table(model: torch.nn.Module, tree: Tree) -> Tensor:
    """[N, V] log-probabilities at TEMPERATURE of what could have stood in place of each trained token."""
    logits_RLV = model(input_ids=tree.ids_RL, attention_mask=tree.mask_RL).logits
    trained = torch.from_numpy(tree.trained)
    before_NV = logits_RLV[tree.row_T[trained], tree.column_T[trained] - 1]
    return torch.log_softmax(before_NV / TEMPERATURE, -1)


def config(folder: Path, reference_folder: Path, parallel: ParallelConfig) -> RunConfig:
    """PPO with full KL to a reference beside the actor, all of it in small micro-batches."""
    return run_config(
        model={"path": folder},
        rollout={"sampling": {"temperature": TEMPERATURE}},
        trainer={"parallel": parallel, "max_tokens_per_microbatch": 40},
        reference={"path": reference_folder, "placement": "colocated"},
        algorithm={"kl": {"estimator": "full", "coef": KL_COEF}},
    )


def check_layout(folder: Path, reference_folder: Path, parallel: ParallelConfig) -> None:
    settings = config(folder, reference_folder, parallel)
    join_ranks(settings, "actor")
    roles = build_roles(settings, "actor")
    plain = Reference(folder, reference_folder)
    batch = plain.batch(with_reference=True)
    np.testing.assert_allclose(
        roles.forwards["reference"].compute_logprobs(TREE.segments)[TREE.trained],
        plain.ref_logprobs_N,
        atol=1e-5,
    )
    assert roles.learner is not None
    beside = replace(batch, ref_logprobs=None)
    losses = {"actor/pg_loss": plain.ppo(), "actor/kl_loss": plain.full_kl()}
    check(roles.learner, beside, plain, plain.ppo() + KL_COEF * plain.full_kl(), losses)

    forward = policy_forward(folder, max_tokens=40, temperature=TEMPERATURE)

    def learner(settings: PolicySettings) -> Learner:
        return policy_learner(forward, ADAMW, settings)

    k3 = KLConfig(estimator="k3", coef=KL_COEF)
    loss_N = plain.ppo() + KL_COEF * plain.k3()
    losses = {"actor/pg_loss": plain.ppo(), "actor/kl_loss": plain.k3()}
    check(learner(PolicySettings(ppo_clip, kl=k3)), batch, plain, loss_N, losses)

    loss_N = plain.ppo() - ENTROPY_COEF * plain.entropy_N
    settings = PolicySettings(ppo_clip, entropy_coef=ENTROPY_COEF)
    check(learner(settings), beside, plain, loss_N, {"actor/pg_loss": plain.ppo()})

    settings = PolicySettings(partial(gspo, clip_low=0.1, clip_high=0.1))
    check(learner(settings), beside, plain, plain.gspo(), {"actor/pg_loss": plain.gspo()})

    settings = PolicySettings(partial(kl_cov, share=0.3), partial(choose_kl_cov, share=0.3))
    loss_N = plain.kl_cov(share=0.3)
    check(learner(settings), beside, plain, loss_N, {"actor/pg_loss": loss_N})

    metrics = learner(PolicySettings(reinforce)).forward_backward(KEY, beside)
    np.testing.assert_allclose(metrics["actor/logprob_max"], plain.logprobs_N.max().item(), atol=1e-5)
    if parallel.world_size == 1:
        check_cuts(folder, beside)
        check_refusals(forward, beside)


def reinforce(tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of a user's, and a maximum below zero."""
    return -tokens.advantages_N * tokens.logprobs_N, {"actor/logprob_max": tokens.logprobs_N}


def check(
    learner: Learner, batch: PolicyBatch, plain: Reference, loss_N: Tensor, losses: dict[str, Tensor]
) -> None:
    """The reported losses and means, and the gradient of every parameter."""
    learner.reset()
    metrics = learner.forward_backward(KEY, batch)
    assert {name for name in metrics if name.endswith("_loss")} == losses.keys()
    for name, term_N in losses.items():
        np.testing.assert_allclose(metrics[name], (plain.weights_N * term_N).sum().item(), atol=1e-5)
    gap_N = plain.old_N - plain.rollout_N
    for name, value in (
        ("actor/entropy", plain.entropy_N.mean()),
        ("rollout_corr/logprob_diff_mean", gap_N.abs().mean()),
        ("rollout_corr/logprob_diff_max", gap_N.abs().max()),
        ("rollout_corr/k3", (gap_N.exp() - gap_N - 1).mean()),
    ):
        np.testing.assert_allclose(metrics[name], value.item(), atol=1e-5, err_msg=name)

    finalize_model_grads(learner.chunks)
    expected = plain.gradients(loss_N)
    held = tensor_slices(learner.model.spec, chunk_of(learner.model.output))
    for name, parameter in learner.model.output.named_parameters():
        parts = parameter.main_grad.flatten().split([p.rows * p.columns for p in held[name]])
        for piece, part in zip(held[name], parts, strict=True):
            whole = expected[piece.tensor]
            theirs = whole.view(len(whole), -1)[piece.row :, piece.column :][: piece.rows, : piece.columns]
            torch.testing.assert_close(
                part.view(theirs.shape), theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def check_cuts(folder: Path, batch: PolicyBatch) -> None:
    """Tokens are chosen among all of the minibatch, whichever micro-batch they are in."""
    bounds = {"share": 0.3, "min_cov": -100.0, "max_cov": 100.0}
    settings = PolicySettings(partial(clip_cov, **bounds), partial(choose_clip_cov, **bounds))
    found = []
    for max_tokens, attention in ((100_000, "shared_prefix"), (20, "shared_prefix"), (30, "segments")):
        learner = policy_learner(policy_forward(folder, max_tokens, attention, TEMPERATURE), ADAMW, settings)
        metrics = learner.forward_backward(KEY, batch)
        assert metrics["actor/pg_clipfrac"] == int(0.3 * len(TREE.trained)) / len(TREE.trained)
        found.append(torch.cat([p.main_grad.flatten() for p in learner.chunks[0].parameters()]))
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], rtol=1e-4, atol=1e-6)


def check_refusals(forward: Forward, batch: PolicyBatch) -> None:
    """Said before anything is accumulated."""

    def mean(tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        return -(tokens.advantages_N * tokens.logprobs_N).mean(), {}

    for settings, message in (
        (PolicySettings(mean), r"its loss has shape \(\), expected one number per token"),
        (PolicySettings(ppo_clip, kl=KLConfig(estimator="k2")), r"KL penalty \(k2\), but the batch no"),
    ):
        learner = policy_learner(forward, ADAMW, settings)
        with pytest.raises(UserError, match=message):
            learner.forward_backward(KEY, batch)
        assert not any(p.main_grad.any() for p in learner.chunks[0].parameters())


@pytest.fixture(scope="module")
def reference_folder(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_qwen2 after some training."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("reference")
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.03)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ParallelConfig(), id="one"),
        pytest.param(ParallelConfig(data=2), id="dp2", marks=pytest.mark.long),
        pytest.param(ParallelConfig(tensor=2), id="tp2", marks=pytest.mark.long),
        pytest.param(ParallelConfig(context=2), id="cp2", marks=pytest.mark.long),
    ],
)
def test_loss_and_gradient_equal_autograd_on_whole_logits(
    tiny_qwen2: Path, reference_folder: Path, parallel: ParallelConfig
) -> None:
    """The assertions are in check_layout, on every rank."""
    run_ranks(check_layout, parallel.world_size, tiny_qwen2, reference_folder, parallel)


def check_stages(folder: Path, reference_folder: Path) -> None:
    """Chosen tokens: log-probabilities of the whole minibatch come from the last stage to all."""
    initialize_parallel(ParallelConfig(pipeline=2))
    plain = Reference(folder, reference_folder)
    settings = PolicySettings(partial(kl_cov, share=0.3), partial(choose_kl_cov, share=0.3))
    learner = policy_learner(policy_forward(folder, 40, temperature=TEMPERATURE), ADAMW, settings)
    metrics = learner.forward_backward(KEY, plain.batch(with_reference=False))
    loss_N = plain.kl_cov(share=0.3)
    loss = (plain.weights_N * loss_N).sum().item()
    np.testing.assert_allclose(metrics["actor/pg_loss"], loss, atol=1e-5)
    gradients = plain.gradients(loss_N).values()
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    np.testing.assert_allclose(learner.optim_step(KEY, 1e-3)["actor/grad_norm"], norm, rtol=1e-4)


@pytest.mark.long
def test_tokens_are_chosen_on_every_stage_alike(tiny_qwen2: Path, reference_folder: Path) -> None:
    """The assertions are in check_stages, on every rank."""
    run_ranks(check_stages, 2, tiny_qwen2, reference_folder)
