"""Compares answers in words as question-answering benchmarks do.

Sources: normal form and F1 from SQuAD's evaluation (Rajpurkar et al. 2016, arXiv:1606.05250); the rule for
tags from Search-R1 (Jin et al. 2025, arXiv:2503.09516), as in verl.
"""

import re
import string
from collections import Counter
from typing import Annotated, Literal

from annotated_types import Ge, Le
from rapidfuzz.distance import Levenshtein

from atoll.reward.verifiers.answers import accepted_answers, extract_answer_text, extract_tagged
from atoll.wire.types import Grade, ScoreItem

MAX_CHARACTERS = 10_000  # of an answer whose edits are counted: the time is quadratic
MAX_TAGS = 10

_NO_ANSWER = Grade(0.0, "no answer")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower-cases; removes ASCII punctuation, articles and extra whitespace. If that would leave nothing, as
    of "A", it only lower-cases."""
    text = text.lower().strip()
    words = _ARTICLES.sub(" ", text.translate(_NO_PUNCTUATION)).split()
    return " ".join(words) or text


def normalized_match(
    item: ScoreItem, *, answer: Literal["response", "tag", "line"] = "response"
) -> float | Grade:
    """1 if the answer equals an accepted one in normal form."""
    stated = extract_answer_text(item.response, answer)
    if stated is None:
        return _NO_ANSWER
    return float(normalize(stated) in map(normalize, accepted_answers(item)))


def token_f1(item: ScoreItem, *, answer: Literal["response", "tag", "line"] = "response") -> float | Grade:
    """The harmonic mean of precision and recall of the answer's words in normal form; the maximum over the
    accepted answers."""
    stated = extract_answer_text(item.response, answer)
    if stated is None:
        return _NO_ANSWER
    words = normalize(stated).split()
    return max(_f1(words, normalize(right).split()) for right in accepted_answers(item))


def _f1(words: list[str], right: list[str]) -> float:
    common = (Counter(words) & Counter(right)).total()
    # 2 P R / (P + R) with P = common / words and R = common / right
    return 2 * common / (len(words) + len(right)) if common else 0.0


def edit_similarity(
    item: ScoreItem,
    *,
    minimum: Annotated[float, Ge(0), Le(1)] = 0.0,
    answer: Literal["response", "tag", "line"] = "response",
) -> float | Grade:
    """1 - edits / length of the longer text; 0 below `minimum`. Edits are the insertions, deletions and
    substitutions of characters that turn the answer into an accepted one (Levenshtein 1966), both in normal
    form."""
    stated = extract_answer_text(item.response, answer)
    if stated is None:
        return _NO_ANSWER
    if len(stated) > MAX_CHARACTERS:
        return Grade(0.0, "too long")
    stated = normalize(stated)
    return max(
        Levenshtein.normalized_similarity(stated, normalize(right), score_cutoff=minimum)
        for right in accepted_answers(item)
    )


def search_r1(
    item: ScoreItem, *, substring: bool = False, format_score: Annotated[float, Ge(0), Le(1)] = 0.0
) -> float | Grade:
    """Search-R1's rule: 1 if the last `<answer>` equals an accepted one in normal form, `format_score` if it
    does not; 0.25 instead of 1 if there are more than 10 opening or closing tags.

    `substring`: it need only contain one. Since listing all possible answers then succeeds, this is for
    validation only.
    """
    answers = extract_tagged(item.response, "answer")
    if not answers:
        return _NO_ANSWER
    stated = normalize(answers[-1])
    rights = [normalize(right) for right in accepted_answers(item)]
    if not (any(right in stated for right in rights) if substring else stated in rights):
        return format_score
    tags = max(item.response.count("<answer>"), item.response.count("</answer>"))
    return 1.0 if substring or tags <= MAX_TAGS else Grade(0.25, "many tags")
