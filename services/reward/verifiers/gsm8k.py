"""Grade-school maths: the answer follows `####`, as in the dataset's own solutions.

The usual rule (verl's `gsm8k.py`, strict): within the last 300 characters, the last `#### number`, without
commas and dollar signs, equals the ground truth as a string, without them, too.
"""

import re

from atoll.reward.verifiers.answers import ground_truth
from atoll.wire.types import ScoreItem

TAIL_CHARACTERS = 300

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.]+")
_FINAL_LINE = re.compile(r"^#### -?[0-9][0-9,]*(\.[0-9]+)?\s*\Z", re.MULTILINE)


def extract_answer(text: str) -> str | None:
    """The last answer near the end of a solution, without commas and dollar signs; None if there is none."""
    answers = _ANSWER.findall(text[-TAIL_CHARACTERS:])
    return _without_marks(answers[-1]) if answers else None


def _without_marks(number: str) -> str:
    return number.replace(",", "").replace("$", "")


def gsm8k(item: ScoreItem) -> float:
    """Raises ValueError for a ground truth that is no number: no answer could equal it."""
    truth = _without_marks(ground_truth(item)).strip()
    if not _NUMBER.fullmatch(truth):
        raise ValueError(f"ground truth: got {item.ground_truth!r}, expected a number, such as 5600 or 5,600")
    return float(extract_answer(item.response) == truth)


def gsm8k_format(item: ScoreItem) -> float:
    """1.0 if the response's last line is `#### number`, right or wrong."""
    return float(_FINAL_LINE.search(item.response) is not None)
