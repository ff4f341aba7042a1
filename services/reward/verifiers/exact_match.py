"""Compares the answer with the ground truth, ignoring surrounding whitespace."""

from typing import Literal

from atoll.reward.verifiers.answers import extract_answer_text
from atoll.wire.types import Grade, ScoreItem


def exact_match(item: ScoreItem, *, answer: Literal["response", "tag", "line"] = "response") -> float | Grade:
    """`answer` is the whole response, the content of its last `<answer>` tag, or the text after its last
    "Answer:"."""
    stated = extract_answer_text(item.response, answer)
    return Grade(0.0, "no answer") if stated is None else float(stated == item.ground_truth.strip())
