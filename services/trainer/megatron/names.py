"""Maps each Megatron parameter of a model chunk to slices of canonical (Hugging Face) tensors.

The only place that knows both layouts: loading, exporting and pushing weights all use it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from atoll.runtime.model_spec import Experts, ModelSpec
from atoll.weights.tensor_slices import TensorSlice

# Megatron's own layers, or TransformerEngine's, which fuse a norm with the following linear layer
Flavour = Literal["local", "transformer_engine"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a model in one chunk: some layers, on one of the ranks that share their matrices."""

    layers: range  # indices in the whole model; names in the chunk count from 0
    is_first: bool  # has the embedding
    is_last: bool  # has the final norm and the output layer or value head
    rank: int = 0  # in its tensor-parallel group
    size: int = 1
    experts: range = range(0)  # of every layer, not split; names in the chunk count from 0


def whole_model(spec: ModelSpec) -> Chunk:
    experts = range(spec.experts.num if spec.experts else 0)
    return Chunk(range(spec.num_layers), is_first=True, is_last=True, experts=experts)


def tensor_slices(spec: ModelSpec, chunk: Chunk, flavour: Flavour = "local") -> dict[str, list[TensorSlice]]:
    """Megatron parameter name -> the slices that it holds in this chunk."""
    hidden, rank, size = spec.hidden_size, chunk.rank, chunk.size

    def rows_of(tensor: str, rows: int, columns: int) -> list[TensorSlice]:
        return [TensorSlice(tensor, rank * rows // size, rows // size, 0, columns)]

    def columns_of(tensor: str, rows: int, columns: int) -> list[TensorSlice]:
        return [TensorSlice(tensor, 0, rows, rank * columns // size, columns // size)]

    def whole(tensor: str, length: int) -> list[TensorSlice]:
        return [TensorSlice(tensor, 0, length, 0, 1)]

    found = {}
    embedding = rows_of("model.embed_tokens.weight", spec.vocab_size, hidden)
    if chunk.is_first:
        found["embedding.word_embeddings.weight"] = embedding
    if chunk.is_last:
        found["decoder.final_layernorm.weight"] = whole("model.norm.weight", hidden)
        if spec.head == "value":
            found["output_layer.weight"] = [TensorSlice("score.weight", 0, 1, 0, hidden)]
        elif not spec.tied:
            found["output_layer.weight"] = rows_of("lm_head.weight", spec.vocab_size, hidden)
        elif not chunk.is_first:
            found["output_layer.weight"] = embedding  # a copy, if another stage embeds
    for i, number in enumerate(chunk.layers):
        ours, theirs = f"decoder.layers.{i}", f"model.layers.{number}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        query_size = spec.num_heads * spec.head_dim
        before_attention, before_mlp = f"{ours}.input_layernorm.weight", f"{ours}.pre_mlp_layernorm.weight"
        if flavour == "transformer_engine":
            before_attention = f"{ours}.self_attention.linear_qkv.layer_norm_weight"
            if spec.experts is None:
                before_mlp = f"{ours}.mlp.linear_fc1.layer_norm_weight"
        found |= {
            before_attention: whole(f"{theirs}.input_layernorm.weight", hidden),
            before_mlp: whole(f"{theirs}.post_attention_layernorm.weight", hidden),
            f"{ours}.self_attention.linear_qkv.weight": list(
                _interleaved_qkv(spec, attention, "weight", hidden, rank, size)
            ),
            f"{ours}.self_attention.linear_proj.weight": columns_of(
                f"{attention}.o_proj.weight", hidden, query_size
            ),
        }
        if spec.experts is None:
            ffn = spec.intermediate_size
            found |= {
                f"{ours}.mlp.linear_fc1.weight": rows_of(f"{mlp}.gate_proj.weight", ffn, hidden)
                + rows_of(f"{mlp}.up_proj.weight", ffn, hidden),
                f"{ours}.mlp.linear_fc2.weight": columns_of(f"{mlp}.down_proj.weight", hidden, ffn),
            }
        else:
            found |= _experts(spec.experts, chunk.experts, f"{ours}.mlp", mlp, hidden)
        if spec.qkv_bias:
            found[f"{ours}.self_attention.linear_qkv.bias"] = list(
                _interleaved_qkv(spec, attention, "bias", 1, rank, size)
            )
        if spec.qk_norm:
            for ours_norm, theirs_norm in (("q_layernorm", "q_norm"), ("k_layernorm", "k_norm")):
                found[f"{ours}.self_attention.{ours_norm}.weight"] = whole(
                    f"{attention}.{theirs_norm}.weight", spec.head_dim
                )
    return found


def _experts(
    experts: Experts, held: range, ours: str, theirs: str, hidden: int
) -> dict[str, list[TensorSlice]]:
    """The router and these experts of one layer, not split."""
    ffn, numbered = experts.intermediate_size, [f"{theirs}.experts.{number}" for number in held]
    return {
        f"{ours}.router.weight": [TensorSlice(f"{theirs}.gate.weight", 0, experts.num, 0, hidden)],
        f"{ours}.experts.gate_up": [
            TensorSlice(f"{expert}.{name}.weight", 0, ffn, 0, hidden)
            for expert in numbered
            for name in ("gate_proj", "up_proj")
        ],
        f"{ours}.experts.down": [
            TensorSlice(f"{expert}.down_proj.weight", 0, hidden, 0, ffn) for expert in numbered
        ],
    }


def _interleaved_qkv(
    spec: ModelSpec, attention: str, kind: str, columns: int, rank: int, size: int
) -> Iterator[TensorSlice]:
    """For each key-value group, Megatron stores the group's query heads, its key head, its value head."""
    groups = spec.num_kv_heads // size
    queries = spec.num_heads // spec.num_kv_heads * spec.head_dim  # rows of one group
    for group in range(rank * groups, (rank + 1) * groups):
        yield TensorSlice(f"{attention}.q_proj.{kind}", group * queries, queries, 0, columns)
        for name in ("k_proj", "v_proj"):
            yield TensorSlice(f"{attention}.{name}.{kind}", group * spec.head_dim, spec.head_dim, 0, columns)


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, for every tensor that the model folder must contain."""
    extents: dict[str, tuple[int, int]] = {}
    for held in tensor_slices(spec, whole_model(spec)).values():
        for piece in held:
            rows, columns = extents.get(piece.tensor, (0, 0))
            extents[piece.tensor] = (
                max(rows, piece.row + piece.rows),
                max(columns, piece.column + piece.columns),
            )
    return {
        name: (rows,) if _is_vector(name) else (rows, columns) for name, (rows, columns) in extents.items()
    }


def _is_vector(tensor: str) -> bool:
    return tensor.endswith((".bias", "norm.weight"))
