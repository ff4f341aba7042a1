"""Extracts answers from responses, and accepted answers from items."""

import json
import re
from typing import Literal

from atoll.wire.types import ScoreItem

Place = Literal["response", "tag", "line"]

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
            return lines[-1].strip(" \t\r*_$") if lines else None


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


def accepted_answers(item: ScoreItem) -> list[str]:
    """The ground truth, or several if it is JSON: `["46", "forty-six"]`, `{"target": ...}`.

    Raises ValueError if `target` has no text: no response could match it.
    """
    try:
        truth = json.loads(item.ground_truth)
    except ValueError:
        return [item.ground_truth]
    if isinstance(truth, dict) and "target" in truth:
        truth = truth["target"]
        if isinstance(truth, str):
            return [truth]
        if not (isinstance(truth, list) and truth and all(isinstance(answer, str) for answer in truth)):
            raise ValueError(f"ground truth: got the target {truth!r}, expected a text or a list of texts")
    if isinstance(truth, list) and truth and all(isinstance(answer, str) for answer in truth):
        return truth
    return [item.ground_truth]
