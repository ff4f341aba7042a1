"""A plain padded transformers loop, the batches that it trained on, and what a learner must make of them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from atoll.config.schema import OptimizerConfig
from atoll.trainer.batch import select, take
from atoll.trainer.losses.loss import ppo_clip
from atoll.trainer.objective import PolicySettings
from atoll.trainer.step import Learner
from atoll.wire.types import PolicyBatch, Segments, StepKey

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


def reference_loop(folder: Path, adapter: Path | None = None) -> Reference:
    """Padded batches, torch.optim.AdamW, PPO's formula: nothing of the trainer. With an adapter, peft's
    library puts it on the model and only it learns."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=ADAMW.learning_rate, weight_decay=ADAMW.weight_decay, betas=(0.9, 0.999)
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
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, ADAMW.max_grad_norm)))
        losses.append(loss.item())
        optimizer.step()
    return Reference(batches, losses, norms, first_logprobs)


def check_updates(learner: Learner, reference: Reference) -> None:
    """Log-probabilities before the first step, then every step's loss and gradient norm. Call it on a new
    learner with ADAMW and PPO, on every rank. The last step's gradient is accumulated over two calls."""
    first = reference.batches[0]
    logprobs = learner.forward.compute_logprobs(first.segments)
    np.testing.assert_allclose(logprobs[first.loss_weights > 0], reference.logprobs, atol=1e-5)
    results = [run_step(learner, [(key(0), first)]), run_step(learner, [(key(1), reference.batches[1])])]
    halves = enumerate(split(reference.batches[2]))
    results.append(run_step(learner, [(StepKey("a3f0", 2, i, "actor"), half) for i, half in halves]))
    for step, (metrics, batch) in enumerate(zip(results, reference.batches, strict=True)):
        np.testing.assert_allclose(metrics["actor/pg_loss"], reference.losses[step], rtol=0, atol=1e-5)
        np.testing.assert_allclose(metrics["actor/grad_norm"], reference.grad_norms[step], rtol=1e-4)
        assert metrics["actor/num_tokens"] == (batch.loss_weights > 0).sum()
        assert metrics["actor/skipped_step"] == 0
    assert results[0]["actor/ratio"] == 1
    assert results[0]["actor/pg_clipfrac"] == 0
    assert results[0]["actor/ppo_kl"] == 0
    assert results[0]["rollout_corr/logprob_diff_max"] < 1e-5  # its rollout logprobs are the reference's
    assert results[1]["actor/pg_clipfrac"] > 0


def run_step(learner: Learner, batches: list[tuple[StepKey, PolicyBatch]]) -> dict[str, float]:
    """One update: metrics of the last batch, but losses and tokens of all of them."""
    metrics: dict[str, float] = {}
    for step_key, batch in batches:
        got = learner.forward_backward(step_key, batch)
        sums = {name: got[name] + metrics.get(name, 0) for name in ("actor/pg_loss", "actor/num_tokens")}
        metrics = got | sums
    return metrics | learner.optim_step(batches[-1][0], ADAMW.learning_rate)


def split(batch: PolicyBatch) -> list[PolicyBatch]:
    """The first group, all others."""
    is_first = batch.segments.groups == batch.segments.groups[0]
    return [take(batch, select(batch.segments, np.flatnonzero(own))) for own in (is_first, ~is_first)]
