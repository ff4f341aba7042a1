"""Checkpoints: exact resume, other layouts, full disks."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from services.config.schema import OptimizerConfig
from services.runtime.errors import CheckpointError, UserError
from services.trainer.checkpoint import load, save
from services.trainer.model import initialize_parallel
from services.trainer.step import Learner
from services.wire.types import PolicyBatch, Segments, StepKey
from tests.learners import policy_forward, policy_learner
from tests.ranks import run_ranks

ADAMW = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)


def batch(seed: int) -> PolicyBatch:
    """Four groups: a prompt of 3 tokens and two responses of 5."""
    rng = np.random.default_rng(seed)
    lengths = [3, 5, 5] * 4
    is_response = np.repeat(np.array([False, True, True] * 4), lengths)
    segments = Segments(
        rng.integers(3, 64, sum(lengths)).astype(np.int32),
        np.cumsum([0, *lengths], dtype=np.int64),
        np.array([-1, 0, 0, -1, 3, 3, -1, 6, 6, -1, 9, 9], np.int32),
        np.repeat(np.arange(4, dtype=np.int32), 3),
    )
    zeros = np.zeros(sum(lengths), np.float32)
    advantages = rng.normal(size=sum(lengths)).astype(np.float32)
    return PolicyBatch(
        segments,
        samples=np.repeat(np.array([-1, 0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7], np.int32), lengths),
        loss_weights=np.where(is_response, 1 / 40, 0).astype(np.float32),
        advantages=advantages,
        rollout_logprobs=zeros,
        old_logprobs=None,
        ref_logprobs=None,
    )


def update(learner: Learner, step: int) -> list[float]:
    """Everything that the update reports: loss, entropy, gradient norm, ..."""
    key = StepKey("a3f0", step, 0, "actor")
    metrics = learner.forward_backward(key, batch(step)) | learner.optim_step(key, 1e-2)
    return list(metrics.values())


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond `limit` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def new_learner(model: Path) -> Learner:
    return policy_learner(policy_forward(model, max_tokens=30), ADAMW)


def save_and_go_on(model: Path, folder: Path, tensor: int, data: int) -> list[list[float]]:
    """Saves before the first and after the second update; returns what the next ones report."""
    initialize_parallel(tensor, data)
    learner = new_learner(model)
    save(learner, folder / "new")
    first = [update(learner, step) for step in (0, 1)]
    save(learner, folder / "two")
    then = [update(learner, step) for step in (2, 3)]
    limit = 100_000 if dist.get_rank() == 1 else resource.RLIM_INFINITY
    with full_disk(limit), pytest.raises(CheckpointError, match="was not written"):  # on rank 0, too
        save(learner, folder / "three")
    assert not (folder / "three").exists()

    resumed = new_learner(model)
    load(resumed, folder / "two")
    assert resumed.num_updates == 2
    assert [update(resumed, step) for step in (2, 3)] == then
    load(resumed, folder / "new")  # back to before the first update: no optimizer state
    assert [update(resumed, step) for step in (0, 1)] == first
    return then


def resume_alone(model: Path, other_model: Path, folder: Path, expected: list[list[float]]) -> None:
    """Loads on one rank what another layout saved; then runs into a full disk."""
    initialize_parallel(tensor=1, data=1)
    learner = new_learner(model)
    load(learner, folder / "two")
    np.testing.assert_allclose([update(learner, step) for step in (2, 3)], expected, rtol=1e-3, atol=1e-5)

    kept = {file.name: file.read_bytes() for file in (folder / "two").iterdir()}
    for limit in (
        1000,
        100_000,
    ):  # bytes of any one file: in the first file that is written, in the tensors
        with full_disk(limit), pytest.raises(CheckpointError, match=r"not written: .* bytes are free"):
            save(learner, folder / "two")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save(learner, folder / "two" / "metadata.json" / "three")
    assert sorted(path.name for path in folder.iterdir()) == ["new", "two"]
    assert {file.name: file.read_bytes() for file in (folder / "two").iterdir()} == kept
    load(learner, folder / "two")
    assert learner.num_updates == 2

    with pytest.raises(UserError, match="does not fit this model"):
        load(new_learner(other_model), folder / "two")


def test_resume_is_exact_and_any_layout_loads(tmp_path: Path, tiny_qwen2: Path, tiny_qwen3: Path) -> None:
    reported = run_ranks(save_and_go_on, 2, tiny_qwen2, tmp_path, 2, 1)
    assert reported[0] == reported[1]
    run_ranks(resume_alone, 1, tiny_qwen2, tiny_qwen3, tmp_path, reported[0])
