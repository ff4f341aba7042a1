"""The fraction of a response in one language."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.config.functions import GRADER, built_in
from atoll.reward.verifiers.language import SCRIPTS, language_consistency
from tests.unit.verifier_items import graded, item

SAMPLE = Path(__file__).parents[2] / "examples" / "data" / "gsm8k" / "test.jsonl"
ENGLISH = "First we add the two numbers, then we divide the sum by three."
GERMAN = "Zuerst addieren wir die beiden Zahlen, dann teilen wir die Summe durch drei."
FRENCH = "D'abord nous additionnons les deux nombres, puis nous divisons la somme par trois."
CHINESE = "首先我们把两个数相加"  # 10 characters
RUSSIAN = "Сначала мы складываем два числа, затем делим сумму на три."
UKRAINIAN = "Спочатку ми додаємо два числа, потім ділимо суму на три."


def share(text: str, language: Any) -> tuple[float, str]:
    return graded(language_consistency(item(text), language=language))


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (ENGLISH, "en"),
        (GERMAN, "de"),
        (FRENCH, "fr"),
        (CHINESE, "zh"),
        (RUSSIAN, "ru"),
        (UKRAINIAN, "uk"),
        ("まず二つの数を足します", "ja"),
        ("먼저 두 수를 더합니다", "ko"),
        ("أولا نجمع العددين ثم نقسم المجموع على ثلاثة", "ar"),
        ("पहले हम दोनों संख्याओं को जोड़ते हैं", "hi"),
        ("ก่อนอื่นเราบวกสองจำนวน", "th"),
    ],
)
def test_a_text_is_all_of_its_language_and_nothing_of_another(text: str, language: str) -> None:
    assert share(text, language) == (1.0, "")
    scripts = {"zh": "ja", "ja": "zh"}  # share Han
    others = [other for languages in SCRIPTS.values() for other in languages]
    for other in {*others} - {language, scripts.get(language)}:
        assert share(text, other) == (0.0, ""), other


def test_shares_of_words() -> None:
    # 13 words each
    assert share(f"{ENGLISH}\n{GERMAN}", "en") == (pytest.approx(13 / 26), "")
    assert share(f"{ENGLISH}\n{GERMAN}", "de") == (pytest.approx(13 / 26), "")
    assert share("\n".join(GERMAN.split()), "en") == (pytest.approx(1 / 13), "")  # pieces of 4, the last of 1
    # within a line it is by script: 10 characters, 2 words
    assert share(f"{CHINESE} therefore answer", "zh") == (pytest.approx(10 / 12), "")
    assert share("因为 x + y = 46, 所以 \\frac{x}{2} = 23 <answer>", "zh") == (1.0, "")  # words in Han only
    assert share("Also drei Zahlen", "en") == (1.0, "")  # three words: script alone


@pytest.mark.parametrize("text", ["", "12 + 34 = 46", "x = y", "\\frac{1}{2}", "<think></think>"])
def test_without_words_there_is_nothing_to_be_consistent(text: str) -> None:
    assert share(text, "en") == (0.0, "no words")


def test_solutions_of_grade_school_maths_are_english() -> None:
    """As in training: short lines, with names and numbers between words."""
    rows = [json.loads(line)["answer"] for line in SAMPLE.read_text(encoding="utf-8").splitlines()]
    shares = [share(row, "en")[0] for row in rows]
    assert sum(shares) / len(shares) > 0.98
    assert max(share(row, "de")[0] for row in rows) < 0.5


def test_the_parameter_takes_every_language_of_the_table() -> None:
    (parameter,) = built_in(GRADER)["language_consistency"].args.kwonlyargs
    assert isinstance(parameter.annotation, ast.Subscript)
    choices = ast.literal_eval(parameter.annotation.slice)
    assert sorted(choices) == sorted(language for languages in SCRIPTS.values() for language in languages)
