"""The worked table of docs/trainer.md says what `atoll plan --memory` computes.

`python -m tests.unit.test_trainer_page` prints the rows as they should be.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.config.schema import LoraConfig, OptimizerConfig, ParallelConfig, TrainerSection
from atoll.runtime.memory import host_memory, rank_memory
from atoll.runtime.model_spec import ModelSpec, read_spec

PAGE = Path("docs/trainer.md")
GIB = 1 << 30
DEVICE_GIB = 80

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 152064,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def shape(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, **others: object
) -> dict[str, object]:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }
    return QWEN | sizes | others


MODELS = {  # as their config.json says
    "1.5B": shape(1536, 8960, 28, 12, 2, vocab_size=151936, tie_word_embeddings=True),
    "7B": shape(3584, 18944, 28, 28, 4),
    "32B": shape(5120, 27648, 64, 40, 8),
    "30B-A3B": shape(
        2048,
        6144,
        48,
        32,
        4,
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=151936,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
}
ATTENTION = LoraConfig(targets=("q_proj", "k_proj", "v_proj", "o_proj"))
ROWS: list[tuple[str, dict[str, Any], str, int, LoraConfig | None]] = [
    # model, layout, recompute, max_tokens_per_microbatch, adapters
    ("1.5B", {"data": 8}, "selective", 16384, None),
    ("1.5B", {"data": 64}, "selective", 16384, None),
    ("7B", {"tensor": 2, "sequence": True, "data": 4}, "selective", 16384, None),
    ("7B", {"tensor": 2, "sequence": True, "data": 32}, "selective", 16384, None),
    ("32B", {"tensor": 8, "sequence": True}, "full", 4096, None),
    ("32B", {"tensor": 4, "sequence": True, "data": 2}, "full", 16384, LoraConfig()),
    ("32B", {"tensor": 8, "sequence": True, "data": 8}, "full", 16384, None),
    ("32B", {"tensor": 4, "sequence": True, "pipeline": 2, "data": 8}, "full", 16384, None),
    ("30B-A3B", {"tensor": 2, "sequence": True, "expert": 8, "data": 4}, "full", 4096, None),
    ("30B-A3B", {"expert": 8, "data": 8}, "full", 16384, ATTENTION),
    ("30B-A3B", {"tensor": 2, "sequence": True, "expert": 8, "data": 32}, "full", 16384, None),
]


def rows(folder: Path) -> Iterator[str]:
    """One line of the table each: layout, settings, GiB on the rank that needs most."""
    for model, layout, recompute, tokens, lora in ROWS:
        section = TrainerSection(
            parallel=ParallelConfig(**layout),
            dtype="bfloat16",
            recompute=recompute,
            max_tokens_per_microbatch=tokens,
            optimizer=OptimizerConfig(distributed=layout.get("data", 1) > 1),
            lora=lora,
        )
        spec = spec_of(folder, model)
        stages = range(section.parallel.pipeline)
        memory = max((rank_memory(spec, section, s, "update") for s in stages), key=lambda m: m.total)
        sizes = (
            memory.parameters,
            memory.gradients,
            memory.optimizer,
            memory.activations,
            memory.working,
            memory.total,
        )
        names = {"tensor": "TP", "pipeline": "PP", "expert": "EP", "data": "DP"}
        axes = " ".join(f"{names[axis]}{size}" for axis, size in layout.items() if axis in names)
        axes += " SP" if section.parallel.sequence else ""
        what = "full" if lora is None else f"LoRA {lora.rank}"
        cells = " | ".join(f"{size / GIB:.1f}" for size in sizes)
        world = section.parallel.world_size
        yield f"| {model} | {world} | {what} | {axes} | {recompute} | {tokens:,} | {cells} |"


def spec_of(folder: Path, model: str) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(MODELS[model]))
    return read_spec(folder)


def test_the_page_has_what_is_computed(tmp_path: Path) -> None:
    page = PAGE.read_text()
    for row in rows(tmp_path):
        assert row in page


def test_every_row_fits_its_devices(tmp_path: Path) -> None:
    for row in rows(tmp_path):
        assert float(row.split("|")[-2]) < 0.95 * DEVICE_GIB, row  # what is unknown needs some, too


@pytest.mark.parametrize(
    ("model", "billions"), [("1.5B", 1.54), ("7B", 7.62), ("32B", 32.76), ("30B-A3B", 30.53)]
)
def test_models_have_the_size_that_their_cards_say(tmp_path: Path, model: str, billions: float) -> None:
    memory = rank_memory(spec_of(tmp_path, model), TrainerSection(dtype="bfloat16"), 0, "update")
    assert round(memory.parameters / 2e9, 2) == billions


def test_offloaded_activations_are_on_the_host(tmp_path: Path) -> None:
    """The page's formula, with the figures of the 7B model: 28 layers, 16,384 tokens, bfloat16."""
    spec = spec_of(tmp_path, "7B")
    section = TrainerSection(dtype="bfloat16", max_tokens_per_microbatch=16384, recompute="offload")
    page = 28 * 16384 * 2 * (4 * 3584 + 3 * 3584 + 2 * 512 + 4 * 18944)
    assert host_memory(spec, section, 0, push_bytes=0) == pytest.approx(page, rel=0.05)
    memory = rank_memory(spec, section, 0, "update")
    assert memory.activations < 16384 * 2 * (4 * 3584)  # the final norm's and the head's
    assert memory.working > page / 28  # one layer's


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(rows(Path(folder))))
