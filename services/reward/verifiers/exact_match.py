"""Compares the answer with the ground truth, ignoring surrounding whitespace."""

from typing import Literal

from atoll.reward.verifiers.answers import LINE_MARKS, extract_answer_text, ground_truth
from atoll.wire.types import Grade, ScoreItem


def exact_match(item: ScoreItem, *, answer: Literal["response", "tag", "line"] = "response") -> float | Grade:
    """`answer` is the whole response, the content of its last `<answer>` tag, or the text after its last
    "Answer:".

    Raises ValueError for a ground truth that no answer can equal: an empty one, or several lines for "line".
    """
    truth = ground_truth(item).strip()
    if answer == "line":
        truth = truth.strip(LINE_MARKS)
        if not truth or "\n" in truth:
            raise ValueError(
                f'ground truth: got {item.ground_truth!r}, expected one line for answer = "line"'
            )
    stated = extract_answer_text(item.response, answer)
    return Grade(0.0, "no answer") if stated is None else float(stated == truth)
