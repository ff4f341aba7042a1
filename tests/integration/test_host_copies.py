"""How often the trainer copies from the host to the device, on PyTorch's device without memory.

An operation that waits for the device, such as reading a number, raises an error there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from atoll.config.schema import KLConfig, ParallelConfig
from atoll.runtime.model_spec import read_spec, with_value_head
from atoll.trainer.batch import Selection
from atoll.trainer.losses.loss import ppo_clip
from atoll.trainer.megatron import cpu_compat
from atoll.trainer.megatron import forward as forward_module
from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.forward import Budget, Forward
from atoll.trainer.megatron.hf import load_model
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.megatron.upload import packed, upload
from atoll.trainer.objective import (
    Objective,
    PolicyObjective,
    PolicySettings,
    SupervisedObjective,
    ValueObjective,
)
from atoll.wire.types import Batch, PolicyBatch, StepKey, SupervisedBatch, ValueBatch
from tests.attention_trees import draw_tree
from tests.torch_ranks import run_ranks

META = torch.device("meta")
KEY = StepKey("a3f0", 0, 0, "actor")


class HostCopies(TorchDispatchMode):
    """Counts operations from tensors of the host to tensors of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        devices = [
            {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
            for tree in ((args, kwargs), result)
        ]
        if "cpu" in devices[0] and "meta" in devices[1]:
            self.operations.append(str(func))
        return result


def on_meta(folder: Path, head: str = "language") -> Forward:
    spec = read_spec(folder)
    with cpu_compat.apply():
        model = load_model(folder, spec if head == "language" else with_value_head(spec), ModelSettings())
    model.chunks[0].to(META)
    return Forward(model, Budget(60, 60), BACKENDS["shared_prefix"], 1.0)


def batches() -> tuple[PolicyBatch, SupervisedBatch, ValueBatch]:
    tree = draw_tree(0)
    numbers = np.ones(len(tree.segments.token_ids), np.float32)
    weights = np.where(tree.samples >= 0, numbers, 0).astype(np.float32)
    return (
        PolicyBatch(
            tree.segments,
            samples=tree.samples,
            loss_weights=weights,
            advantages=numbers,
            rollout_logprobs=numbers,
            old_logprobs=numbers,
            ref_logprobs=numbers,
        ),
        SupervisedBatch(tree.segments, loss_weights=weights),
        ValueBatch(tree.segments, loss_weights=weights, values=numbers, returns=numbers),
    )


def copies_of_training(forward: Forward, objective: Objective, batch: Batch) -> tuple[int, int]:
    """Copies, and micro-batches."""
    parts = forward.microbatches(objective.prepare(KEY, batch))

    def last(inputs: Any, hidden_tH: Tensor) -> Tensor:
        terms = objective.terms(inputs, hidden_tH)
        return (terms.weights_N * terms.loss_N).sum()

    with HostCopies() as copies:
        forward.run(parts, objective.inputs, last, backward=True)
    return len(copies.operations), len(parts)


class ComputedError(Exception):
    """All micro-batches have been computed; what follows reads their numbers."""


def copies_of_computing(forward: Forward, compute: Callable[..., Any]) -> tuple[int, int]:
    def computed(*_: object) -> None:
        raise ComputedError

    parts: list[Selection] = []
    run = forward.run

    def record(given: list[Selection], *rest: Any, **named: Any) -> None:
        parts.extend(given)
        run(given, *rest, **named)

    with pytest.MonkeyPatch.context() as patch, HostCopies() as copies:
        patch.setattr(forward_module, "reduce_over_replicas", computed)
        patch.setattr(forward, "run", record)
        with pytest.raises(ComputedError):
            compute(draw_tree(0).segments)
    return len(copies.operations), len(parts)


def check(folder: Path) -> None:
    initialize_parallel(ParallelConfig())
    policy, reference, critic = on_meta(folder), on_meta(folder), on_meta(folder, "value")
    trained, supervised, valued = batches()
    for estimator in ("k3", "full"):
        settings = PolicySettings(ppo_clip, entropy_coef=0.1, kl=KLConfig(estimator=estimator))
        objective = PolicyObjective(policy, settings, reference)
        for batch in (trained, replace(trained, old_logprobs=None)):
            copies, num_parts = copies_of_training(policy, objective, batch)
            assert copies == 2 * num_parts > 2
    for forward, each, batch in (
        (policy, SupervisedObjective(policy), supervised),
        (critic, ValueObjective(critic, "critic", 0.5), valued),
    ):
        copies, num_parts = copies_of_training(forward, each, batch)
        assert copies == 2 * num_parts > 2
    for forward, compute in ((policy, policy.compute_logprobs), (critic, critic.compute_values)):
        copies, num_parts = copies_of_computing(forward, compute)
        assert copies == num_parts > 1  # no numbers but integers


def test_a_microbatch_is_two_copies(tiny_qwen2: Path) -> None:
    """The assertions are in check, on its rank."""
    run_ranks(check, 1, tiny_qwen2)


def test_two_copies_keep_values_types_and_shapes() -> None:
    sent = (
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        None,
        (torch.tensor([False, True]), torch.tensor([[0.5]]), 7),
        torch.zeros(0),
        torch.tensor([5]),
    )
    with HostCopies() as copies:
        upload(sent, META)
    assert len(copies.operations) == 2
    got = packed(sent, torch.device("cpu"))
    assert got[1] is None
    assert got[2][2] == 7
    for each, expected in zip(tree_leaves(got), tree_leaves(sent), strict=True):
        if isinstance(each, Tensor):
            assert each.dtype == expected.dtype
            assert each.tolist() == expected.tolist()
