"""Extracts answers from responses, and accepted answers from items."""

import json
import re
from typing import Literal, TypeGuard

from atoll.wire.types import ScoreItem

Place = Literal["response", "tag", "line"]

LINE_MARKS = " \t\r*_$"  # around the answer of a line

_LINE = re.compile(r"\banswer[ \t*_]*:([^\n]*)", re.IGNORECASE)


def extract_answer_text(response: str, place: Place) -> str | None:
    """The whole response, the content of its last `<answer>` tag, or the rest of the line after its last
    "Answer:"; None if it has no such tag or line."""
    match place:
        case "response":
            return response.strip()
        case "tag":
            answers = extract_tagged(response, "answer")
            return answers[-1].strip() if answers else None
        case "line":
            lines = _LINE.findall(response)
            return lines[-1].strip(LINE_MARKS) if lines else None


def extract_tagged(text: str, tag: str) -> list[str]:
    """The text between each `<tag>` and the next `</tag>`."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    contents = []
    start = text.find(opening)
    # no regular expression: `<tag>(.*?)</tag>` is quadratic in the number of unclosed tags
    while start >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        contents.append(text[start + len(opening) : end])
        start = text.find(opening, end + len(closing))
    return contents


def ground_truth(item: ScoreItem) -> str:
    """Raises ValueError if the row has none."""
    if not item.ground_truth.strip():
        raise ValueError(
            f"row {item.id.group.prompt} (the first is 0) has no ground truth, but this grader needs one: "
            "add it to the row, or remove the grader"
        )
    return item.ground_truth


def accepted_answers(item: ScoreItem) -> list[str]:
    """The ground truth, or several if it is JSON: `["46", "forty-six"]`, `{"target": ...}`.

    Raises ValueError if there is none, or one without text: no response could match it.
    """
    text = ground_truth(item)
    try:
        truth = json.loads(text)
    except ValueError:
        return [text]
    if isinstance(truth, dict) and "target" in truth:
        target = truth["target"]
        truth = [target] if isinstance(target, str) else target
        if not _are_texts(truth):
            raise ValueError(
                f"ground truth: got the target {target!r}, expected a string or a list of strings"
            )
    if not _are_texts(truth):
        return [text]
    if not all(answer.strip() for answer in truth):
        raise ValueError(f"ground truth: got {text}, expected non-empty strings")
    return list(truth)


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)
