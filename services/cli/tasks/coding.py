"""The task of the coding example: fix a function in a file, with tools that edit files and run tests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from atoll.cli.tasks import arithmetic
from atoll.cli.tasks.assets import prompt_row, train_byte_level_bpe, write_model, write_rows
from atoll.cli.tasks.tools import CHAT_TEMPLATE, SPECIAL

SHAPE = replace(arithmetic.SHAPE, family="qwen3", vocab_size=512, max_positions=1024)
OPERATORS = {"sum": "+", "difference": "-", "product": "*"}  # by what the user calls the result
NAMES = [f"{first}{second}" for first in "fghpqr" for second in "abcdexyz"]  # of functions
VALIDATION_SHARE = 8  # every 8th
FILE = "mine.py"
TEST = """import unittest, mine
class Test(unittest.TestCase):
    def test(self):
        self.assertEqual(mine.{}(7, 3), {})
"""
MAX_RESULT = 24  # characters that the example's agent reads of a tool's result
REPORT = f"F\n{(MAX_RESULT - 2) * '='}\n[cut: the result has %d characters]"  # of a test that fails
FUNCTION = "def {}(a, b):\n    return a {} b\n"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("run_tests", "write_file")
]


def build_coding(out: Path, seed: int) -> None:
    """Writes out/model, train.parquet and validation.parquet (other names of functions), and warmup.parquet:
    sessions that run the tests and then write any operator. They show the form; which operator is meant is to
    be learned from the reward."""
    write_model(out / "model", SHAPE, _tokenizer(), SPECIAL, CHAT_TEMPLATE, seed)
    rng = np.random.default_rng(seed)
    names = [NAMES[int(i)] for i in rng.permutation(len(NAMES))]
    split = len(names) // VALIDATION_SHARE
    for part, of_part in (("validation", names[:split]), ("train", names[split:])):
        tasks = [(name, result) for name in of_part for result in OPERATORS]
        rows = [_row(*task, {"split": part, "index": i}, rng) for i, task in enumerate(tasks)]
        write_rows(out / f"{part}.parquet", rows)
    warmup = [(name, result) for name in names[split:] for result in OPERATORS]
    write_rows(out / "warmup.parquet", [_warmup_row(*task, rng) for task in 8 * warmup])


def _row(name: str, result: str, extra: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    right = OPERATORS[result]
    broken = rng.choice([operator for operator in OPERATORS.values() if operator != right])
    truth = json.dumps([f"assert {name}({a}, {b}) == {a} {right} {b}" for a, b in ((7, 3), (2, 5), (4, 4))])
    files = {
        FILE: FUNCTION.format(name, broken),
        "test_mine.py": TEST.format(name, {"+": 10, "-": 4, "*": 21}[right]),
    }
    return prompt_row(_prompt(name, result), truth, "coding", extra | {"files": json.dumps(files)})


def _prompt(name: str, result: str) -> str:
    return f"{FILE}: {name} must return the {result}."


def _warmup_row(name: str, result: str, rng: np.random.Generator) -> dict[str, Any]:
    text = FUNCTION.format(name, rng.choice([*OPERATORS.values()]))
    messages = [
        {"role": "user", "content": _prompt(name, result)},
        _call("run_tests", {}),
        {"role": "tool", "content": REPORT % rng.integers(500, 600)},
        _call("write_file", {"path": FILE, "text": text}),
        {"role": "tool", "content": f"{FILE} now has 2 lines."},
        {"role": "assistant", "content": "Done."},
    ]
    return {"messages": messages, "tools": TOOLS}


def _call(name: str, arguments: dict[str, str]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "tool_calls": [call]}


def _tokenizer() -> Tokenizer:
    call = json.dumps({"name": "write_file", "arguments": {"path": FILE, "text": FUNCTION}})
    prompts = [_prompt("fa", result) for result in OPERATORS]
    words = [call, *prompts, REPORT, "tools\n", "run_tests\n", "user\n", "assistant\n", "tool\n", "Done."]
    tokenizer = train_byte_level_bpe(words, SHAPE.vocab_size, SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return tokenizer
