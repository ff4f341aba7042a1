"""The local engine's parameters: a Hugging Face folder in one flat buffer.

Tensors that the forward pass multiplies as one (q, k, v; gate, up) are neighbours in the buffer, so
"fused" is only a wider view, and the shard layout needs one box per canonical tensor.
"""

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import ModelSpec
from atoll.wire.types import BOX, ShardLayout

ALIGNMENT = 32  # elements: a fused parameter starts on a cache line in both dtypes


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter: x @ down @ up is added to what a matrix makes of x."""

    down: torch.Tensor  # [in, rank]
    up: torch.Tensor  # [rank, out]


@dataclass(frozen=True, slots=True)
class Layer:
    """Matrices are views [in, out], ready for `mm`; norms are copies, see `_norm_scale`. Letters:
    H hidden, A heads * head_dim, K kv_heads * head_dim, D head_dim, F intermediate, E experts."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [H, A+2K]
    qkv_bias: torch.Tensor | None  # [A+2K]
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    out: torch.Tensor  # [A, H]
    mlp_norm: torch.Tensor  # [H]
    router: torch.Tensor | None  # [H, E]
    gate_up: torch.Tensor  # [H, 2F], of experts side by side [H, E * 2F]
    down: torch.Tensor  # [F, H], of experts [F, E * H]
    adapters: Mapping[str, LowRank] = field(default_factory=dict)  # by the field of their matrix


@dataclass(frozen=True, slots=True)
class Weights:
    """What the forward pass reads: views of one flat buffer, and scales made from it."""

    embedding: torch.Tensor  # [V, H]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [H]
    head: torch.Tensor  # [H, V]


@dataclass(frozen=True, slots=True)
class FlatTensor:
    """One canonical tensor; a vector is a column."""

    name: str
    rows: int
    columns: int = 1


class ReleasableCopy:
    """Of a buffer, in pages that the process can give back. All views stay valid; what they show is zeros
    then. Unlike a tensor's own storage, which cannot be resized once numpy has seen it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._pages = mmap.mmap(-1, buffer.nbytes, flags=flags)
        self.tensor = torch.frombuffer(self._pages, dtype=buffer.dtype).copy_(buffer)

    def release(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)


class BufferLayout:
    """Where each canonical tensor of a model lies in the flat buffer."""

    def __init__(self, spec: ModelSpec) -> None:
        self._outer = _outer_pieces(spec)
        self.layers = [_layer_pieces(spec, i) for i in range(spec.num_layers)]
        self._tied = spec.tied
        self._starts: dict[str, int] = {}
        self._size = 0
        for fields in (self._outer, *self.layers):
            for pieces in fields.values():
                self._size += -self._size % ALIGNMENT
                for piece in pieces:
                    self._starts[piece.name] = self._size
                    self._size += piece.rows * piece.columns

    @cached_property
    def shard_layout(self) -> ShardLayout:
        boxes = [
            (t, 0, piece.rows, 0, piece.columns, 0, self._starts[piece.name], piece.columns)
            for t, piece in enumerate(self._pieces())
        ]
        return ShardLayout(tuple(piece.name for piece in self._pieces()), np.array(boxes, BOX))

    def read(self, folder: Path, dtype: torch.dtype) -> torch.Tensor:
        """The flat buffer, filled from the folder's safetensors and cast to `dtype`.

        Raises UserError if a tensor is missing, unknown or of another shape.
        """
        buffer = torch.zeros(self._size, dtype=dtype)
        targets = {piece.name: self._view(buffer, [piece]) for piece in self._pieces()}
        for name, tensor in _read_tensors(folder):
            if self._tied and name == "lm_head.weight":
                continue
            target = targets.pop(name, None)
            if target is None or target.shape != tensor.shape:
                expected = "no such tensor" if target is None else f"shape {tuple(target.shape)}"
                raise UserError(
                    f"{folder}: tensor {name} has shape {tuple(tensor.shape)}, config.json implies {expected}"
                )
            target.copy_(tensor)
        if targets:
            raise UserError(f"{folder}: its safetensors lack {', '.join(sorted(targets))}")
        return buffer

    def bind(self, buffer: torch.Tensor) -> Weights:
        """Must be called again after the buffer has changed."""
        outer = self._tensors(buffer, self._outer)
        absent = dict.fromkeys(("qkv_bias", "q_norm", "k_norm", "router"))
        return Weights(
            embedding=outer["embedding"].t(),
            layers=tuple(
                Layer(**(absent | self._tensors(buffer, fields)))  # type: ignore[arg-type]
                for fields in self.layers
            ),
            norm=outer["norm"],
            head=outer.get("head", outer["embedding"]),
        )

    def _tensors(
        self, buffer: torch.Tensor, fields: Mapping[str, list[FlatTensor]]
    ) -> dict[str, torch.Tensor]:
        """Matrices as [in, out]."""
        return {
            field: _norm_scale(self._view(buffer, pieces))
            if field.endswith("norm")
            else self._view(buffer, pieces).t()
            for field, pieces in fields.items()
        }

    def _pieces(self) -> list[FlatTensor]:
        return [
            piece for fields in (self._outer, *self.layers) for pieces in fields.values() for piece in pieces
        ]

    def _view(self, buffer: torch.Tensor, pieces: list[FlatTensor]) -> torch.Tensor:
        """The neighbours as one tensor, top to bottom."""
        rows, columns = sum(piece.rows for piece in pieces), pieces[0].columns
        flat = buffer.narrow(0, self._starts[pieces[0].name], rows * columns)
        return flat if columns == 1 else flat.view(rows, columns)


def _norm_scale(weight: torch.Tensor) -> torch.Tensor:
    """sqrt(n) * weight in fp32: x * scale / |x| is then RMSNorm without eps."""
    return weight.float().mul(len(weight) ** 0.5)


def _outer_pieces(spec: ModelSpec) -> dict[str, list[FlatTensor]]:
    """The fields of `Weights`; tied models have no head of their own."""
    pieces = {
        "embedding": [FlatTensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)],
        "norm": [FlatTensor("model.norm.weight", spec.hidden_size)],
    }
    head = {"head": [FlatTensor("lm_head.weight", spec.vocab_size, spec.hidden_size)]}
    return pieces if spec.tied else pieces | head


def _layer_pieces(spec: ModelSpec, i: int) -> dict[str, list[FlatTensor]]:
    """The fields of `Layer` that the model has, and the canonical tensors that each is made of."""
    layer, hidden = f"model.layers.{i}", spec.hidden_size
    mlps, ffn = [f"{layer}.mlp"], spec.intermediate_size
    if spec.experts is not None:
        ffn = spec.experts.intermediate_size
        mlps = [f"{layer}.mlp.experts.{e}" for e in range(spec.experts.num)]
    heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {"q_proj": heads, "k_proj": kv, "v_proj": kv}
    pieces = {
        "input_norm": [FlatTensor(f"{layer}.input_layernorm.weight", hidden)],
        "qkv": [FlatTensor(f"{layer}.self_attn.{name}.weight", n, hidden) for name, n in rows.items()],
        "out": [FlatTensor(f"{layer}.self_attn.o_proj.weight", hidden, heads)],
        "mlp_norm": [FlatTensor(f"{layer}.post_attention_layernorm.weight", hidden)],
        "gate_up": [
            FlatTensor(f"{mlp}.{name}.weight", ffn, hidden)
            for mlp in mlps
            for name in ("gate_proj", "up_proj")
        ],
        "down": [FlatTensor(f"{mlp}.down_proj.weight", hidden, ffn) for mlp in mlps],
    }
    if spec.experts is not None:
        pieces["router"] = [FlatTensor(f"{layer}.mlp.gate.weight", spec.experts.num, hidden)]
    if spec.qkv_bias:
        pieces["qkv_bias"] = [FlatTensor(f"{layer}.self_attn.{name}.bias", n) for name, n in rows.items()]
    if spec.qk_norm:
        pieces["q_norm"] = [FlatTensor(f"{layer}.self_attn.q_norm.weight", spec.head_dim)]
        pieces["k_norm"] = [FlatTensor(f"{layer}.self_attn.k_norm.weight", spec.head_dim)]
    return pieces


def _read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every *.safetensors file, one at a time."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"model.path = {folder} holds no *.safetensors file: save the model in that format")
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{path} is not a readable safetensors file ({error}): copy it again") from error
