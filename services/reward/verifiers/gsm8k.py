"""Grade-school maths: the answer follows `####`, as in the dataset's own solutions.

The usual rule (verl's `gsm8k.py`, strict): within the last 300 characters, the last `#### number`, without
commas and dollar signs, equals the ground truth as a string.
"""

import re

from atoll.wire.types import ScoreItem

TAIL_CHARACTERS = 300

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_FINAL_LINE = re.compile(r"^#### -?[0-9][0-9,]*(\.[0-9]+)?\s*\Z", re.MULTILINE)


def extract_answer(text: str) -> str | None:
    """The last answer near the end of a solution, without commas and dollar signs; None if there is none."""
    answers = _ANSWER.findall(text[-TAIL_CHARACTERS:])
    return answers[-1].replace(",", "").replace("$", "") if answers else None


def gsm8k(item: ScoreItem) -> float:
    return float(extract_answer(item.response) == item.ground_truth)


def gsm8k_format(item: ScoreItem) -> float:
    """1.0 if the response's last line is `#### number`, right or wrong."""
    return float(_FINAL_LINE.search(item.response) is not None)
