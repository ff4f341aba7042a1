"""The arithmetic of `atoll plan --memory` against what is allocated, storage by storage.

Segments of 64 tokens without a prefix, so that attention pads and repeats nothing.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from atoll.config.schema import OptimizerConfig, ParallelConfig, TrainerSection
from atoll.runtime.memory import RankMemory, rank_memory
from atoll.runtime.model_spec import read_spec
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.publish import DTYPES
from atoll.trainer.step import Learner
from atoll.wire.types import Segments, StepKey, SupervisedBatch
from tests.allocations import Allocations, nbytes
from tests.conftest import write_model
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

pytestmark = pytest.mark.long

NUM_SEGMENTS, LENGTH = 8, 64
KEY = StepKey("a3f0", 0, 0, "actor")


def batch() -> SupervisedBatch:
    num_tokens = NUM_SEGMENTS * LENGTH
    segments = Segments(
        np.random.default_rng(0).integers(3, 64, num_tokens).astype(np.int32),
        np.arange(0, num_tokens + 1, LENGTH),
        np.full(NUM_SEGMENTS, -1, np.int32),
        np.arange(NUM_SEGMENTS, dtype=np.int32),
    )
    weights = np.full(num_tokens, 1 / num_tokens, np.float32)
    weights[segments.offsets[:-1]] = 0
    return SupervisedBatch(segments, weights)


def allocated(folder: Path, section: TrainerSection) -> tuple[RankMemory, int]:
    """What an update takes on this rank; and at its peak, beside what is there all the time."""
    settings = ModelSettings(DTYPES[section.dtype], section.parallel.sequence, section.recompute)
    tokens = section.max_tokens_per_microbatch
    forward = policy_forward(folder, tokens, section.attention, settings=settings)
    learner = policy_learner(forward, section.optimizer)
    objective = learner._objectives[SupervisedBatch]
    (part,) = forward.microbatches(objective.prepare(KEY, batch()))
    kept = []

    def last(inputs: Any, hidden_tH: torch.Tensor) -> torch.Tensor:
        terms = objective.terms(inputs, hidden_tH)
        loss = (terms.weights_N * terms.loss_N).sum()
        kept.append(allocations.live)
        return loss

    with Allocations() as allocations:
        forward.run([part], objective.inputs, last, backward=True)
    learner.forward_backward(KEY, batch())
    learner.optim_step(KEY, 1e-4)
    parameters = [*learner.model.parameters]
    gradients = nbytes(p.main_grad for p in parameters) + max(p.nbytes for p in parameters)
    return RankMemory(
        nbytes(parameters), gradients, optimizer_bytes(learner), kept[0], 0, 0
    ), allocations.peak


def optimizer_bytes(learner: Learner) -> int:
    own = {p.untyped_storage()._cdata for p in learner.model.parameters}
    state = []
    for inner in (part.optimizer for part in learner.optimizer.chained_optimizers):
        if inner is None:  # this rank has no experts to update
            continue
        weights = [p for group in inner.param_groups for p in group["params"]]
        state += [p for p in weights if p.untyped_storage()._cdata not in own]
        state += [part for each in inner.state.values() for name, part in each.items() if name != "step"]
    return nbytes(state)


def check(folder: Path, sections: list[TrainerSection]) -> None:
    initialize_parallel(sections[0].parallel)
    for section in sections:
        got, peak = allocated(folder, section)
        planned = rank_memory(read_spec(folder), section, 0, "update")
        what = f"{section.dtype}, {section.recompute}"
        padding = 1e-2 if section.optimizer.distributed else 0  # of buckets, so that ranks share them evenly
        np.testing.assert_allclose(planned.parameters, got.parameters, rtol=padding, err_msg=what)
        np.testing.assert_allclose(planned.optimizer, got.optimizer, rtol=padding, err_msg=what)
        np.testing.assert_allclose(planned.gradients, got.gradients, rtol=padding, err_msg=what)
        np.testing.assert_allclose(planned.activations, got.activations, rtol=0.08, err_msg=what)
        # the arithmetic names the largest tensors of the moment: it errs upwards where they do not meet
        ratio = (planned.activations + planned.working) / peak
        assert 0.94 < ratio < 1.27, f"{what}: {ratio:.3f} of {peak} bytes"


def check_total(folder: Path, sections: list[TrainerSection]) -> None:
    """The peak of an update: what is always there, and what its forward and backward passes allocate."""
    initialize_parallel(sections[0].parallel)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for section in sections:
        settings = ModelSettings(DTYPES[section.dtype], section.parallel.sequence, section.recompute)
        tokens = section.max_tokens_per_microbatch
        forward = policy_forward(folder, tokens, section.attention, settings=settings)
        learner = policy_learner(forward, section.optimizer)
        learner.forward_backward(KEY, batch())
        learner.optim_step(KEY, 1e-4)
        with Allocations() as allocations:
            learner.forward_backward(replace(KEY, step=1), batch())
        parameters = [*learner.model.parameters]
        got = nbytes(parameters) + nbytes(p.main_grad for p in parameters) + optimizer_bytes(learner)
        got += allocations.peak
        planned = rank_memory(read_spec(folder), section, stage, "update")
        ratio = (planned.total - planned.framework - planned.fragmentation) / got
        assert 0.9 < ratio < 1.1, f"{section.recompute}, stage {stage}: {ratio:.3f} of {got} bytes"


def sections(parallel: ParallelConfig, dtypes: tuple[str, ...]) -> list[TrainerSection]:
    num_microbatches = 4 if parallel.pipeline > 1 else 1  # as many as are in flight at once, or more
    return [
        TrainerSection(
            parallel=parallel,
            dtype=dtype,
            recompute=recompute,
            max_tokens_per_microbatch=NUM_SEGMENTS * LENGTH // parallel.data // num_microbatches,
            attention="segments",
            optimizer=OptimizerConfig(distributed=parallel.data > 1),
        )
        for dtype in dtypes
        for recompute in ("none", "selective", "full")
    ]


@pytest.mark.parametrize(
    ("family", "parallel", "dtypes"),
    [
        ("qwen2", ParallelConfig(), ("float32", "bfloat16")),
        ("qwen3_moe", ParallelConfig(), ("float32", "bfloat16")),
        ("qwen3", ParallelConfig(tensor=2, sequence=True), ("bfloat16",)),
        ("qwen3", ParallelConfig(data=2), ("bfloat16",)),
    ],
    ids=["qwen2", "experts", "TP2+SP", "DP2+DistOpt"],
)
def test_planned_bytes_are_those_allocated(
    tmp_path: Path, family: str, parallel: ParallelConfig, dtypes: tuple[str, ...]
) -> None:
    """The assertions are in check, on every rank."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    folder = write_model(
        tmp_path, family, hidden_size=128, intermediate_size=384, **(experts if "moe" in family else {})
    )
    run_ranks(check, parallel.world_size, folder, sections(parallel, dtypes))


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tensor": 2, "sequence": True}),
        ("qwen3", {"pipeline": 2}),
        ("qwen3", {"pipeline": 2, "virtual_pipeline": 2}),
        ("qwen3", {"context": 2}),
        ("qwen3", {"pipeline": 2, "context": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 2}),
    ],
    ids=["1", "TP2+SP", "PP2", "PP2+VPP2", "CP2", "PP2+CP2", "DP2+EP2", "TP2+EP2"],
)
def test_a_plan_is_within_10_percent(tmp_path: Path, family: str, axes: dict[str, Any]) -> None:
    """The assertions are in check_total, on every rank."""
    parallel = ParallelConfig(**axes)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    shape = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    folder = write_model(tmp_path, family, **shape, **(experts if "moe" in family else {}))
    run_ranks(check_total, parallel.world_size, folder, sections(parallel, ("bfloat16",)))
