"""Checkpoints: exact resume, every layout loads every other's, writing beside training, full disks."""

import json
import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

from atoll.config.schema import LoraConfig, OptimizerConfig, ParallelConfig
from atoll.runtime.errors import CheckpointError, DamagedCheckpointError, UserError
from atoll.runtime.ports import reserve_port
from atoll.trainer.checkpoint import Checkpointer, CheckpointWrite
from atoll.trainer.megatron.model import ModelSettings, initialize_parallel
from atoll.trainer.step import Learner
from atoll.wire.types import PolicyBatch, Segments, StepKey
from tests.conftest import write_model
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward, policy_learner

pytestmark = pytest.mark.long

# an epsilon that keeps Adam from making large steps of rounding errors, so that layouts stay comparable
ADAMW = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, eps=1e-3)
DISTRIBUTED = ADAMW.model_copy(update={"distributed": True})
BF16 = ModelSettings(torch.bfloat16)
FP32 = ModelSettings()
LAYOUTS = {
    "tensor": (ParallelConfig(tensor=2), ADAMW, FP32),
    "pipeline": (ParallelConfig(pipeline=2), ADAMW, FP32),
    "virtual stages": (ParallelConfig(pipeline=2, virtual_pipeline=2), ADAMW, FP32),
    "data": (ParallelConfig(data=2), ADAMW, FP32),
    "distributed": (ParallelConfig(data=2), DISTRIBUTED, FP32),
    "distributed bf16": (ParallelConfig(data=2), DISTRIBUTED, BF16),
    "tensor bf16": (ParallelConfig(tensor=2), ADAMW, BF16),
}


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


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The whole tensors of a checkpoint, read without anything of ours."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load_state_dict(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def assert_equal(one: Path, other: Path) -> None:
    theirs, ours = tensors_of(one), tensors_of(other)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert torch.equal(tensor, ours[name]), name


@contextmanager
def layout(parallel: ParallelConfig, port: int) -> Iterator[Checkpointer]:
    """This process's ranks, arranged anew."""
    os.environ["MASTER_PORT"] = str(port)
    initialize_parallel(parallel)
    checkpointer = Checkpointer()
    yield checkpointer
    checkpointer.close()
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file of this process may grow beyond `limit` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def new_learner(model: Path, optimizer: OptimizerConfig = ADAMW, settings: ModelSettings = FP32) -> Learner:
    return policy_learner(policy_forward(model, max_tokens=30, settings=settings), optimizer)


def save_after_updates(
    checkpointer: Checkpointer, learner: Learner, path: Path, first: int, last: int
) -> "Future[CheckpointWrite]":
    """A save whose writing begins only when updates `first` to `last` have changed everything."""
    gate = threading.Event()
    checkpointer._thread.submit(gate.wait)
    writing = checkpointer.save(learner, path)
    for step in range(first, last + 1):
        update(learner, step)
    assert not path.exists()
    gate.set()
    return writing


def check_resume(model: Path, folder: Path, name: str, port: int) -> list[list[float]]:
    """Saves before the first and after the second update; returns what the next ones report."""
    parallel, optimizer, settings = LAYOUTS[name]
    with layout(parallel, port) as checkpointer:
        learner = new_learner(model, optimizer, settings)
        checkpointer.save(learner, folder / name / "new").result()
        first = [update(learner, step) for step in (0, 1)]
        checkpointer.save(learner, folder / name / "two").result()
        save_after_updates(checkpointer, learner, folder / name / "beside", 5, 6).result()
        if dist.get_rank() == 0:
            assert_equal(folder / name / "two", folder / name / "beside")

        checkpointer.load(learner, folder / name / "two")
        writing = checkpointer.save(learner, folder / name / "again")
        then = [update(learner, step) for step in (2, 3)]  # while it is written
        writing.result()
        resumed = new_learner(model, optimizer, settings)
        checkpointer.load(resumed, folder / name / "again")
        assert resumed.num_updates == 2
        assert [update(resumed, step) for step in (2, 3)] == then
        checkpointer.load(resumed, folder / name / "new")  # back to before the first update
        assert [update(resumed, step) for step in (0, 1)] == first
        return then


def check_layouts(model: Path, folder: Path, ports: list[int]) -> dict[str, list[list[float]]]:
    """Each layout resumes exactly; then each loads what the others of its dtype saved."""
    free = iter(ports)
    then = {name: check_resume(model, folder, name, next(free)) for name in LAYOUTS}
    for name, (parallel, optimizer, settings) in LAYOUTS.items():
        with layout(parallel, next(free)) as checkpointer:
            learner = new_learner(model, optimizer, settings)
            for other, (_, _, theirs) in LAYOUTS.items():
                if other != name and theirs == settings:
                    check_load(checkpointer, learner, folder, other, then)
            if name == "distributed":
                check_full_disk(checkpointer, learner, folder / "none")
    return then


def check_load(
    checkpointer: Checkpointer, learner: Learner, folder: Path, name: str, then: dict[str, list[list[float]]]
) -> None:
    """Loads what layout `name` saved: nothing of it is lost, and the next updates are the same."""
    checkpointer.load(learner, folder / name / "two")
    checkpointer.save(learner, folder / "copy").result()
    if dist.get_rank() == 0:
        assert_equal(folder / name / "two", folder / "copy")
    is_bf16 = next(learner.model.parameters).dtype is torch.bfloat16
    tolerance = 5e-2 if is_bf16 or "bf16" in name else 1e-5
    np.testing.assert_allclose(
        [update(learner, step) for step in (2, 3)], then[name], rtol=tolerance, atol=tolerance
    )


def check_full_disk(checkpointer: Checkpointer, learner: Learner, path: Path) -> None:
    """One rank's disk is full while it writes: every rank gets the error, and training goes on."""
    limit = 20_000 if dist.get_rank() == dist.get_world_size() - 1 else resource.RLIM_INFINITY
    with full_disk(limit):
        writing = checkpointer.save(learner, path)
        update(learner, 0)
        with pytest.raises(CheckpointError, match=r"not written: OSError: .* bytes are free"):
            writing.result()
    if dist.get_rank() == 0:
        assert not path.exists()
        assert not path.with_name(path.name + ".partial").exists()


def check_adapters(checkpointer: Checkpointer, model: Path, folder: Path) -> None:
    """Frozen weights are not saved, and adapters go only on top of those that they were trained on."""
    learner = new_learner(model, settings=ModelSettings(lora=LoraConfig()))
    update(learner, 0)
    checkpointer.save(learner, folder / "adapters").result()
    assert all(".lora_" in name for name in tensors_of(folder / "adapters"))
    with pytest.raises(UserError, match="holds all weights, expected adapters on top of weights"):
        checkpointer.load(learner, folder / "tensor" / "two")
    frozen = next(weights for weights in learner.model.parameters if not weights.requires_grad)
    frozen.detach()[0, 0] += 1
    with pytest.raises(UserError, match=r"holds adapters on top of weights with checksum .*, expected"):
        checkpointer.load(learner, folder / "adapters")


def check_alone(model: Path, other_model: Path, folder: Path, then: dict[str, list[list[float]]]) -> None:
    """One rank loads what two have saved, in either dtype; then runs into full disks and wrong folders."""
    with layout(ParallelConfig(), int(os.environ["MASTER_PORT"])) as checkpointer:
        learner = new_learner(model)
        for name in LAYOUTS:
            check_load(checkpointer, learner, folder, name, then)

        two = folder / "tensor" / "two"
        kept = {file.name: file.read_bytes() for file in two.iterdir()}
        for limit in (1000, 100_000):  # bytes of any one file: in the first that is written, in the tensors
            with full_disk(limit), pytest.raises(CheckpointError, match=r"not written: .* bytes are free"):
                checkpointer.save(learner, two).result()
        with pytest.raises(CheckpointError, match="NotADirectoryError"):
            checkpointer.save(learner, two / "trainer.json" / "three").result()
        assert {file.name: file.read_bytes() for file in two.iterdir()} == kept
        checkpointer.load(learner, two)
        assert learner.num_updates == 2

        with pytest.raises(
            UserError, match=r"does not fit this model: .*its qk_norm is False, expected True"
        ):
            checkpointer.load(new_learner(other_model), two)
        check_adapters(checkpointer, model, folder)
        (two / ".metadata").rename(two / "metadata")
        with pytest.raises(DamagedCheckpointError, match=r"is damaged: .*No such file"):
            checkpointer.load(learner, two)


def check_experts(model: Path, folder: Path, ports: list[int]) -> None:
    """Two ranks with half of the experts each, then two with all, then the first two again."""
    split, copied = ParallelConfig(expert=2, data=2), ParallelConfig(tensor=2, sequence=True)
    then: dict[str, list[list[float]]] = {}
    for step, (parallel, port) in enumerate(zip((split, copied, split), ports, strict=True)):
        settings = ModelSettings(sequence_parallel=parallel.sequence)
        with layout(parallel, port) as checkpointer:
            learner = new_learner(model, DISTRIBUTED, settings)
            if step:
                check_load(checkpointer, learner, folder, str(step - 1), then)
                checkpointer.load(learner, folder / str(step - 1) / "two")
            else:
                update(learner, 1)
            checkpointer.save(learner, folder / str(step) / "two").result()
            then[str(step)] = [update(learner, number) for number in (2, 3)]


def test_experts_go_to_any_number_of_ranks(tmp_path: Path) -> None:
    """Under the names, and in the shapes [layer, expert, ...], of Megatron's own experts."""
    model = write_model(tmp_path / "model", "qwen3_moe", norm_topk_prob=True)
    with ExitStack() as stack:
        ports = [stack.enter_context(reserve_port()) for _ in range(3)]
        run_ranks(check_experts, 2, model, tmp_path, ports)
    tensors = tensors_of(tmp_path / "0" / "two")
    experts = "decoder.layers.mlp.experts.experts"
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        assert tensors[f"{kind}.{experts}.linear_fc1.weight"].shape == (2, 4, 2 * 32, 64)
        assert tensors[f"{kind}.{experts}.linear_fc2.weight"].shape == (2, 4, 64, 32)


def test_every_layout_resumes_exactly_and_loads_every_other(tmp_path: Path, tiny_qwen3: Path) -> None:
    model = write_model(tmp_path / "model", "qwen2", num_hidden_layers=4, tie_word_embeddings=True)
    with ExitStack() as stack:
        ports = [stack.enter_context(reserve_port()) for _ in range(2 * len(LAYOUTS))]
        first, second = run_ranks(check_layouts, 2, model, tmp_path, ports)
    assert first == second
    assert json.loads((tmp_path / "tensor" / "two" / "trainer.json").read_text())["num_updates"] == 2
    run_ranks(check_alone, 1, model, tiny_qwen3, tmp_path, first)
