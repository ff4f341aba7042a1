"""Reads and validates a Hugging Face folder's config.json."""

import json
from dataclasses import dataclass, replace
from math import pi
from pathlib import Path
from typing import Any, Literal

from atoll.config.schema import ParallelConfig, Role, TokenLimit
from atoll.runtime.errors import UserError
from atoll.runtime.hub import missing_model

Family = Literal["llama", "qwen2", "qwen3", "qwen3_moe"]
Head = Literal["language", "value"]  # on top of the last hidden state: logits, or one number
ARCHITECTURES: dict[str, tuple[Family, Head]] = {
    "LlamaForCausalLM": ("llama", "language"),
    "Qwen2ForCausalLM": ("qwen2", "language"),
    "Qwen3ForCausalLM": ("qwen3", "language"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "language"),
    "LlamaForSequenceClassification": ("llama", "value"),
    "Qwen2ForSequenceClassification": ("qwen2", "value"),
    "Qwen3ForSequenceClassification": ("qwen3", "value"),
    "Qwen3MoeForSequenceClassification": ("qwen3_moe", "value"),
}
# Heads that the folder of a role's model may have: a critic may start from a policy's folder.
HEADS: dict[Role, tuple[Head, ...]] = {
    "actor": ("language",),
    "reference": ("language",),
    "critic": ("language", "value"),
    "cost_critic": ("language", "value"),
    "reward_model": ("value",),
    "cost_model": ("value",),
}
# what we compute, by the config's key
COMPUTED: dict[str, object] = {
    "hidden_act": "silu",
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "mlp_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1 RoPE scaling (arXiv:2407.21783, section 3.4.2)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def apply(self, frequencies: Any) -> Any:
        """Frequencies with wavelengths above original_positions / low_freq_factor are divided by `factor`,
        those below original_positions / high_freq_factor stay; in between they are interpolated.
        """
        num_rotations = self.original_positions / (2 * pi / frequencies)
        kept = ((num_rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clip(
            0, 1
        )
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of every MLP: a router sends each token to some of them."""

    num: int
    per_token: int
    intermediate_size: int
    norm_topk_prob: bool  # the chosen ones' probabilities are scaled to sum 1

    @property
    def route_dtype(self) -> str:
        """Of recorded numbers of experts, as NumPy and torch name it; its largest value stands for none."""
        return "uint8" if self.num < 256 else "int16"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A Llama, Qwen2, Qwen3 or Qwen3-MoE."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    max_positions: int
    head: Head
    tied: bool  # the output layer is the embedding; False for a value head
    qkv_bias: bool  # Qwen2
    qk_norm: bool  # Qwen3
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None  # None: a dense MLP of intermediate_size

    @property
    def route_shape(self) -> tuple[int, int]:
        """Layers, and experts of a token in each."""
        return self.num_layers, self.experts.per_token if self.experts else 0

    def rotary_frequencies(self, even: Any) -> Any:
        """Radians per position of each pair of a head's dimensions. `even` is 0, 2 .. head_dim - 2 in fp32,
        a NumPy array or a tensor, and so is the result."""
        frequencies = 1.0 / self.rope_theta ** (even / self.head_dim)
        return frequencies if self.rope_scaling is None else self.rope_scaling.apply(frequencies)


def read_spec(folder: Path, heads: tuple[Head, ...] = ("language",)) -> ModelSpec:
    """What the folder holds. Raises UserError if it is no model that Atoll can run with one of `heads`."""
    config = _read_config(folder)

    def need(key: str) -> Any:
        if key not in config:
            raise UserError(
                f"{folder}/config.json: no {key!r}; expected a Llama, Qwen2, Qwen3 or Qwen3-MoE configuration"
            )
        return config[key]

    def refuse(key: str, got: object, expected: str) -> None:
        raise UserError(
            f"{folder}/config.json: {key} is {got!r}, expected {expected}: this model is not supported"
        )

    architectures = need("architectures")
    expected_architectures = sorted(name for name, (_, head) in ARCHITECTURES.items() if head in heads)
    if len(architectures) != 1 or architectures[0] not in expected_architectures:
        refuse("architectures", architectures, f"one of {expected_architectures}")
    family, head = ARCHITECTURES[architectures[0]]
    num_labels = len(config.get("id2label", (0, 1)))  # without the key, transformers takes two
    if head == "value" and num_labels != 1:
        refuse("num_labels", num_labels, "1, whose logit is the value")
    # transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta"),
        **(config.get("rope_scaling") or {}),
    }
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        refuse("rope_type", rope_type, "'default' or 'llama3'")
    if not rope.get("rope_theta"):
        refuse("rope_theta", rope.get("rope_theta"), "a positive number")
    computed = COMPUTED | ({} if family == "qwen2" else {"attention_bias": False})
    for key, expected in computed.items():
        if config.get(key) not in (None, expected):
            refuse(key, config[key], repr(expected))

    return ModelSpec(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=need("num_hidden_layers"),
        num_heads=need("num_attention_heads"),
        num_kv_heads=need("num_key_value_heads"),
        head_dim=config.get("head_dim") or need("hidden_size") // need("num_attention_heads"),
        rope_theta=float(rope["rope_theta"]),
        norm_eps=need("rms_norm_eps"),
        max_positions=need("max_position_embeddings"),
        head=head,
        tied=head == "language" and config.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        rope_scaling=_rope_scaling(rope, folder) if rope_type == "llama3" else None,
        experts=_experts(config, folder) if family == "qwen3_moe" else None,
    )


def _rope_scaling(rope: dict[str, Any], folder: Path) -> RopeScaling:
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if missing := [key for key in keys if not rope.get(key)]:
        raise UserError(f"{folder}/config.json: rope_type 'llama3' lacks {missing[0]}: copy the file again")
    return RopeScaling(*(rope[key] for key in keys))


def _experts(config: dict[str, Any], folder: Path) -> Experts:
    num = config.get("num_experts", config.get("num_local_experts"))  # transformers 5 writes the second
    per_token, size = config.get("num_experts_per_tok"), config.get("moe_intermediate_size")
    if not num or not size or not per_token or per_token > num:
        raise UserError(
            f"{folder}/config.json: num_experts is {num}, num_experts_per_tok {per_token}, "
            f"moe_intermediate_size {size}; expected positive numbers, the second at most the first: "
            "copy the file again"
        )
    return Experts(num, per_token, size, config.get("norm_topk_prob", False))


def with_value_head(spec: ModelSpec) -> ModelSpec:
    """The same model with a value head in place of its output layer."""
    return replace(spec, head="value", tied=False)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"{folder} is not a model folder: no config.json; {missing_model(folder)}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}; copy the model folder again") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: got a JSON {type(config).__name__}, expected an object")
    return config


def check_length(limit: TokenLimit, spec: ModelSpec, folder: Path) -> None:
    """Raises UserError if sequences may become longer than the model has positions."""
    if limit.tokens > spec.max_positions:
        raise UserError(
            f"{limit.setting} = {limit.tokens}, but {folder} has {spec.max_positions} positions: "
            "set it to that or less"
        )


def check_router_replay(spec: ModelSpec, folder: Path) -> None:
    """Raises UserError if the model has no routers whose choice could be replayed."""
    if spec.experts is None:
        raise UserError(
            f"trainer.router_replay = true, but {folder} is a dense model, which has no experts: remove it"
        )


def check_layout(spec: ModelSpec, parallel: ParallelConfig, section: str) -> None:
    """Raises UserError if the ranks that `section` of the config asks for cannot share the model."""
    divisions = [
        ("tensor", parallel.tensor, "num_key_value_heads", spec.num_kv_heads),
        ("tensor", parallel.tensor, "num_attention_heads", spec.num_heads),
        ("tensor", parallel.tensor, "vocab_size", spec.vocab_size),
        ("pipeline", parallel.pipeline, "num_hidden_layers", spec.num_layers),
    ]
    if parallel.virtual_pipeline > 1:
        name, size = "pipeline x virtual_pipeline", parallel.pipeline * parallel.virtual_pipeline
        divisions.append((name, size, "num_hidden_layers", spec.num_layers))
    if spec.experts is None:
        divisions.append(("tensor", parallel.tensor, "intermediate_size", spec.intermediate_size))
        if parallel.expert > 1:
            raise UserError(
                f"{section}.parallel.expert = {parallel.expert}: the model has no experts: remove it"
            )
    else:
        divisions.append(("expert", parallel.expert, "num_experts", spec.experts.num))
        if parallel.tensor > 1 and not parallel.sequence:
            raise UserError(
                f"{section}.parallel.tensor = {parallel.tensor}: every rank would send the same tokens to "
                f"the model's experts: set {section}.parallel.sequence = true"
            )
    for setting, size, name, value in divisions:
        if value % size:
            raise UserError(
                f"{section}.parallel.{setting} = {size} does not divide the model's {name} = {value}: "
                "choose a size that divides it"
            )
