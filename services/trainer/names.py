"""Where each Megatron parameter of one tensor-parallel rank lies in the canonical (Hugging Face) tensors.

The only place that knows the two layouts: loading, exporting and pushing weights all read it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.runtime.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row, row + rows) and columns [column, column + columns) of a canonical tensor.

    Pieces of one parameter follow each other, row after row. A one-dimensional tensor of n elements
    is n rows of one column.
    """

    tensor: str
    row: int
    rows: int
    column: int
    columns: int


def pieces(spec: ModelSpec, rank: int, size: int) -> dict[str, list[Piece]]:
    """Megatron parameter name -> what it holds on tensor-parallel rank `rank` of `size`."""
    hidden = spec.hidden_size

    def rows_of(tensor: str, rows: int, columns: int) -> list[Piece]:
        return [Piece(tensor, rank * rows // size, rows // size, 0, columns)]

    def columns_of(tensor: str, rows: int, columns: int) -> list[Piece]:
        return [Piece(tensor, 0, rows, rank * columns // size, columns // size)]

    def whole(tensor: str, length: int) -> list[Piece]:
        return [Piece(tensor, 0, length, 0, 1)]

    found = {
        "embedding.word_embeddings.weight": rows_of("model.embed_tokens.weight", spec.vocab_size, hidden),
        "decoder.final_layernorm.weight": whole("model.norm.weight", hidden),
    }
    if spec.head == "value":
        found["output_layer.weight"] = [Piece("score.weight", 0, 1, 0, hidden)]
    elif not spec.tied:
        found["output_layer.weight"] = rows_of("lm_head.weight", spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        ours, theirs = f"decoder.layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        query_size, ffn = spec.num_heads * spec.head_dim, spec.intermediate_size
        found |= {
            f"{ours}.input_layernorm.weight": whole(f"{theirs}.input_layernorm.weight", hidden),
            f"{ours}.pre_mlp_layernorm.weight": whole(f"{theirs}.post_attention_layernorm.weight", hidden),
            f"{ours}.self_attention.linear_qkv.weight": list(
                _interleaved_qkv(spec, attention, "weight", hidden, rank, size)
            ),
            f"{ours}.self_attention.linear_proj.weight": columns_of(
                f"{attention}.o_proj.weight", hidden, query_size
            ),
            f"{ours}.mlp.linear_fc1.weight": rows_of(f"{mlp}.gate_proj.weight", ffn, hidden)
            + rows_of(f"{mlp}.up_proj.weight", ffn, hidden),
            f"{ours}.mlp.linear_fc2.weight": columns_of(f"{mlp}.down_proj.weight", hidden, ffn),
        }
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


def _interleaved_qkv(
    spec: ModelSpec, attention: str, kind: str, columns: int, rank: int, size: int
) -> Iterator[Piece]:
    """Megatron keeps, for each key-value group: the group's query heads, its key head, its value head."""
    groups = spec.num_kv_heads // size
    queries = spec.num_heads // spec.num_kv_heads * spec.head_dim  # rows of one group
    for group in range(rank * groups, (rank + 1) * groups):
        yield Piece(f"{attention}.q_proj.{kind}", group * queries, queries, 0, columns)
        for name in ("k_proj", "v_proj"):
            yield Piece(f"{attention}.{name}.{kind}", group * spec.head_dim, spec.head_dim, 0, columns)


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape, for every tensor that the model folder must hold."""
    extents: dict[str, tuple[int, int]] = {}
    for held in pieces(spec, rank=0, size=1).values():
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
