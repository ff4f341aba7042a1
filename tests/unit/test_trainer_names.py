"""The map between Hugging Face tensors and Megatron shards, without Megatron."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from atoll.runtime.model_spec import Experts, ModelSpec, read_spec, with_value_head
from atoll.trainer.megatron.names import Flavour, shapes, tensor_slices, whole_model
from atoll.weights.tensor_slices import TensorSlice
from tests.builders import model_spec

SPEC = model_spec(
    vocab_size=24,
    hidden_size=6,
    intermediate_size=8,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    qk_norm=True,
)
FLAVOURS: tuple[Flavour, Flavour] = ("local", "transformer_engine")
MOE = replace(
    SPEC, experts=Experts(num=4, per_token=2, intermediate_size=5, norm_topk_prob=True), qkv_bias=False
)


@pytest.mark.parametrize(
    "model", ["tiny_qwen2", "tiny_qwen2_tied", "tiny_qwen3", "tiny_llama", "tiny_qwen3_moe"]
)
def test_shapes_are_those_of_the_file(model: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert shapes(read_spec(folder)) == written


def test_a_value_head_takes_the_place_of_the_output_layer() -> None:
    tied = replace(SPEC, tied=True)
    for spec in (SPEC, tied):
        assert "lm_head.weight" not in shapes(with_value_head(spec))
        assert shapes(with_value_head(spec))["score.weight"] == (1, 6)
    assert shapes(SPEC).keys() - shapes(with_value_head(SPEC)).keys() == {"lm_head.weight"}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, tied=True, qkv_bias=False), with_value_head(SPEC), MOE],
    ids=["untied", "tied", "value", "experts"],
)
def test_ranks_cover_every_element_once(spec: ModelSpec, size: int) -> None:
    count = {name: np.zeros(shape, int).reshape(shape[0], -1) for name, shape in shapes(spec).items()}
    for rank in range(size):
        for held in tensor_slices(spec, replace(whole_model(spec), rank=rank, size=size)).values():
            for piece in held:
                rows = slice(piece.row, piece.row + piece.rows)
                columns = slice(piece.column, piece.column + piece.columns)
                count[piece.tensor][rows, columns] += 1
    for name, counted in count.items():
        # every tensor-parallel rank holds the norms, a value head, the router and its experts whole
        is_whole = "norm" in name or name == "score.weight" or ".mlp.gate." in name or ".experts." in name
        copies = size if is_whole else 1
        assert (counted == copies).all(), name


def test_qkv_is_interleaved_by_group() -> None:
    """8 query heads of size 2 share 4 key-value heads: a group is 4 query rows, 2 key rows, 2 value rows."""
    attention = "model.layers.1.self_attn"
    assert tensor_slices(SPEC, replace(whole_model(SPEC), rank=1, size=2))[
        "decoder.layers.1.self_attention.linear_qkv.weight"
    ] == [
        TensorSlice(f"{attention}.q_proj.weight", row=8, rows=4, column=0, columns=6),
        TensorSlice(f"{attention}.k_proj.weight", row=4, rows=2, column=0, columns=6),
        TensorSlice(f"{attention}.v_proj.weight", row=4, rows=2, column=0, columns=6),
        TensorSlice(f"{attention}.q_proj.weight", row=12, rows=4, column=0, columns=6),
        TensorSlice(f"{attention}.k_proj.weight", row=6, rows=2, column=0, columns=6),
        TensorSlice(f"{attention}.v_proj.weight", row=6, rows=2, column=0, columns=6),
    ]


def test_each_rank_joins_its_gate_and_up_rows() -> None:
    mlp = "model.layers.0.mlp"
    held = tensor_slices(SPEC, replace(whole_model(SPEC), rank=1, size=2))
    assert held["decoder.layers.0.mlp.linear_fc1.weight"] == [
        TensorSlice(f"{mlp}.gate_proj.weight", row=4, rows=4, column=0, columns=6),
        TensorSlice(f"{mlp}.up_proj.weight", row=4, rows=4, column=0, columns=6),
    ]
    assert held["decoder.layers.0.mlp.linear_fc2.weight"] == [
        TensorSlice(f"{mlp}.down_proj.weight", row=0, rows=6, column=4, columns=4)
    ]


def test_an_expert_rank_holds_its_experts_whole() -> None:
    """The second of two ranks has experts 2 and 3, in this order in both of its matrices."""
    held = tensor_slices(MOE, replace(whole_model(MOE), experts=range(2, 4)))
    mlp = "model.layers.1.mlp"
    ours = "decoder.layers.1.mlp"
    assert {name: parts for name, parts in held.items() if ours in name} == {
        f"{ours}.router.weight": [TensorSlice(f"{mlp}.gate.weight", 0, 4, 0, 6)],
        f"{ours}.experts.gate_up": [
            TensorSlice(f"{mlp}.experts.2.gate_proj.weight", 0, 5, 0, 6),
            TensorSlice(f"{mlp}.experts.2.up_proj.weight", 0, 5, 0, 6),
            TensorSlice(f"{mlp}.experts.3.gate_proj.weight", 0, 5, 0, 6),
            TensorSlice(f"{mlp}.experts.3.up_proj.weight", 0, 5, 0, 6),
        ],
        f"{ours}.experts.down": [
            TensorSlice(f"{mlp}.experts.2.down_proj.weight", 0, 6, 0, 5),
            TensorSlice(f"{mlp}.experts.3.down_proj.weight", 0, 6, 0, 5),
        ],
    }


def test_transformer_engine_keeps_a_norm_in_the_layer_behind_it() -> None:
    """Except the norm before experts, which is not followed by a single layer."""
    layer, theirs = "decoder.layers.2", "model.layers.2"
    for spec in (SPEC, MOE):
        local, engine = (tensor_slices(spec, whole_model(spec), flavour) for flavour in FLAVOURS)
        assert len(local) == len(engine)
        assert [part for parts in local.values() for part in parts] == [
            part for parts in engine.values() for part in parts
        ]
        attention_norm = engine[f"{layer}.self_attention.linear_qkv.layer_norm_weight"]
        assert attention_norm == [TensorSlice(f"{theirs}.input_layernorm.weight", 0, 6, 0, 1)]
        mlp_norm = "mlp.linear_fc1.layer_norm_weight" if spec is SPEC else "pre_mlp_layernorm.weight"
        assert engine[f"{layer}.{mlp_norm}"] == [
            TensorSlice(f"{theirs}.post_attention_layernorm.weight", 0, 6, 0, 1)
        ]
        assert (f"{layer}.pre_mlp_layernorm.weight" in engine) == (spec is MOE)
        assert f"{layer}.input_layernorm.weight" not in engine
