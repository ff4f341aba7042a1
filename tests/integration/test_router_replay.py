"""The trainer replays the experts that the local engine chose, on every layout.

Engine and trainer have routers whose experts are equal but for noise, and each its own noise: so they choose
different experts, as they do at near ties, and these say different things.
"""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.config.schema import OptimizerConfig, ParallelConfig
from atoll.coordinator.algorithm.experience import BatchLayout, lay_out
from atoll.rollout.engines.local import LocalEngine
from atoll.rollout.generate import Generator
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.weights.transport.shm import ShmReceiver
from atoll.wire.codec.batches import decode_forward_backward, encode_forward_backward
from atoll.wire.codec.trajectories import decode_payload, encode_payload
from atoll.wire.types import Group, PolicyBatch, Sampling, StepKey, Version
from tests.builders import group_id, prompt, turn_request
from tests.conftest import write_model
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

PROMPTS = [[7, 30, 12, 9, 41], [5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47]]
KEY = StepKey("a3f0", 1, 0, "actor")
FROZEN = OptimizerConfig(learning_rate=0.0)


def with_equal_experts(source: Path, folder: Path, seed: int) -> Path:
    """The model with routers whose experts differ by noise."""
    copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensor[:1] + 1e-6 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


async def generate(folder: Path) -> BatchLayout:
    """Three groups of three samples of 24 tokens, as they come over the wire."""
    engine = LocalEngine(
        folder,
        dtype=torch.float32,
        slots=8,
        max_length=64,
        version=Version("a3f0", 0),
        receiver=ShmReceiver(),
        records_routes=True,
    )
    generator = Generator(engine, "rollout-0", "1")
    groups = []
    for row, ids in enumerate(PROMPTS):
        request = turn_request(ids, group=group_id(row), indices=range(3), sampling=Sampling(24))
        done = [sample async for samples in generator.generate([request]) for sample in samples]
        samples = sorted(decode_payload(encode_payload(done)), key=lambda sample: sample.id)
        groups.append(Group(prompt(row, ids), tuple(samples)))
    await engine.close()
    return lay_out(groups)


def batch_of(layout: BatchLayout) -> PolicyBatch:
    """As it comes to the trainer."""
    weights_T = layout.loss_mask_T.astype(np.float32) / layout.loss_mask_T.sum()
    advantages_T = np.where(layout.loss_mask_T, np.sin(np.arange(len(weights_T))), 0).astype(np.float32)
    batch = PolicyBatch(
        layout.segments, layout.sample_T, weights_T, advantages_T, layout.rollout_logprobs_T, None, None
    )
    received = decode_forward_backward(list(encode_forward_backward(KEY, batch)))
    assert isinstance(received, PolicyBatch)
    return received


def train(
    folder: Path, layout: BatchLayout, parallel: ParallelConfig, recompute: str
) -> tuple[float, float, float]:
    """The largest difference between the engine's logprobs and the trainer's with replay and without it, and
    the norm of the gradient with it, over several micro-batches."""
    initialize_parallel(parallel)
    settings = ModelSettings(sequence_parallel=parallel.sequence, recompute=recompute)  # type: ignore[arg-type]
    forward = policy_forward(folder, max_tokens=90, settings=settings)
    batch = batch_of(layout)
    learner = policy_learner(forward, FROZEN)
    learner.forward_backward(KEY, batch)
    norm = learner.optim_step(KEY, 0.0)["actor/grad_norm"]
    replayed, own = (
        np.abs(forward.compute_logprobs(segments) - batch.rollout_logprobs)[layout.loss_mask_T].max()
        for segments in (batch.segments, replace(batch.segments, routes=None))
    )
    return float(replayed), float(own), norm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the engine and of the trainer."""
    folder = tmp_path_factory.mktemp("replay")
    source = write_model(
        folder / "source", "qwen3_moe", num_experts=8, num_hidden_layers=4, norm_topk_prob=True
    )
    engine, trainer = map(partial(with_equal_experts, source), (folder / "1", folder / "2"), (1, 2))
    return engine, trainer


@pytest.fixture(scope="module")
def layout(folders: tuple[Path, Path]) -> BatchLayout:
    return asyncio.run(generate(folders[0]))


@pytest.fixture(scope="module")
def norm(folders: tuple[Path, Path], layout: BatchLayout) -> float:
    """Of the gradient, with replay on one rank."""
    ((replayed, own, norm),) = run_ranks(train, 1, folders[1], layout, ParallelConfig(), "none")
    assert replayed <= 1e-5 < 0.1 < own
    return norm


def test_replay_removes_the_difference(norm: float) -> None:
    """The fixture asserts it."""
    assert norm > 0


def test_prompts_and_responses_are_recorded_but_for_the_last_token(layout: BatchLayout) -> None:
    """Of a prompt's tokens, what the last layer says is of no use, but after the last one."""
    segments, routes = layout.segments, layout.segments.routes
    assert routes is not None
    is_known_TY = (routes < 8).all(2)
    for first, end, parent in zip(segments.offsets, segments.offsets[1:], segments.parents, strict=False):
        assert is_known_TY[first : end - 1, :-1].all()
        assert is_known_TY[end - 1].all() == (parent == -1)
        assert is_known_TY[first : end - 1, -1].all() == (parent != -1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "recompute"),
    [
        (ParallelConfig(tensor=2, sequence=True, expert=2), "selective"),
        (ParallelConfig(pipeline=2, virtual_pipeline=2, context=2), "full"),
    ],
    ids=["tp2_sp_ep2", "pp2_vpp2_cp2_recompute"],
)
def test_every_layout_replays_the_same(
    folders: tuple[Path, Path], layout: BatchLayout, norm: float, parallel: ParallelConfig, recompute: str
) -> None:
    for replayed, own, its_norm in run_ranks(
        train, parallel.world_size, folders[1], layout, parallel, recompute
    ):
        assert replayed <= 1e-5 < 0.1 < own
        assert its_norm == pytest.approx(norm, rel=1e-5)
