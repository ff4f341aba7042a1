"""Experts chosen by the local engine and replayed by the trainer, on every layout.

Both models have routers of nearly equal rows, equal but for noise: the choice of experts is the noise's, and what
they say differs. Segments come over the wire from real completions.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.config.schema import ParallelConfig
from atoll.coordinator.algorithm.experience import BatchLayout, lay_out
from atoll.rollout.engines.base import Completion
from atoll.rollout.engines.local import LocalEngine
from atoll.rollout.generate import Generator
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.wire.codec.trajectories import decode_payload, encode_payload
from atoll.wire.types import Group, PauseMode, Sampling, Trajectory, TurnRequest, Version
from atoll.weights.transport.shm import ShmReceiver
from tests.builders import group_id, prompt, turn_request
from tests.conftest import write_model
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward

PROMPTS = [[7, 30, 12, 9, 41], [5, 6, 7], [40, 41, 42, 43, 44, 45, 46, 47]]
NOISE = 1e-6  # of the routers


def perturbed(source: Path, folder: Path, seed: int) -> Path:
    """The model with routers whose experts are nearly equal."""
    copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor[:1] + NOISE * noise
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def engine_of(folder: Path) -> LocalEngine:
    return LocalEngine(
        folder,
        dtype=torch.float32,
        slots=8,
        max_length=128,
        version=Version("a3f0", 0),
        receiver=ShmReceiver(),
        records_routes=True,
    )


async def rollout(engine: LocalEngine, requests: Sequence[TurnRequest]) -> list[Trajectory]:
    """As they come over the wire."""
    generator = Generator(engine, "rollout-0", "1")
    samples = [sample async for samples in generator.generate(requests) for sample in samples]
    return sorted(decode_payload(encode_payload(samples)), key=lambda sample: sample.id)


async def generate(folder: Path) -> BatchLayout:
    """Three groups of three samples of 24 tokens."""
    engine = engine_of(folder)
    requests = [
        turn_request(ids, group=group_id(row), indices=range(3), sampling=Sampling(24))
        for row, ids in enumerate(PROMPTS)
    ]
    samples = await rollout(engine, requests)
    await engine.close()
    return lay_out(
        [Group(prompt(row, ids), tuple(samples[3 * row : 3 * row + 3])) for row, ids in enumerate(PROMPTS)]
    )


def differences(folder: Path, layout: BatchLayout, parallel: ParallelConfig) -> list[float]:
    """Of logprobs, trainer against engine: the largest with replay and without it, and of all routes random."""
    initialize_parallel(parallel)
    forward = policy_forward(folder, 90, settings=ModelSettings(sequence_parallel=parallel.sequence))
    found = []
    for segments in (layout.segments, replace(layout.segments, routes=None)):
        logprobs_T = forward.compute_logprobs(segments)
        found.append(float(np.abs(logprobs_T - layout.rollout_logprobs_T)[layout.loss_mask_T].max()))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of the engine and of the trainer."""
    folder = tmp_path_factory.mktemp("replay")
    write_model(folder / "source", "qwen3_moe", num_experts=8, num_hidden_layers=4, norm_topk_prob=True)
    return perturbed(folder / "source", folder / "engine", 1), perturbed(
        folder / "source", folder / "trainer", 2
    )


def test_replay(folders) -> None:
    layout = asyncio.run(generate(folders[0]))
    print(layout.segments.routes.shape, layout.segments.routes[:8, :, :].tolist())
    for parallel in (ParallelConfig(), ParallelConfig(tensor=2, sequence=True), ParallelConfig(pipeline=2, virtual_pipeline=2), ParallelConfig(context=2), ParallelConfig(expert=2,data=2)):
        print(parallel, run_ranks(differences, parallel.world_size, folders[1], layout, parallel))
