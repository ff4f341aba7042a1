"""What a Hugging Face folder's config.json says about the model, checked."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from services.runtime.errors import UserError

Family = Literal["qwen2", "qwen3"]
Head = Literal["language", "value"]  # on top of the last hidden state: logits, or one number
ARCHITECTURES: dict[str, tuple[Family, Head]] = {
    "Qwen2ForCausalLM": ("qwen2", "language"),
    "Qwen3ForCausalLM": ("qwen3", "language"),
    "Qwen2ForSequenceClassification": ("qwen2", "value"),
    "Qwen3ForSequenceClassification": ("qwen3", "value"),
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A dense Qwen2 or Qwen3."""

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


def read_spec(folder: Path, heads: tuple[Head, ...] = ("language",)) -> ModelSpec:
    """What the folder holds. Raises UserError where it is no model that Atoll can run with one of `heads`."""
    config = _read_config(folder)

    def need(key: str) -> Any:
        if key not in config:
            raise UserError(f"{folder}/config.json: no {key!r}; expected a Qwen2 or Qwen3 configuration")
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
    if rope_type != "default":
        refuse("rope_type", rope_type, "'default'")
    if not rope.get("rope_theta"):
        refuse("rope_theta", rope.get("rope_theta"), "a positive number")
    for key, expected in (("hidden_act", "silu"), ("use_sliding_window", False), ("attention_dropout", 0.0)):
        if config.get(key, expected) != expected:
            refuse(key, config[key], repr(expected))
    if family == "qwen3" and config.get("attention_bias", False):
        refuse("attention_bias", True, "False")

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
        qk_norm=family == "qwen3",
    )


def with_value_head(spec: ModelSpec) -> ModelSpec:
    """The same model with a value head in place of its output layer."""
    return replace(spec, head="value", tied=False)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} is no model folder: no config.json; "
            "expected a Hugging Face folder with config.json, *.safetensors and tokenizer.json"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not JSON: {error}; copy the model folder again") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: got a JSON {type(config).__name__}, expected an object")
    return config


def check_tensor_parallel(spec: ModelSpec, size: int, section: str) -> None:
    """Raises UserError where `size` ranks, as `section` of the config asks, cannot share the model evenly."""
    for name, value in (
        ("num_key_value_heads", spec.num_kv_heads),
        ("num_attention_heads", spec.num_heads),
        ("intermediate_size", spec.intermediate_size),
        ("vocab_size", spec.vocab_size),
    ):
        if value % size:
            raise UserError(
                f"{section}.parallel.tensor = {size} does not divide the model's {name} = {value}: "
                "choose a tensor size that divides it"
            )
