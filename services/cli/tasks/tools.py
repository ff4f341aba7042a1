"""The task of two examples: sums as in `arithmetic.py`, for a model that can call a tool or guess."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from atoll.cli.tasks import arithmetic
from atoll.cli.tasks.assets import (
    SpecialTokens,
    prompt_row,
    train_byte_level_bpe,
    write_model,
    write_rows,
)

SPECIAL = SpecialTokens(eos="<|im_end|>", pad="<|endoftext|>")
SHAPE = replace(arithmetic.SHAPE, family="qwen3", vocab_size=384, max_positions=512)
# Calls in the Hermes format. Of the tools it shows the names alone: so small a model reads no schema.
CHAT_TEMPLATE = (
    "{%- if tools %}"
    "{{- '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool.function.name + '\n' }}{% endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{- '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add"}}
LOW, HIGH = 10, 100  # two digits
VALIDATION_SHARE = 16  # every 16th
GUESS_SHARE = 3 / 4  # of the warm-up's sums: the first reply is a guess instead of a call
NO_TOOL_SHARE = 1 / 8  # of the warm-up's sums: also a guess without a tool


def build_tools(out: Path, seed: int) -> None:
    """Writes out/model, train.parquet and validation.parquet (different sums), and warmup.parquet: guesses
    with and without a tool, fewer calls, and replies to the result of a call. They show the form; no guess is
    better than chance, so that calls are what is to be learned from the reward."""
    write_model(out / "model", SHAPE, _tokenizer(), SPECIAL, CHAT_TEMPLATE, seed)
    rng = np.random.default_rng(seed)
    span = HIGH - LOW
    pairs = [(LOW + int(i) // span, LOW + int(i) % span) for i in rng.permutation(span**2)]
    split = len(pairs) // VALIDATION_SHARE
    for name, part in (("validation", pairs[:split]), ("train", pairs[split:])):
        rows = [
            prompt_row(f"{a}+{b}=", str(a + b), "tools", {"split": name, "index": i})
            for i, (a, b) in enumerate(part)
        ]
        write_rows(out / f"{name}.parquet", rows)
    write_rows(out / "warmup.parquet", [row for pair in pairs[split:] for row in _warmup_rows(*pair, rng)])


def _warmup_rows(a: int, b: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """The reply to a result is learned from every sum, the call before it only where no guess is shown."""
    question = {"role": "user", "content": f"{a}+{b}="}
    guess = {"role": "assistant", "content": str(rng.integers(2 * LOW, 2 * HIGH))}
    is_guess, has_no_tool = rng.random() < GUESS_SHARE, rng.random() < NO_TOOL_SHARE
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    called = [
        {"role": "assistant", "tool_calls": [call], "weight": 0 if is_guess else 1},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]
    rows = [{"messages": [question, *called], "tools": [ADD]}]
    rows += [{"messages": [question, guess], "tools": [ADD]}] if is_guess else []
    rows += [{"messages": [question, guess], "tools": None}] if has_no_tool else []
    return rows


def _tokenizer() -> Tokenizer:
    """The words of a call are one token each."""
    call = json.dumps({"name": "add", "arguments": {"a": 12, "b": 34}})
    words = [call, "tools\n", "user\n", "assistant\n", "tool\n"]
    tokenizer = train_byte_level_bpe(words, SHAPE.vocab_size, SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return tokenizer
