"""The task of the guess example: find a number of a range within a few guesses, told "higher" or "lower"."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from atoll.cli.tasks import arithmetic
from atoll.cli.tasks.assets import (
    SpecialTokens,
    prompt_row,
    train_byte_level_bpe,
    write_model,
    write_rows,
)

SPECIAL = SpecialTokens(eos="<|im_end|>", pad="<|endoftext|>")
SHAPE = replace(
    arithmetic.SHAPE,
    family="qwen3",
    vocab_size=320,
    intermediate_size=256,
    num_layers=2,
    num_kv_heads=4,
    max_positions=256,
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SIZE = 7  # numbers of a range
GUESSES = 3  # enough for a binary search
LOWEST = range(1001, 10000, 10)  # of a range, such as 3741 to 3747
NUM_HELD_OUT = 20  # ranges
PROMPT = "guess"
WARMUP_GAMES = 16384


def build_guess(out: Path, seed: int) -> None:
    """Writes out/model, train.parquet and validation.parquet (all games of different ranges), and
    warmup.parquet: games of a player who guesses at random among the numbers that are left. They show the
    rules; where to guess is to be learned from the reward."""
    write_model(out / "model", SHAPE, _tokenizer(), SPECIAL, CHAT_TEMPLATE, seed)
    rng = np.random.default_rng(seed)
    ranges = [range(low, low + SIZE) for low in rng.permutation(LOWEST).tolist()]
    for name, part in (("validation", ranges[:NUM_HELD_OUT]), ("train", ranges[NUM_HELD_OUT:])):
        games = [(numbers, secret) for numbers in part for secret in numbers]
        write_rows(out / f"{name}.parquet", [_row(*game, name, i) for i, game in enumerate(games)])
    picked = rng.integers(NUM_HELD_OUT, len(ranges), WARMUP_GAMES).tolist()
    write_rows(out / "warmup.parquet", [_warmup_row(ranges[i], rng) for i in picked])


def _row(numbers: range, secret: int, split: str, index: int) -> dict[str, Any]:
    """`environment` is the state that the environment is reset to."""
    state = {"low": numbers[0], "high": numbers[-1], "secret": secret, "guesses": GUESSES}
    return prompt_row(PROMPT, str(secret), "guess", {"split": split, "index": index, "environment": state})


def _warmup_row(numbers: range, rng: np.random.Generator) -> dict[str, Any]:
    secret, low, high = int(rng.choice(numbers)), numbers[0], numbers[-1]
    told = f"{PROMPT}\n{low}-{high}"
    messages = []
    for _ in range(GUESSES):
        guess = int(rng.integers(low, high, endpoint=True))
        messages += [{"role": "user", "content": told}, {"role": "assistant", "content": str(guess)}]
        if guess == secret:
            break
        told = "higher" if guess < secret else "lower"
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    return {"messages": messages}


def _tokenizer() -> Tokenizer:
    """Words and digits are one token each."""
    words = ["user\n", "assistant\n", PROMPT, "higher", "lower"]
    return train_byte_level_bpe(words, SHAPE.vocab_size, SPECIAL)
