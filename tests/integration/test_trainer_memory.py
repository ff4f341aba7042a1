"""The trainer's memory: recomputation, offloading, half-precision weights.

Letters in shapes: T tokens.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atoll.config.schema import OptimizerConfig, ParallelConfig
from atoll.trainer.checkpoint import Checkpointer
from atoll.trainer.megatron import activation_offload
from atoll.trainer.megatron.activation_offload import HostCopy
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.offload import MemoryKind, ModelOffloader
from atoll.trainer.step import Learner
from atoll.wire.types import StepKey, SupervisedBatch
from tests.allocations import Allocations, nbytes
from tests.attention_trees import draw_tree
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

pytestmark = pytest.mark.long  # each starts ranks

BF16 = ModelSettings(dtype=torch.bfloat16)
STEPS, NUM_GROUPS = 3, 8
ADAMW = OptimizerConfig(learning_rate=1e-4, weight_decay=0.1, max_grad_norm=0.5)


def key(step: int) -> StepKey:
    return StepKey("a3f0", step, 0, "actor")


def batch(seed: int) -> SupervisedBatch:
    tree = draw_tree(seed, NUM_GROUPS)
    weights = np.where(tree.samples >= 0, 1 / len(tree.trained), 0).astype(np.float32)
    return SupervisedBatch(tree.segments, weights)


def gradients(learner: Learner) -> torch.Tensor:
    return torch.cat([p.main_grad.flatten() for p in learner.model.parameters]).clone()


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.model.parameters]).clone()


def check_offload(folder: Path, target: Path, settings: ModelSettings, optimizer: OptimizerConfig) -> None:
    """One learner is offloaded whenever possible, another never: they stay equal bit for bit."""
    initialize_parallel(ParallelConfig(data=2 if optimizer.distributed else 1))
    moving, staying = (policy_learner(policy_forward(folder, settings=settings), optimizer) for _ in range(2))
    memory, checkpoints = ModelOffloader(moving.model, moving), Checkpointer()
    parameter = next(moving.model.parameters)
    view = parameter.detach().view(-1)[2:]  # as a Publisher holds them
    in_view = view.clone()
    num_parameters = sum(p.numel() for p in moving.model.parameters)

    freed = memory.offload()
    if not optimizer.distributed:  # whose buffers are padded
        at_start = {torch.float32: 4 + 4, torch.bfloat16: 2 + 4 + 4}[
            settings.dtype
        ]  # weight, gradient, master
        assert freed == at_start * num_parameters
    assert memory.offload() == 0
    assert nbytes([*moving.model.parameters]) == 0
    memory.onload(MemoryKind.PARAMETERS)
    assert torch.equal(view, in_view)

    for step in range(3):
        memory.onload(MemoryKind.PARAMETERS, MemoryKind.GRADIENTS)
        first = moving.forward_backward(key(step), batch(step))
        accumulated = gradients(moving)
        memory.offload()
        memory.onload(MemoryKind.GRADIENTS)
        assert nbytes([*moving.model.parameters]) == 0
        assert torch.equal(gradients(moving), accumulated)
        memory.onload(*MemoryKind)
        assert first == staying.forward_backward(key(step), batch(step))
        assert moving.optim_step(key(step), ADAMW.learning_rate) == staying.optim_step(
            key(step), ADAMW.learning_rate
        )
        if step == 1:
            memory.offload()
            memory.onload(MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER)
            written = checkpoints.save(moving, target, memory.locate)
            memory.offload()  # during the write, which must not have pinned the memory
            written.result(timeout=60)
            from_host = checkpoints.save(moving, target.with_name("host"), memory.locate)
            assert nbytes([*moving.model.parameters]) == 0  # others may use the device
            memory.onload(*MemoryKind)
            from_host.result(timeout=60)
        memory.offload()
        inner = moving.optimizer.chained_optimizers[0].optimizer
        moments = [value for state in inner.state.values() for value in state.values()]
        assert len(moments) >= 2
        assert nbytes(moments) == nbytes([p for group in inner.param_groups for p in group["params"]]) == 0
        assert nbytes([p.main_grad for p in moving.model.parameters]) == 0
    memory.onload(*MemoryKind)
    assert torch.equal(weights(moving), weights(staying))
    assert torch.equal(view, parameter.detach().view(-1)[2:])
    assert not torch.equal(view, in_view)  # it was trained

    memory.offload()
    memory.onload(*MemoryKind)
    for path in (target, target.with_name("host")):
        checkpoints.load(moving, path)
        moving.forward_backward(key(2), batch(2))
        moving.optim_step(key(2), ADAMW.learning_rate)
        assert torch.equal(weights(moving), weights(staying))
    checkpoints.close()


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [(ModelSettings(), ADAMW), (BF16, ADAMW.model_copy(update={"distributed": True}))],
    ids=["fp32", "bf16-distributed"],
)
def test_training_goes_on_to_the_bit_after_an_offload(
    tiny_qwen2: Path, tmp_path: Path, settings: ModelSettings, optimizer: OptimizerConfig
) -> None:
    """The assertions are in check_offload, on every rank."""
    world = 2 if optimizer.distributed else 1
    run_ranks(check_offload, world, tiny_qwen2, tmp_path / "saved", settings, optimizer)


@dataclass(frozen=True)
class Loop:
    losses: list[float]
    grad_norms: list[float]
    embedding: torch.Tensor  # in float32, at the end
    moved: float  # by how much its elements changed on average


def plain_loop(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Loop:
    """transformers on padded rows; AdamW on float32 copies, from which the weights are rounded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    masters = [p.detach().clone().float() for p in model.parameters()]
    begin = masters[0].clone()  # of the embedding
    optimizer = torch.optim.AdamW(masters, lr=ADAMW.learning_rate, weight_decay=ADAMW.weight_decay)
    losses, norms = [], []
    for step in range(STEPS):
        tree = draw_tree(step, NUM_GROUPS)
        ids_RL = tree.ids_RL.to(device)
        logits = model(input_ids=ids_RL, attention_mask=tree.mask_RL.to(device)).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(-1, ids_RL[:, 1:, None])[..., 0]
        rows, columns = tree.row_T[tree.trained], tree.column_T[tree.trained]
        loss = -logprobs[rows, columns - 1].mean()
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters, ADAMW.max_grad_norm)))
        losses.append(loss.item())
        optimizer.step()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.data.copy_(master)
    return Loop(losses, norms, masters[0].cpu(), (masters[0] - begin).abs().mean().item())


def check_half_precision(folder: Path, half: Loop, single: Loop, data: int) -> str:
    """bfloat16 has 8 significant bits: a rounding error is at most 2**-9 = 0.2 % of a number, and packed rows
    round in a different order than padded ones. Losses are sums over hundreds of tokens, and norms over
    thousands of weights, which average the errors out to a fifth of that, and to that.

    At this learning rate an update is half the distance between neighbouring bfloat16 numbers of a weight's
    size: without float32 copies most of it would be lost. Elements with almost no gradient may go either way.
    Returns the type of the device that it ran on.
    """
    initialize_parallel(ParallelConfig(data=data))
    optimizer = ADAMW.model_copy(update={"distributed": data > 1})
    learner = policy_learner(policy_forward(folder, max_tokens=10_000, settings=BF16), optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        losses.append(learner.forward_backward(key(step), batch(step))["actor/nll_loss"])
        assert {p.main_grad.dtype for p in learner.model.parameters} == {torch.float32}
        norms.append(learner.optim_step(key(step), ADAMW.learning_rate)["actor/grad_norm"])
    assert {p.dtype for p in learner.model.parameters} == {torch.bfloat16}
    for loop in (half, single):
        np.testing.assert_allclose(losses, loop.losses, rtol=4e-4)
        np.testing.assert_allclose(norms, loop.grad_norms, rtol=2e-3)
    if data == 1:
        embedding = learner.model.chunks[0].embedding.word_embeddings.weight
        apart = (embedding.main_param.cpu() - half.embedding).abs().mean().item()
        assert apart < 0.1 * half.moved
        assert torch.equal(embedding.detach(), embedding.main_param.bfloat16())
    return learner.forward.device.type


@pytest.mark.parametrize("data", [1, 2])
def test_bfloat16_weights_with_float32_masters_equal_a_plain_loop(tiny_qwen2: Path, data: int) -> None:
    """The assertions are in check_half_precision, on every rank."""
    half, single = (plain_loop(tiny_qwen2, dtype) for dtype in (torch.bfloat16, torch.float32))
    assert run_ranks(check_half_precision, data, tiny_qwen2, half, single, data) == ["cpu"] * data


def kept_and_peak(learner: Learner) -> tuple[int, int]:
    """Bytes that a forward pass keeps, and the peak until its backward pass has ended."""
    objective, kept = learner._objectives[SupervisedBatch], []

    def last(inputs: Any, hidden_tH: torch.Tensor) -> torch.Tensor:
        kept.append(allocations.live)
        terms = objective.terms(inputs, hidden_tH)
        return (terms.weights_N * terms.loss_N).sum()

    with Allocations() as allocations:
        learner.forward.run(learner.forward.microbatches(batch(0)), objective.inputs, last, backward=True)
    return kept[0], allocations.peak


def check_recomputation(folder: Path) -> None:
    """Bit-identical gradients with less memory; test_memory_plan.py computes how much less."""
    initialize_parallel(ParallelConfig())
    sizes, vectors, on_host = [], [], []

    class RecordedCopy(HostCopy):
        def __init__(self, storage: torch.UntypedStorage, device: torch.device) -> None:
            on_host.append(storage.nbytes())
            super().__init__(storage, device)

    activation_offload.HostCopy = RecordedCopy  # type: ignore[misc]  # of this process, which ends
    for recompute in ("none", "selective", "full", "offload"):
        settings = ModelSettings(recompute=recompute)
        learner = policy_learner(policy_forward(folder, max_tokens=10_000, settings=settings), ADAMW)
        sizes.append(kept_and_peak(learner))
        vectors.append(gradients(learner))
    for vector in vectors[1:]:
        assert torch.equal(vector, vectors[0])
    (none, peak_none), (selective, peak_selective), (full, peak_full), (offload, _) = sizes
    assert none > 1.25 * selective > 2.5 * full
    assert peak_none > peak_selective > peak_full
    assert offload == none  # the same tensors: here, both memories are the host's
    assert offload - sum(on_host) < full


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_recomputation_changes_no_gradient(request: pytest.FixtureRequest, family: str) -> None:
    """The assertions are in check_recomputation."""
    run_ranks(check_recomputation, 1, request.getfixturevalue(f"tiny_{family}"))
