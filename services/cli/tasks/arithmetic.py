"""The quickstart's task: sums of two numbers, `12+34=`, for a model with one million parameters."""

from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from atoll.cli.tasks.assets import ModelShape, SpecialTokens, prompt_row, warmup_row, write_model, write_rows

CHARACTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz"
SPECIAL = SpecialTokens(eos="<eos>", pad="<pad>")
SHAPE = ModelShape(
    family="qwen2",
    vocab_size=64,
    hidden_size=128,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=64,
)
MAX_SUMS = 8100  # all pairs of two-digit numbers
VALIDATION_SHARE = 16  # every 16th


def build_arithmetic(out: Path, seed: int, digits: int = 2) -> None:
    """Writes out/model and sums of two `digits`-digit numbers: train, validation (different sums, each with
    its answer) and warmup.parquet (the training sums with their answers)."""
    write_model(out / "model", SHAPE, _tokenizer(), SPECIAL, None, seed)
    low, high = 10 ** (digits - 1), 10**digits
    span = high - low
    picked = np.random.default_rng(seed).choice(span**2, min(span**2, MAX_SUMS), replace=False)
    pairs = [(low + int(i) // span, low + int(i) % span) for i in picked]
    split = len(pairs) // VALIDATION_SHARE
    answered = [warmup_row(f"{a}+{b}=", str(a + b)) for a, b in pairs]
    graded = [
        prompt_row(f"{a}+{b}=", str(a + b), "arithmetic", {"split": name, "index": i})
        for name, part in (("validation", pairs[:split]), ("train", pairs[split:]))
        for i, (a, b) in enumerate(part)
    ]
    both = [row | answer for row, answer in zip(graded, answered, strict=True)]
    write_rows(out / "validation.parquet", both[:split])
    write_rows(out / "train.parquet", graded[split:])
    write_rows(out / "warmup.parquet", answered[split:])


def _tokenizer() -> Tokenizer:
    """One token per character."""
    special = [SPECIAL.pad, SPECIAL.eos, "<unk>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    return tokenizer
