"""Where SGLang keeps each canonical tensor, against the model cut up by hand (sglang_shards.py)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.rollout.engines.sglang.parameters import shard_layout
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import ModelSpec, read_spec
from atoll.weights.plan import plan
from atoll.wire.types import ShardLayout
from tests.unit.sglang_shards import random_state, shard, whole

FAMILIES = ("tiny_qwen2", "tiny_qwen2_tied", "tiny_qwen3", "tiny_llama", "tiny_qwen3_moe")


@pytest.fixture(params=FAMILIES)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    """4 query and 2 key-value heads: with four ranks, two hold the same key-value head."""
    folder: Path = request.getfixturevalue(request.param)
    return read_spec(folder)


def shard_layouts_of(spec: ModelSpec, size: int) -> list[ShardLayout]:
    state = random_state(spec)
    parts = [shard(state, spec, rank, size) for rank in range(size)]
    return [
        shard_layout({name: t.shape for name, t in part.items()}, spec, rank, size)
        for rank, part in enumerate(parts)
    ]


@pytest.mark.parametrize("vocab_size", [64, 70, 130])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_boxes_hold_what_sglang_loads(spec: ModelSpec, size: int, vocab_size: int) -> None:
    spec = replace(spec, vocab_size=vocab_size)
    state = random_state(spec)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in state.items()}
    for rank in range(size):
        part = shard(state, spec, rank, size)
        found = shard_layout({name: tensor.shape for name, tensor in part.items()}, spec, rank, size)
        flat = [tensor.flatten() for tensor in part.values()]
        elements = 0
        for t, row, rows, column, columns, buffer, offset, stride in found.boxes.tolist():
            name = found.tensors[t]
            assert stride == columns
            got = flat[buffer][offset : offset + rows * columns]
            matrix = state[name].reshape(len(state[name]), -1)
            expected = matrix[row : row + rows, column : column + columns]
            assert torch.equal(got.view(rows, columns), expected), name
            seen[name].view(matrix.shape)[row : row + rows, column : column + columns] = True
            elements += rows * columns
        assert elements == sum(
            int((~tensor.isnan()).sum()) for tensor in part.values()
        )  # all but the padding
    assert [name for name, elements in seen.items() if not elements.all()] == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_plan_covers_them(spec: ModelSpec, size: int) -> None:
    """Replicated key-value heads and padding included: each rank gets its own elements once."""
    targets = shard_layouts_of(spec, size)
    made = plan([whole(random_state(spec))], targets, part_elements=1 << 20)
    for rank, target in enumerate(targets):
        mine = made.transfers[made.transfers["target"] == rank]
        wanted = int((target.boxes["rows"] * target.boxes["columns"]).sum())
        assert int((mine["rows"] * mine["columns"]).sum()) == wanted


def test_the_padded_vocabulary_by_hand(tiny_llama: Path) -> None:
    """130 rows are padded to 192, of which each of 4 ranks gets 48: 48, 48, 34 real ones, and none."""
    spec = replace(read_spec(tiny_llama), vocab_size=130)
    rows = []
    for found in shard_layouts_of(spec, 4):
        boxes = [box for box in found.boxes.tolist() if found.tensors[box[0]] == "lm_head.weight"]
        rows.append([(row, count) for _, row, count, *_ in boxes])
    assert rows == [[(0, 48)], [(48, 48)], [(96, 34)], []]


def test_ranks_that_do_not_divide_the_padding(tiny_llama: Path) -> None:
    """64 rows for 3 ranks: padded to 192 = 3 * 64, and the first rank has them all."""
    spec = replace(read_spec(tiny_llama), vocab_size=64, num_heads=6, num_kv_heads=3, intermediate_size=96)
    held = [
        [row for t, row, *_ in found.boxes.tolist() if found.tensors[t] == "lm_head.weight"]
        for found in shard_layouts_of(spec, 3)
    ]
    assert held == [[0], [], []]


def test_an_output_layer_that_a_tied_model_keeps_apart_gets_the_embedding(tiny_qwen3_moe: Path) -> None:
    """As SGLang's Qwen3-MoE does: the canonical tensor lies in two places."""
    spec = replace(read_spec(tiny_qwen3_moe), tied=True)
    shapes = {name: t.shape for name, t in shard(random_state(spec), spec, 0, 1).items()}
    found = shard_layout(shapes | {"lm_head.weight": shapes["model.embed_tokens.weight"]}, spec, 0, 1)
    assert "lm_head.weight" not in found.tensors
    number = found.tensors.index("model.embed_tokens.weight")
    assert np.count_nonzero(found.boxes["tensor"] == number) == 2


def test_what_the_map_does_not_know_is_named(spec: ModelSpec) -> None:
    shapes = {name: tuple(t.shape) for name, t in shard(random_state(spec), spec, 0, 1).items()}
    with pytest.raises(UserError, match=r"'model\.layers\.0\.mixer\.A' .* no such parameter"):
        shard_layout(shapes | {"model.layers.0.mixer.A": (3, 4)}, spec, 0, 1)
    with pytest.raises(UserError, match=r"lacks the parameter 'model\.norm\.weight'"):
        shard_layout({name: s for name, s in shapes.items() if name != "model.norm.weight"}, spec, 0, 1)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    packed = shapes | {name: shapes[name][::-1]}
    with pytest.raises(UserError, match=r"qkv_proj\.weight' has shape \(64, 128\) .* implies \(128, 64\)"):
        shard_layout(packed, spec, 0, 1)
