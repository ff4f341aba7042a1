"""GSM8K for a small model: rows in verl's schema, a tokenizer trained on its texts, random weights."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from atoll.cli.tasks.assets import (
    ModelShape,
    SpecialTokens,
    prompt_row,
    train_byte_level_bpe,
    warmup_row,
    write_model,
    write_rows,
)
from atoll.reward.verifiers.gsm8k import extract_answer
from atoll.runtime.errors import UserError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPECIAL = SpecialTokens(eos="<|im_end|>", pad="<|endoftext|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE = ModelShape(
    family="qwen3",
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=384,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=1024,
)

_CALCULATION = re.compile(r"<<[^>]*>>")  # calculator annotations of the dataset, "<<48/2=24>>"


@dataclass(frozen=True, slots=True)
class Problem:
    question: str
    answer: str  # the worked solution, ending in "#### number"

    @property
    def prompt(self) -> str:
        return f"{self.question} {INSTRUCTION}"

    @property
    def solution(self) -> str:
        """The worked solution without calculator annotations."""
        return _CALCULATION.sub("", self.answer)


def build_gsm8k(source: Path, out: Path, seed: int) -> None:
    """Reads source/train.jsonl and test.jsonl ({"question", "answer"} a line); writes out/model,
    train.parquet, test.parquet and warmup.parquet (the training solutions).

    Raises UserError that names file, line and field.
    """
    splits = {name: _read(source / f"{name}.jsonl") for name in ("train", "test")}
    write_model(out / "model", SHAPE, _tokenizer(splits["train"]), SPECIAL, CHAT_TEMPLATE, seed)
    for name, problems in splits.items():
        rows = [
            prompt_row(
                problem.prompt,
                str(extract_answer(problem.answer)),
                DATA_SOURCE,
                {"split": name, "index": i, "question": problem.question, "answer": problem.answer},
            )
            for i, problem in enumerate(problems)
        ]
        write_rows(out / f"{name}.parquet", rows)
    write_rows(out / "warmup.parquet", [warmup_row(p.prompt, p.solution) for p in splits["train"]])


def _read(path: Path) -> list[Problem]:
    if not path.exists():
        raise UserError(f"{path}: missing; --source is a folder with GSM8K's train.jsonl and test.jsonl")
    problems = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                problem = Problem(row["question"], row["answer"])
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{path}, line {number}: expected an object with question and answer, "
                    f"got {type(error).__name__}: {error}"
                ) from None
            if extract_answer(problem.answer) is None:
                raise UserError(f'{path}, line {number}: field answer does not end in "#### number"')
            problems.append(problem)
    return problems


def _tokenizer(problems: Sequence[Problem]) -> Tokenizer:
    texts = [
        text for problem in problems for text in (problem.prompt, problem.solution, "user\n", "assistant\n")
    ]
    return train_byte_level_bpe(texts, SHAPE.vocab_size, SPECIAL)
