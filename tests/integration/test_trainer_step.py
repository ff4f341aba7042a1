"""The trainer's updates against a plain padded transformers loop; other layouts are in test_layouts.py.

One launch per layout makes all its assertions.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.config.schema import ParallelConfig
from atoll.runtime.errors import LostStateError
from atoll.trainer.megatron.model import initialize_parallel
from atoll.trainer.step import Learner
from atoll.wire.types import Batch, PolicyBatch, SupervisedBatch
from tests import flash_attn_stand_in
from tests.plain_loop import ADAMW, PPO, TEMPERATURE, Reference, check_updates, key, reference_loop
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner


def new_learner(folder: Path, max_tokens: int = 60, attention: str = "shared_prefix") -> Learner:
    return policy_learner(policy_forward(folder, max_tokens, attention, TEMPERATURE), ADAMW, PPO)


def gradients(learner: Learner, batch: Batch) -> tuple[float, torch.Tensor]:
    """The loss, and all gradients in one vector, cleared again."""
    learner.reset()
    metrics = learner.forward_backward(key(0), batch)
    flat = torch.cat([p.main_grad.flatten() for p in learner.chunks[0].parameters()])
    return next(iter(metrics.values())), flat.clone()


def check_rank(folder: Path, reference: Reference, data: int) -> None:
    initialize_parallel(ParallelConfig(data=data))
    learner = new_learner(folder)
    check_updates(learner, reference)
    if data == 1:
        with pytest.MonkeyPatch.context() as patch:
            flash_attn_stand_in.stand_in(patch)
            check_cuts(folder, reference.batches[1])
        check_keys(learner, reference.batches[0])
        check_not_finite(learner, reference.batches[0])


def check_cuts(folder: Path, batch: PolicyBatch) -> None:
    whole = new_learner(folder, max_tokens=100_000)
    small = new_learner(folder, max_tokens=20)
    unshared = new_learner(folder, max_tokens=30, attention="segments")
    packed = new_learner(folder, max_tokens=30, attention="flash")
    for each in (batch, SupervisedBatch(batch.segments, batch.loss_weights)):
        loss, expected = gradients(whole, each)
        for learner in (small, unshared, packed):
            other_loss, got = gradients(learner, each)
            np.testing.assert_allclose(other_loss, loss, rtol=0, atol=1e-5)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    expected = whole.forward.compute_logprobs(batch.segments)
    for learner in (unshared, packed):
        np.testing.assert_allclose(learner.forward.compute_logprobs(batch.segments), expected, atol=1e-5)


def check_keys(learner: Learner, batch: PolicyBatch) -> None:
    """A repeated call answers from its record and changes nothing."""
    learner.reset()
    first = learner.forward_backward(key(7), batch)
    gradient = next(learner.chunks[0].parameters()).main_grad.clone()
    assert learner.forward_backward(key(7), batch) == first
    assert torch.equal(next(learner.chunks[0].parameters()).main_grad, gradient)
    stepped = learner.optim_step(key(7), 1e-3)
    weight = next(learner.chunks[0].parameters()).detach().clone()
    assert learner.optim_step(key(7), 1e-3) == stepped
    assert torch.equal(next(learner.chunks[0].parameters()), weight)
    with pytest.raises(LostStateError, match="no gradient was accumulated"):
        learner.optim_step(key(8), 1e-3)


def check_not_finite(learner: Learner, batch: PolicyBatch) -> None:
    before = [p.detach().clone() for p in learner.chunks[0].parameters()]
    huge = replace(batch, loss_weights=np.where(batch.loss_weights > 0, np.float32(3e38), np.float32(0)))
    learner.forward_backward(key(9), huge)
    assert learner.optim_step(key(9), 1e-3)["actor/skipped_step"] == 1
    for old, new in zip(before, learner.chunks[0].parameters(), strict=True):
        assert torch.equal(old, new)
    learner.forward_backward(key(10), batch)
    assert learner.optim_step(key(10), 1e-3)["actor/skipped_step"] == 0


@pytest.mark.parametrize("data", [1, 2])
def test_updates_equal_a_plain_loop(tiny_qwen2: Path, data: int) -> None:
    assert len(run_ranks(check_rank, data, tiny_qwen2, reference_loop(tiny_qwen2), data)) == data
