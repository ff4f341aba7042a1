"""Every model family on several layouts against transformers: log-probabilities on load, and export.

One launch per layout makes all its assertions.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from atoll.config.schema import ParallelConfig
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import read_spec
from atoll.trainer.megatron import cpu_compat, hf
from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.forward import Budget, Forward
from atoll.trainer.megatron.model import MegatronModel, ModelSettings, initialize_parallel
from atoll.trainer.megatron.shards import shard_layout
from atoll.wire.types import Float32, Segments
from tests.attention_trees import draw_tree
from tests.conftest import write_model
from tests.torch_ranks import run_ranks
from tests.trainer_models import policy_forward


def sequences(segments: Segments) -> list[np.ndarray]:
    """Token indices of each segment's whole sequence, from the root to the segment's end."""
    paths: list[np.ndarray] = []
    for s, parent in enumerate(segments.parents):
        own = np.arange(segments.offsets[s], segments.offsets[s + 1])
        paths.append(np.concatenate([paths[parent], own]) if parent >= 0 else own)
    return paths


def reference_logprobs(folder: Path, segments: Segments) -> Float32:
    """[T] transformers' log-probability of each token; 0 for the first token of a root."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs_T = np.zeros(len(segments.token_ids), np.float32)
    for path in sequences(segments):
        ids = torch.from_numpy(segments.token_ids[path]).long()
        with torch.no_grad():
            table = torch.log_softmax(model(ids[None]).logits[0, :-1], -1)
        logprobs_T[path[1:]] = table.gather(-1, ids[1:, None])[:, 0].numpy()
    return logprobs_T


def check_family(folder: Path, target: Path, segments: Segments, expected_T: Float32, sequence: bool) -> None:
    forward = policy_forward(folder, settings=ModelSettings(sequence_parallel=sequence))
    np.testing.assert_allclose(forward.compute_logprobs(segments), expected_T, rtol=0, atol=1e-5)
    num_bytes = hf.export_hf(forward.model, target)
    dist.barrier()
    if dist.get_rank() > 0:
        assert num_bytes == 0
        return
    files = sorted(target.glob("*.safetensors"))
    assert num_bytes == sum(file.stat().st_size for file in files)
    named = json.loads((target / hf.INDEX).read_text())["weight_map"]
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    source = load_file(folder / "model.safetensors")
    assert len(files) > 1
    assert written.keys() == source.keys() == named.keys()
    for name, tensor in source.items():
        assert torch.equal(written[name], tensor), name


def check_value_family(folder: Path, target: Path, segments: Segments, expected_T: Float32) -> None:
    spec = read_spec(folder, ("value",))
    with cpu_compat.apply():
        model = hf.load_model(folder, spec, ModelSettings())
    forward = Forward(model, Budget(60, 100), BACKENDS["shared_prefix"], 1.0)
    np.testing.assert_allclose(forward.compute_values(segments), expected_T, rtol=1e-5, atol=1e-5)  # up to 18
    hf.export_hf(model, target)
    assert read_spec(target, ("value",)) == spec
    source = load_file(folder / "model.safetensors")
    written = load_file(target / "model.safetensors")
    assert written.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(written[name], tensor), name


def names_the_unknown(model: MegatronModel) -> None:
    model.output.register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(UserError, match=r"parameter 0\.extra has no Hugging Face name"):
        shard_layout(model)


def check_values(folders: list[Path], expected: list[Float32], target: Path) -> None:
    initialize_parallel(ParallelConfig())
    for folder, expected_T in zip(folders, expected, strict=True):
        check_value_family(folder, target / folder.name, draw_tree(0).segments, expected_T)
    names_the_unknown(policy_forward(folders[0].with_name("policy")).model)


def check_layout(
    parallel: ParallelConfig, folders: list[Path], expected: list[Float32], target: Path
) -> None:
    initialize_parallel(parallel)
    hf.FILE_BYTES = 100_000
    for folder, expected_T in zip(folders, expected, strict=True):
        check_family(folder, target / folder.name, draw_tree(0).segments, expected_T, parallel.sequence)


DENSE = ("qwen2_tied", "qwen3", "llama", "llama3")
MOE = ("qwen3_moe", "qwen3_moe_plain")


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "families"),
    [
        (ParallelConfig(), (*DENSE, *MOE)),
        (ParallelConfig(tensor=2, sequence=True), (*DENSE, *MOE)),
        (ParallelConfig(pipeline=2), (*DENSE, *MOE)),
        (ParallelConfig(expert=2, data=2), MOE),
        (ParallelConfig(tensor=2, pipeline=2), DENSE),
    ],
    ids=["one", "tp2", "pp2", "ep2", "tp2pp2"],
)
def test_families_equal_transformers(
    parallel: ParallelConfig, families: tuple[str, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The assertions are in check_layout, on every rank."""
    folders = [request.getfixturevalue(f"tiny_{family}") for family in families]
    segments = draw_tree(0).segments
    expected = [reference_logprobs(folder, segments) for folder in folders]
    run_ranks(check_layout, parallel.world_size, parallel, folders, expected, tmp_path)


@pytest.mark.long
def test_value_models_equal_transformers(tmp_path: Path) -> None:
    """The output of transformers' sequence classification after each token; check_values asserts it."""
    from transformers import AutoModelForSequenceClassification

    segments = draw_tree(0).segments
    folders, expected = [], []
    for family in ("llama", "qwen3_moe"):
        policy = write_model(tmp_path / "policy", family)
        model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1, dtype=torch.float32)
        torch.nn.init.normal_(model.score.weight)
        model.save_pretrained(tmp_path / family)
        folders.append(tmp_path / family)
        values_T = np.zeros(len(segments.token_ids), np.float32)
        for path in sequences(segments):
            with torch.no_grad():
                hidden = model.model(torch.from_numpy(segments.token_ids[path]).long()[None])
                values_T[path] = model.score(hidden.last_hidden_state[0])[:, 0].numpy()
        expected.append(values_T)
    run_ranks(check_values, 1, folders, expected, tmp_path / "exported")
