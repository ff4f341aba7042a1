"""A Hugging Face model as the ranks of an SGLang server keep it: written out again, tensor by tensor, from
what SGLang's loaders do. Independent of services/rollout/engines/sglang/parameters.py."""

import numpy as np
import torch

from atoll.runtime.model_spec import ModelSpec
from atoll.wire.types import BOX, ShardLayout

State = dict[str, torch.Tensor]


def shard(state: State, spec: ModelSpec, rank: int, size: int) -> State:
    """`state`: the model's tensors by canonical name. Padding is NaN."""
    found = {"model.norm.weight": state["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in state:
            found[name] = padded(state[name], size).chunk(size)[rank]
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}.{norm}.weight"] = state[f"{layer}.{norm}.weight"]
        found |= attention(state, spec, f"{layer}.self_attn", rank, size)
        found |= mlp(state, spec, f"{layer}.mlp", rank, size)
    return {name: tensor.clone() for name, tensor in found.items()}


def padded(table_VH: torch.Tensor, size: int) -> torch.Tensor:
    """To the next multiple of 64; of 64 * size where the ranks could not share that equally."""
    length = 64
    while length < len(table_VH):
        length += 64
    if length % size:
        length = 64 * size
        while length < len(table_VH):
            length += 64 * size
    missing = torch.full((length - len(table_VH), table_VH.shape[1]), torch.nan, dtype=table_VH.dtype)
    return torch.cat([table_VH, missing])


def attention(state: State, spec: ModelSpec, name: str, rank: int, size: int) -> State:
    def heads(projection: str, kind: str, count: int) -> torch.Tensor:
        by_head = state[f"{name}.{projection}.{kind}"].unflatten(0, (count, spec.head_dim))
        if count >= size:
            return by_head.chunk(size)[rank].flatten(0, 1)
        return by_head[rank // (size // count)]

    found = {f"{name}.o_proj.weight": state[f"{name}.o_proj.weight"].chunk(size, dim=1)[rank]}
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        found[f"{name}.qkv_proj.{kind}"] = torch.cat(
            [
                heads("q_proj", kind, spec.num_heads),
                heads("k_proj", kind, spec.num_kv_heads),
                heads("v_proj", kind, spec.num_kv_heads),
            ]
        )
    if spec.qk_norm:
        found |= {f"{name}.{norm}.weight": state[f"{name}.{norm}.weight"] for norm in ("q_norm", "k_norm")}
    return found


def mlp(state: State, spec: ModelSpec, name: str, rank: int, size: int) -> State:
    def gate_up(owner: str) -> torch.Tensor:
        return torch.cat([state[f"{owner}.{half}_proj.weight"].chunk(size)[rank] for half in ("gate", "up")])

    def down(owner: str) -> torch.Tensor:
        return state[f"{owner}.down_proj.weight"].chunk(size, dim=1)[rank]

    if spec.experts is None:
        return {f"{name}.gate_up_proj.weight": gate_up(name), f"{name}.down_proj.weight": down(name)}
    experts = [f"{name}.experts.{e}" for e in range(spec.experts.num)]
    return {
        f"{name}.gate.weight": state[f"{name}.gate.weight"],
        f"{name}.experts.w13_weight": torch.stack([gate_up(expert) for expert in experts]),
        f"{name}.experts.w2_weight": torch.stack([down(expert) for expert in experts]),
    }


def random_state(spec: ModelSpec, seed: int = 0) -> State:
    """By the shapes of Hugging Face's implementation."""
    hidden, heads, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for name, rows in {"q_proj": heads, "k_proj": kv, "v_proj": kv}.items():
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
            if spec.qkv_bias:
                shapes[f"{layer}.self_attn.{name}.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads)
        if spec.qk_norm:
            shapes |= {f"{layer}.self_attn.{norm}.weight": (spec.head_dim,) for norm in ("q_norm", "k_norm")}
        owners, ffn = [f"{layer}.mlp"], spec.intermediate_size
        if spec.experts is not None:
            ffn, num = spec.experts.intermediate_size, spec.experts.num
            shapes[f"{layer}.mlp.gate.weight"] = (num, hidden)
            owners = [f"{layer}.mlp.experts.{e}" for e in range(num)]
        for owner in owners:
            shapes |= {f"{owner}.{name}.weight": (ffn, hidden) for name in ("gate_proj", "up_proj")}
            shapes[f"{owner}.down_proj.weight"] = (hidden, ffn)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def whole(state: State) -> ShardLayout:
    """As a trainer of one rank keeps it: every tensor whole, each in a buffer of its own."""
    sizes = [(len(tensor), tensor.numel() // len(tensor)) for tensor in state.values()]
    boxes = [(t, 0, rows, 0, columns, t, 0, columns) for t, (rows, columns) in enumerate(sizes)]
    return ShardLayout(tuple(state), np.array(boxes, BOX))
