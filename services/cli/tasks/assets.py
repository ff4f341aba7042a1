"""Small models and data sets in standard formats, written without torch."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from atoll.wire.types import Float32

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense Qwen2 (biases on query, key, value) or Qwen3 (norms on query and key heads)."""

    family: Literal["qwen2", "qwen3"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope_theta: float = 10_000.0

    @property
    def initializer_range(self) -> float:
        """Standard deviation of random weights. The 0.02 of large models is too small for a narrow one: after
        300 warm-up steps on sums it answers 5 % correctly, and 1/sqrt(hidden_size) answers 70 %.
        """
        return 1 / math.sqrt(self.hidden_size)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    eos: str
    pad: str


def write_model(
    folder: Path,
    shape: ModelShape,
    tokenizer: Tokenizer,
    special: SpecialTokens,
    chat_template: str | None,
    seed: int,
) -> None:
    """A Hugging Face folder with random fp32 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    weights = {name: _initial(name, size, shape.initializer_range, rng) for name, size in _parameters(shape)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {
        "eos_token_id": tokenizer.token_to_id(special.eos),
        "pad_token_id": tokenizer.token_to_id(special.pad),
    }
    _write_json(folder / "config.json", _config(shape) | ids)
    _write_json(folder / "generation_config.json", ids)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special.eos,
        "pad_token": special.pad,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    _write_json(folder / "tokenizer_config.json", settings)


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, special: SpecialTokens) -> Tokenizer:
    """Byte-level BPE in which every digit is one token; its chat format opens messages with <|im_start|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special.pad, "<|im_start|>", special.eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prompt_row(
    content: str, ground_truth: str, data_source: str, extra: Mapping[str, object]
) -> dict[str, Any]:
    """A row in verl's schema."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(extra),
    }


def warmup_row(content: str, response: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": content}], "response": response}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def _config(shape: ModelShape) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "initializer_range": shape.initializer_range,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "dtype": "float32",
    }


def _parameters(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and sizes of the family's parameters in transformers."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    width = {"q": shape.num_heads * shape.head_dim}
    width["k"] = width["v"] = shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    for i in range(shape.num_layers):
        layer = f"model.layers.{i}"
        for part in "qkv":
            yield f"{layer}.self_attn.{part}_proj.weight", (width[part], hidden)
            if shape.family == "qwen2":
                yield f"{layer}.self_attn.{part}_proj.bias", (width[part],)
        if shape.family == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (shape.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (shape.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, width["q"])
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab_size, hidden)


def _initial(name: str, size: tuple[int, ...], deviation: float, rng: np.random.Generator) -> Float32:
    if name.endswith("norm.weight"):
        return np.ones(size, np.float32)
    if name.endswith("bias"):
        return np.zeros(size, np.float32)
    return rng.standard_normal(size, np.float32) * np.float32(deviation)


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
