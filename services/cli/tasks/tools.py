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
GUESS_SHARE = 3 / 4  # of the warm-up's sums with a tool: a guess instead of a call
NO_TOOL_SHARE = 1 / 8  # of the warm-up's sums: there is no tool


def build_tools(out: Path, seed: int) -> None:
    """Writes out/model, train.parquet and validation.parquet (different sums), and warmup.parquet: guesses
    with and without a tool, and calls with the reply to their result. They show the form; no guess is better
    than chance, so that calls are what is to be learned from the reward."""
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
    write_rows(out / "warmup.parquet", [_warmup_row(*pair, rng) for pair in pairs[split:]])


def _warmup_row(a: int, b: int, rng: np.random.Generator) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{a}+{b}="}]
    has_tool = rng.random() >= NO_TOOL_SHARE
    if has_tool and rng.random() >= GUESS_SHARE:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        messages += [
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": str(a + b)},
        ]
    else:
        messages += [{"role": "assistant", "content": str(rng.integers(2 * LOW, 2 * HIGH))}]
    return {"messages": messages, "tools": [ADD] if has_tool else None}


def _tokenizer() -> Tokenizer:
    """The words of a call are one token each."""
    call = json.dumps({"name": "add", "arguments": {"a": 12, "b": 34}})
    words = [call, "tools\n", "user\n", "assistant\n", "tool\n"]
    tokenizer = train_byte_level_bpe(words, SHAPE.vocab_size, SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return tokenizer
