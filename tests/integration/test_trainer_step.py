"""The trainer's updates against a plain padded transformers loop, on every parallel layout.

One launch per layout makes all its assertions.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from services.config.schema import OptimizerConfig
from services.runtime.errors import LostStateError
from services.trainer.loss import ppo_clip
from services.trainer.model import initialize_parallel
from services.trainer.objective import PolicySettings
from services.trainer.step import Learner
from services.wire.types import Batch, PolicyBatch, Segments, StepKey, SupervisedBatch
from tests.learners import policy_forward, policy_learner
from tests.ranks import run_ranks

TEMPERATURE = 0.8
PPO = PolicySettings(partial(ppo_clip, clip_low=0.2, clip_high=0.28))
ADAMW = OptimizerConfig(learning_rate=1e-3, weight_decay=1.0, max_grad_norm=0.5)
STEPS = 3


@dataclass(frozen=True)
class Row:
    """One sequence of the reference: what a batch says about one sample, without sharing."""

    tokens: list[int]
    prompt_length: int
    weights: list[float]  # of the response tokens
    advantage: float
    noise: list[float]  # old logprob minus the reference's


@dataclass(frozen=True)
class Reference:
    batches: list[PolicyBatch]
    losses: list[float]
    grad_norms: list[float]
    logprobs: np.ndarray  # of the first batch's tokens, before any step


def key(step: int) -> StepKey:
    return StepKey("a3f0", step, 0, "actor")


def draw_groups(rng: np.random.Generator) -> list[list[Row]]:
    groups = []
    for _ in range(5):
        prompt = rng.integers(3, 64, rng.integers(2, 9)).tolist()
        rows = []
        for _ in range(int(rng.integers(1, 5))):
            length = int(rng.integers(1, 12))
            rows.append(
                Row(
                    tokens=prompt + rng.integers(3, 64, length).tolist(),
                    prompt_length=len(prompt),
                    weights=rng.uniform(0.01, 0.05, length).tolist(),
                    advantage=float(rng.normal()),
                    noise=(0.3 * rng.normal(size=length)).tolist(),
                )
            )
        groups.append(rows)
    return groups


def to_batch(groups: list[list[Row]], old: list[list[float]], with_old: bool) -> PolicyBatch:
    """Prompt once, one segment per response. `old` lists each row's response logprobs."""
    tokens, parents, group_of, weights, advantages, olds = [], [], [], [], [], []
    flat_old = iter(old)
    for g, rows in enumerate(groups):
        prompt = rows[0].tokens[: rows[0].prompt_length]
        root = len(parents)
        parts = [(prompt, [0.0] * len(prompt), 0.0, [0.0] * len(prompt), -1)]
        parts += [(r.tokens[r.prompt_length :], r.weights, r.advantage, next(flat_old), root) for r in rows]
        for part_tokens, part_weights, advantage, part_old, parent in parts:
            tokens.append(part_tokens)
            parents.append(parent)
            group_of.append(g)
            weights += part_weights
            advantages += [advantage] * len(part_tokens)
            olds += part_old
    old_T = np.array(olds, np.float32)
    is_response_S = np.array(parents) >= 0
    samples_S = np.where(is_response_S, np.cumsum(is_response_S) - 1, -1)
    return PolicyBatch(
        Segments(
            np.concatenate(tokens).astype(np.int32),
            np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            np.array(parents, np.int32),
            np.array(group_of, np.int32),
        ),
        samples=np.repeat(samples_S, list(map(len, tokens))).astype(np.int32),
        loss_weights=np.array(weights, np.float32),
        advantages=np.array(advantages, np.float32),
        rollout_logprobs=old_T,
        old_logprobs=old_T if with_old else None,
        ref_logprobs=None,
    )


def reference_loop(folder: Path) -> Reference:
    """Padded batches, torch.optim.AdamW, PPO's formula: nothing of the trainer."""
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=ADAMW.learning_rate, weight_decay=ADAMW.weight_decay, betas=(0.9, 0.999)
    )
    batches, losses, norms, first_logprobs = [], [], [], np.zeros(0)
    for step in range(STEPS):
        groups = draw_groups(rng)
        rows = [row for group in groups for row in group]
        width = max(len(row.tokens) for row in rows)
        ids = torch.tensor([row.tokens + [0] * (width - len(row.tokens)) for row in rows])
        mask = torch.tensor([[1] * len(row.tokens) + [0] * (width - len(row.tokens)) for row in rows])
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / TEMPERATURE
        table = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = torch.zeros(())
        old_lists, token_logprobs = [], []
        for i, row in enumerate(rows):
            logprobs = table[i, row.prompt_length - 1 : len(row.tokens) - 1]
            old = logprobs.detach() + (torch.tensor(row.noise) if step else 0)  # step 0 is on policy
            ratio = (logprobs - old).exp()
            token_loss = torch.maximum(-row.advantage * ratio, -row.advantage * ratio.clamp(0.8, 1.28))
            if row.advantage < 0:
                token_loss = token_loss.clamp(max=-row.advantage * 3)
            loss = loss + (torch.tensor(row.weights) * token_loss).sum()
            old_lists.append(old.tolist())
            token_logprobs += logprobs.tolist()
        batches.append(to_batch(groups, old_lists, with_old=step > 0))
        if step == 0:
            first_logprobs = np.array(token_logprobs)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), ADAMW.max_grad_norm)))
        losses.append(loss.item())
        optimizer.step()
    return Reference(batches, losses, norms, first_logprobs)


def new_learner(folder: Path, max_tokens: int = 60, shares_prefix: bool = True) -> Learner:
    return policy_learner(policy_forward(folder, max_tokens, shares_prefix, TEMPERATURE), ADAMW, PPO)


def run_steps(learner: Learner, batches: list[PolicyBatch]) -> list[dict[str, float]]:
    results = []
    for i, batch in enumerate(batches):
        metrics = learner.forward_backward(key(i), batch)
        results.append(metrics | learner.optim_step(key(i), ADAMW.learning_rate))
    return results


def gradients(learner: Learner, batch: Batch) -> tuple[float, torch.Tensor]:
    """The loss, and all gradients in one vector, cleared again."""
    learner.reset()
    metrics = learner.forward_backward(key(0), batch)
    flat = torch.cat([p.main_grad.flatten() for p in learner.replicas.parameters()])
    return next(iter(metrics.values())), flat.clone()


def check_layout(folder: Path, reference: Reference, tensor: int, data: int) -> None:
    initialize_parallel(tensor, data)
    learner = new_learner(folder)
    batch = reference.batches[0]
    logprobs = learner.forward.compute_logprobs(batch.segments)
    np.testing.assert_allclose(logprobs[batch.loss_weights > 0], reference.logprobs, atol=1e-5)
    results = run_steps(learner, reference.batches)
    for step, metrics in enumerate(results):
        np.testing.assert_allclose(metrics["actor/pg_loss"], reference.losses[step], rtol=0, atol=1e-5)
        np.testing.assert_allclose(metrics["actor/grad_norm"], reference.grad_norms[step], rtol=1e-4)
        assert metrics["actor/num_tokens"] == (reference.batches[step].loss_weights > 0).sum()
        assert metrics["actor/skipped_step"] == 0
    assert results[0]["actor/ratio"] == 1
    assert results[0]["actor/pg_clipfrac"] == 0
    assert results[0]["actor/ppo_kl"] == 0
    assert results[0]["rollout_corr/logprob_diff_max"] < 1e-5  # its rollout logprobs are the reference's
    assert results[1]["actor/pg_clipfrac"] > 0
    if tensor == data == 1:
        check_cuts(folder, reference.batches[1])
        check_keys(learner, reference.batches[0])
        check_not_finite(learner, reference.batches[0])


def check_cuts(folder: Path, batch: PolicyBatch) -> None:
    whole = new_learner(folder, max_tokens=100_000)
    small = new_learner(folder, max_tokens=20)
    unshared = new_learner(folder, max_tokens=30, shares_prefix=False)
    for each in (batch, SupervisedBatch(batch.segments, batch.loss_weights)):
        loss, expected = gradients(whole, each)
        for learner in (small, unshared):
            other_loss, got = gradients(learner, each)
            np.testing.assert_allclose(other_loss, loss, rtol=0, atol=1e-5)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        unshared.forward.compute_logprobs(batch.segments),
        whole.forward.compute_logprobs(batch.segments),
        atol=1e-5,
    )


def check_keys(learner: Learner, batch: PolicyBatch) -> None:
    """A repeated call answers from its record and changes nothing."""
    learner.reset()
    first = learner.forward_backward(key(7), batch)
    gradient = next(learner.replicas.parameters()).main_grad.clone()
    assert learner.forward_backward(key(7), batch) == first
    assert torch.equal(next(learner.replicas.parameters()).main_grad, gradient)
    stepped = learner.optim_step(key(7), 1e-3)
    weight = next(learner.replicas.parameters()).detach().clone()
    assert learner.optim_step(key(7), 1e-3) == stepped
    assert torch.equal(next(learner.replicas.parameters()), weight)
    with pytest.raises(LostStateError, match="no gradient was accumulated"):
        learner.optim_step(key(8), 1e-3)


def check_not_finite(learner: Learner, batch: PolicyBatch) -> None:
    before = [p.detach().clone() for p in learner.replicas.parameters()]
    huge = replace(batch, loss_weights=np.where(batch.loss_weights > 0, np.float32(3e38), np.float32(0)))
    learner.forward_backward(key(9), huge)
    assert learner.optim_step(key(9), 1e-3)["actor/skipped_step"] == 1
    for old, new in zip(before, learner.replicas.parameters(), strict=True):
        assert torch.equal(old, new)
    learner.forward_backward(key(10), batch)
    assert learner.optim_step(key(10), 1e-3)["actor/skipped_step"] == 0


@pytest.mark.parametrize(
    ("family", "tensor", "data"),
    [("qwen2", 1, 1), ("qwen2", 1, 2), ("qwen2_tied", 2, 1), ("qwen3", 2, 1)],
)
def test_updates_equal_a_plain_loop(
    request: pytest.FixtureRequest, family: str, tensor: int, data: int
) -> None:
    folder = request.getfixturevalue(f"tiny_{family}")
    assert (
        len(run_ranks(check_layout, tensor * data, folder, reference_loop(folder), tensor, data))
        == tensor * data
    )
