"""Where in a response the answer stands, and what the right ones are."""

import json
import re
from typing import Literal

from atoll.wire.types import ScoreItem

Place = Literal["response", "tag", "line"]

_LINE = re.compile(r"\banswer[ \t*_]*:([^\n]*)", re.IGNORECASE)


def stated_answer(response: str, place: Place) -> str | None:
    """The whole response, what stands in its last `<answer>` tag, or after its last "Answer:" in the same
    line; None where there is no tag or line."""
    match place:
        case "response":
            return response.strip()
        case "tag":
            answers = tagged(response, "answer")
            return answers[-1].strip() if answers else None
        case "line":
            lines = _LINE.findall(response)
            return lines[-1].strip(" \t\r*_$") if lines else None


def tagged(text: str, tag: str) -> list[str]:
    """What stands between each `<tag>` and the first `</tag>` after it."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    contents = []
    start = text.find(opening)
    # not a regular expression: `<tag>(.*?)</tag>` takes a time quadratic in tags that are never closed
    while start >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        contents.append(text[start + len(opening) : end])
        start = text.find(opening, end + len(closing))
    return contents


def right_answers(item: ScoreItem) -> list[str]:
    """The ground truth, or the several that it is as JSON: `["46", "forty-six"]`, `{"target": ...}`.

    Raises ValueError where a `target` holds no text: nobody could state it.
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
