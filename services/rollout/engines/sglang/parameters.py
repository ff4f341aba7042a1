"""Maps SGLang's parameters to slices of canonical (Hugging Face) tensors. Pure.

SGLang joins what it multiplies as one (q, k, v; gate, up; the matrices of all experts) and cuts by tensor
parallelism: query heads, MLP columns and vocabulary in equal parts; key-value heads that are fewer than the
ranks lie on several of them. The vocabulary is padded. Tied models have one parameter for both ends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import ModelSpec
from atoll.weights.tensor_slices import TensorSlice, shard_layout_of
from atoll.wire.types import ShardLayout

VOCABULARY_MULTIPLE = 64  # SGLang's DEFAULT_VOCAB_PADDING_SIZE


@dataclass(frozen=True, slots=True)
class Parameter:
    shape: tuple[int, ...]
    pieces: list[TensorSlice]  # what lies behind them is padding


def shard_layout(shapes: Mapping[str, Sequence[int]], spec: ModelSpec, rank: int, size: int) -> ShardLayout:
    """The boxes of tensor-parallel rank `rank` of `size`; its n-th parameter is buffer n.

    `shapes` are those of the rank's own parameters, by SGLang's names, without aliases. Raises UserError
    naming a parameter that is unknown, missing or of another shape than the model implies.
    """
    expected = parameters(spec, rank, size)
    for name, shape in shapes.items():
        implied = expected[name].shape if name in expected else "no such parameter"
        if tuple(shape) != implied:
            raise UserError(
                f"SGLang's parameter {name!r} has shape {tuple(shape)} on rank {rank} of {size}, the model "
                f"implies {implied}, so weights cannot be pushed to it: remove options of [rollout.sglang] "
                "that change its layout; on a CPU, SGLang pads: tp_size must divide the key-value heads, and "
                "32 * tp_size the width of an MLP or expert"
            )
    # a tied model has an output layer of its own where SGLang keeps it apart
    optional = {"lm_head.weight"} if spec.tied else set()
    if missing := sorted(expected.keys() - shapes.keys() - optional):
        raise UserError(
            f"SGLang's rank {rank} of {size} lacks the parameter {missing[0]!r} of the model: remove "
            "options of [rollout.sglang] that distribute it over ranks other than by tp_size"
        )
    return shard_layout_of(expected[name].pieces for name in shapes)


def parameters(spec: ModelSpec, rank: int, size: int) -> dict[str, Parameter]:
    """SGLang's name -> what rank `rank` of `size` holds in it."""
    hidden = spec.hidden_size
    found = {
        "model.embed_tokens.weight": _vocabulary("model.embed_tokens.weight", spec, rank, size),
        "model.norm.weight": _vector("model.norm.weight", hidden),
        "lm_head.weight": _vocabulary(
            "model.embed_tokens.weight" if spec.tied else "lm_head.weight", spec, rank, size
        ),
    }
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{norm}.weight"] = _vector(f"{layer}.{norm}.weight", hidden)
        found |= _attention(f"{layer}.self_attn", spec, rank, size)
        found |= _mlp(f"{layer}.mlp", spec, rank, size)
    return found


def num_elements(spec: ModelSpec, size: int) -> int:
    """Of a rank's parameters, padding included, on a GPU."""
    shapes = {name: parameter.shape for name, parameter in parameters(spec, 0, size).items()}
    if spec.tied:
        del shapes["lm_head.weight"]
    return sum(map(prod, shapes.values()))


def _attention(attention: str, spec: ModelSpec, rank: int, size: int) -> dict[str, Parameter]:
    query, key_value = spec.num_heads // size, max(1, spec.num_kv_heads // size)  # heads of a rank
    first_key_value = rank * spec.num_kv_heads // size  # one head is on several ranks where there are fewer
    heads = {
        "q_proj": (rank * query, query),
        "k_proj": (first_key_value, key_value),
        "v_proj": (first_key_value, key_value),
    }

    def joined(kind: str, columns: int) -> list[TensorSlice]:
        return [
            TensorSlice(
                f"{attention}.{name}.{kind}", first * spec.head_dim, count * spec.head_dim, 0, columns
            )
            for name, (first, count) in heads.items()
        ]

    rows = (query + 2 * key_value) * spec.head_dim
    found = {
        f"{attention}.qkv_proj.weight": Parameter(
            (rows, spec.hidden_size), joined("weight", spec.hidden_size)
        ),
        f"{attention}.o_proj.weight": _columns(
            f"{attention}.o_proj.weight", spec.hidden_size, query * spec.head_dim, rank
        ),
    }
    if spec.qkv_bias:
        found[f"{attention}.qkv_proj.bias"] = Parameter((rows,), joined("bias", 1))
    if spec.qk_norm:
        for name in (f"{attention}.q_norm.weight", f"{attention}.k_norm.weight"):
            found[name] = _vector(name, spec.head_dim)
    return found


def _mlp(mlp: str, spec: ModelSpec, rank: int, size: int) -> dict[str, Parameter]:
    hidden = spec.hidden_size
    if spec.experts is None:
        ffn = spec.intermediate_size // size
        return {
            f"{mlp}.gate_up_proj.weight": Parameter(
                (2 * ffn, hidden), list(_gate_up(mlp, ffn, hidden, rank))
            ),
            f"{mlp}.down_proj.weight": _columns(f"{mlp}.down_proj.weight", hidden, ffn, rank),
        }
    num, ffn = spec.experts.num, spec.experts.intermediate_size // size
    experts = [f"{mlp}.experts.{e}" for e in range(num)]
    return {
        f"{mlp}.gate.weight": Parameter(
            (num, hidden), [TensorSlice(f"{mlp}.gate.weight", 0, num, 0, hidden)]
        ),
        f"{mlp}.experts.w13_weight": Parameter(
            (num, 2 * ffn, hidden),
            [piece for expert in experts for piece in _gate_up(expert, ffn, hidden, rank)],
        ),
        f"{mlp}.experts.w2_weight": Parameter(
            (num, hidden, ffn),
            [TensorSlice(f"{expert}.down_proj.weight", 0, hidden, rank * ffn, ffn) for expert in experts],
        ),
    }


def _gate_up(mlp: str, rows: int, hidden: int, rank: int) -> list[TensorSlice]:
    return [
        TensorSlice(f"{mlp}.{name}.weight", rank * rows, rows, 0, hidden) for name in ("gate_proj", "up_proj")
    ]


def _vocabulary(tensor: str, spec: ModelSpec, rank: int, size: int) -> Parameter:
    """An equal part of the padded vocabulary; the last ranks may hold little of it, or none."""
    multiple = VOCABULARY_MULTIPLE
    if -(-spec.vocab_size // multiple) * multiple % size:
        multiple *= size
    rows = -(-spec.vocab_size // multiple) * multiple // size
    real = min(rows, spec.vocab_size - rank * rows)
    pieces = [TensorSlice(tensor, rank * rows, real, 0, spec.hidden_size)] if real > 0 else []
    return Parameter((rows, spec.hidden_size), pieces)


def _columns(tensor: str, rows: int, columns: int, rank: int) -> Parameter:
    return Parameter((rows, columns), [TensorSlice(tensor, 0, rows, rank * columns, columns)])


def _vector(tensor: str, length: int) -> Parameter:
    return Parameter((length,), [TensorSlice(tensor, 0, length, 0, 1)])
