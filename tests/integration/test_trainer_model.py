"""Megatron's model against transformers: logits, gradients, shard layout, export. One launch per layout."""

import resource
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.runtime.errors import CheckpointError
from atoll.runtime.model_spec import read_spec
from atoll.wire.types import Segments
from tests.torch_ranks import run_ranks

CPU = torch.device("cpu")
# A prompt of 7 with three answers, one of which has two branches, and a single sequence.
LENGTHS, PARENTS, GROUPS = [7, 5, 3, 9, 4, 6, 11], [-1, 0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0, 1]


def tree() -> Segments:
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    # no token 0: it is the padding token, whose embedding transformers gives no gradient
    tokens = np.random.default_rng(0).integers(1, 64, offsets[-1]).astype(np.int32)
    return Segments(tokens, offsets, np.array(PARENTS, np.int32), np.array(GROUPS, np.int32))


def paths(segments: Segments) -> list[np.ndarray]:
    """Token indices of every segment's whole sequence, from the root to the segment's end."""
    found: list[np.ndarray] = []
    for s, parent in enumerate(segments.parents):
        own = np.arange(segments.offsets[s], segments.offsets[s + 1])
        found.append(np.concatenate([found[parent], own]) if parent >= 0 else own)
    return found


def duplicated(segments: Segments) -> Segments:
    """Every segment's whole sequence as a root of its own."""
    sequences = paths(segments)
    return Segments(
        token_ids=segments.token_ids[np.concatenate(sequences)],
        offsets=np.concatenate([[0], np.cumsum([len(sequence) for sequence in sequences])]),
        parents=np.full(len(sequences), -1, np.int32),
        groups=segments.groups,
    )


def on_megatron(check: Callable[..., Any], tensor: int, folder: Path, *args: Any) -> Any:
    """Runs `check(policy, ...)` in a rank, on the model of `folder`."""
    from atoll.trainer.megatron import cpu_compat

    torch.set_num_threads(1)
    with cpu_compat.apply():
        from atoll.config.schema import ParallelConfig
        from atoll.trainer.megatron.hf import load_model
        from atoll.trainer.megatron.model import ModelSettings, initialize_parallel

        if not torch.distributed.is_initialized():
            initialize_parallel(ParallelConfig(tensor=tensor))
        return check(load_model(folder, read_spec(folder), ModelSettings()), *args)


def hidden(policy: Any, segments: Segments) -> Tensor:
    from atoll.trainer.megatron.attention import plan_rows
    from atoll.trainer.megatron.context import ContextSplit

    tokens, positions = torch.from_numpy(segments.token_ids).long(), torch.from_numpy(segments.positions)
    return policy.output(tokens, positions, plan_rows(segments, CPU, ContextSplit()), None).squeeze(1)  # type: ignore[no-any-return]


def logits(policy: Any, segments: Segments) -> Tensor:
    """[T, vocabulary], gathered from the tensor-parallel ranks."""
    from atoll.trainer.megatron.model import output_weight

    own = hidden(policy, segments) @ output_weight(policy).T
    parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, own.detach())
    return torch.cat(parts, -1)


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def agrees_with_transformers(policy: Any) -> None:
    """Logits of every token, and gradients of every parameter, of trees and of repeated sequences."""
    theirs = reference(policy.folder)
    segments = tree()
    sequences, repeated = paths(segments), duplicated(segments)
    expected = [
        theirs(torch.from_numpy(segments.token_ids[path]).long()[None]).logits[0] for path in sequences
    ]

    got = logits(policy, segments)
    for path, expected_logits in zip(sequences, expected, strict=True):
        torch.testing.assert_close(got[path], expected_logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(policy, repeated), torch.cat(expected), rtol=0, atol=1e-5)

    # the loss counts each tree token once, whichever copy carries its weight
    weights = (
        torch.randn(len(segments.token_ids), policy.spec.hidden_size, generator=torch.manual_seed(1)) / 100
    )
    (hidden(policy, segments) * weights).sum().backward()
    own_tokens = torch.zeros(len(repeated.token_ids), 1)
    ends = repeated.offsets[1:]
    for end, length in zip(ends, LENGTHS, strict=True):
        own_tokens[end - length : end] = 1
    flat_weights = weights[np.concatenate(sequences)] * own_tokens
    shared = canonical_gradients(policy)
    policy.output.zero_grad()
    (hidden(policy, repeated) * flat_weights).sum().backward()
    for (name, grad), (_, grad_shared) in zip(
        canonical_gradients(policy).items(), shared.items(), strict=True
    ):
        torch.testing.assert_close(grad_shared, grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")

    for start, end in zip(repeated.offsets, ends, strict=False):
        ids = torch.from_numpy(repeated.token_ids[start:end]).long()[None]
        (theirs.model(ids).last_hidden_state[0] * flat_weights[start:end]).sum().backward()
    parameters = dict(theirs.named_parameters())
    for name, grad in shared.items():
        if name != "lm_head.weight":  # hidden states stop before it
            expected_grad = parameters[name].grad
            torch.testing.assert_close(
                grad, expected_grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def canonical_gradients(policy: Any) -> dict[str, Tensor]:
    """Hugging Face name -> whole gradient, assembled from all ranks' boxes."""
    from atoll.trainer.megatron.names import shapes, tensor_slices, whole_model

    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    whole = {name: torch.zeros(shape) for name, shape in shapes(policy.spec).items()}
    grads = {name: parameter.grad for name, parameter in policy.output.named_parameters()}
    is_fused = any(name.endswith("layer_norm_weight") for name in grads)
    chunk = replace(whole_model(policy.spec), rank=rank, size=size)
    for name, held in tensor_slices(
        policy.spec, chunk, "transformer_engine" if is_fused else "local"
    ).items():
        if grads[name] is None:  # the output layer: hidden states stop before it
            continue
        # norms of the residual stream get the same gradient on every rank, everything else its own part
        is_norm = name.endswith(("input_layernorm.weight", "mlp_layernorm.weight", "layer_norm_weight"))
        share = size if is_norm or name == "decoder.final_layernorm.weight" else 1
        parts = grads[name].flatten().split([piece.rows * piece.columns for piece in held])
        for piece, values in zip(held, parts, strict=True):
            matrix = whole[piece.tensor].view(len(whole[piece.tensor]), -1)
            rows = slice(piece.row, piece.row + piece.rows)
            columns = slice(piece.column, piece.column + piece.columns)
            matrix[rows, columns] += values.view(piece.rows, piece.columns) / share
    for tensor in whole.values():
        torch.distributed.all_reduce(tensor)
    return whole


def exports_bit_equal(policy: Any, target: Path) -> None:
    """With changed weights and several files: transformers loads exactly what the ranks hold."""
    from atoll.trainer.megatron import hf
    from atoll.trainer.megatron.shards import boxes_of

    with torch.no_grad():
        for parameter in policy.output.parameters():
            parameter.mul_(1.5)
    hf.FILE_BYTES = 100_000
    num_bytes = hf.export_hf(policy, target)
    torch.distributed.barrier()
    exported, original = reference(target).state_dict(), reference(policy.folder).state_dict()
    assert exported.keys() == original.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name] * 1.5), name
    for name, box, memory in boxes_of(policy):
        rows, columns = (
            slice(box[at], box[at] + box[n]) for at, n in (("row", "rows"), ("column", "columns"))
        )
        assert torch.equal(memory, exported[name].view(len(exported[name]), -1)[rows, columns]), name
    if torch.distributed.get_rank() > 0:
        assert num_bytes == 0
        return
    files = sorted(target.glob("*.safetensors"))
    assert len(files) > 1
    assert num_bytes == sum(file.stat().st_size for file in files)
    assert (target / "tokenizer.json").read_bytes() == (policy.folder / "tokenizer.json").read_bytes()


def a_full_disk_leaves_the_ranks_in_step(policy: Any, target: Path) -> None:
    """The export first exceeds the file size limit; afterwards all ranks are in step, and it works."""
    from atoll.trainer.megatron import hf

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_writer = torch.distributed.get_rank() == 0
    full = pytest.raises(CheckpointError, match=f"{target} was not written: .*File too large")
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with full if is_writer else nullcontext():
            assert hf.export_hf(policy, target) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    torch.distributed.barrier()
    assert not target.exists()


def reads_a_folder_of_several_files(policy: Any, whole: Path) -> None:
    from atoll.trainer.megatron.hf import load_model
    from atoll.trainer.megatron.model import ModelSettings

    again = load_model(whole, policy.spec, ModelSettings())
    for (name, got), expected in zip(
        policy.output.named_parameters(), again.output.parameters(), strict=True
    ):
        assert torch.equal(got, expected), name


def fused_layers_agree(tensor: int, folder: Path) -> None:
    """Layers as with TransformerEngine, for which a stand-in fuses norm and matrix. A checkpoint names its
    tensors as without it."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from torch.nn.functional import rms_norm

    from atoll.trainer.megatron import model

    class NormAndColumns(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, **settings: Any) -> None:
            super().__init__(input_size, output_size, **settings)
            self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size))

        def forward(self, hidden: Tensor) -> Any:
            eps = self.config.layernorm_epsilon
            return super().forward(rms_norm(hidden, hidden.shape[-1:], self.layer_norm_weight, eps))

    def check(policy: Any) -> None:
        fused = [module for module in policy.output.modules() if isinstance(module, NormAndColumns)]
        assert len(fused) == 2 * policy.spec.num_layers
        agrees_with_transformers(policy)
        assert checkpoint_names(policy) == names

    def checkpoint_names(policy: Any) -> list[str]:
        return sorted(saved.key for saved in nested_values(policy.output.sharded_state_dict()))

    names = on_megatron(checkpoint_names, tensor, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "uses_transformer_engine", lambda: True)
        patch.setattr(transformer_engine, "TELayerNormColumnParallelLinear", NormAndColumns)
        patch.setattr(transformer_engine, "TERowParallelLinear", RowParallelLinear)
        on_megatron(check, tensor, folder)


def check_layout(tensor: int, folders: list[Path], target: Path) -> None:
    fused_layers_agree(tensor, folders[0])
    for folder in folders:
        on_megatron(agrees_with_transformers, tensor, folder)
        on_megatron(a_full_disk_leaves_the_ranks_in_step, tensor, folder, target / folder.name)
        on_megatron(exports_bit_equal, tensor, folder, target / folder.name)
    on_megatron(reads_a_folder_of_several_files, tensor, target / folders[0].name, target / folders[0].name)


@pytest.mark.parametrize("tensor", [1, 2])
def test_model_equals_transformers(
    tensor: int, tiny_qwen2: Path, tiny_qwen2_tied: Path, tiny_qwen3: Path, tmp_path: Path
) -> None:
    assert (
        len(run_ranks(check_layout, tensor, tensor, [tiny_qwen2, tiny_qwen2_tied, tiny_qwen3], tmp_path))
        == tensor
    )
