"""Multiple choice: the last letter or choice text that the response states."""

import json
import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Annotated

from annotated_types import Ge, Le

from atoll.reward.verifiers.text_match import normalize
from atoll.wire.types import Grade, ScoreItem

TAIL_CHARACTERS = 4000  # of the response that are searched for a statement

# what announces an answer: a box, "Answer:", "the correct option is", and the same in Chinese
_MARKER = re.compile(
    r"\\boxed|\b(?:answer|option|choice)[ \t*_]*(?:is\b|[:：])|答案[ \t]*(?:是|为|:|：)", re.IGNORECASE
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_NEGATION = re.compile(r"\b(?:not|neither|none|except)\b|n['’]t\b", re.IGNORECASE)
_CONDITION = re.compile(r"\b(?:if|whether|unless|suppose|doubt)\b", re.IGNORECASE)
_ALONE = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
_BEGINS = re.compile(r"[\W_]*[A-Z][\W_]*[).:]")
# joins the letters of a list
_AND = r"(?:[\W_]|\b(?:and|or|as well as|option|choice|maybe|perhaps|possibly|also)\b)*"


def multiple_choice(item: ScoreItem, *, choices: Annotated[int, Ge(2), Le(26)] = 4) -> float | Grade:
    """1 if the response states the right choice and no other.

    A statement is a box, or the rest of the line after "answer is" or "Answer:". The last one within the last
    TAIL_CHARACTERS counts; without any, the last line counts if it is a single letter, begins like "(B)
    Paris", says "B is correct", or is a choice's text. The first capital letter of a statement counts; a list
    ("A or B") counts as none.

    The ground truth is a letter or a choice's text. The texts are the list `extra_info.choices` of the row;
    without it, there are `choices` letters.
    Source: the formats that simple-evals asks for in MMLU and GPQA ("Answer: $LETTER"), and boxes.
    Raises ValueError if the ground truth is not a choice.
    """
    texts = [normalize(str(text)) for text in json.loads(item.extra.get("choices", "[]"))]
    letters = ascii_uppercase[: len(texts) or choices]
    right = _named(item.ground_truth, letters, texts)
    if len(right) != 1:
        raise ValueError(
            f"ground truth: got {item.ground_truth!r}, expected one letter of {letters}, or a text of "
            "extra_info.choices"
        )
    *before, last = _MARKER.split(item.response[-TAIL_CHARACTERS:])
    if before:
        named = _named(_first_line(last), letters, texts)
        if len(before) > 1:  # as in "\\boxed{A} or \\boxed{B}"
            named |= _listed(before[-1], letters)
    else:
        line = last.rstrip().rpartition("\n")[2]
        named = _named(line, letters, texts, begins=True) or _called_correct(line, letters)
    if len(named) == 1:
        return float(named == right)
    return Grade(0.0, "several" if named else "no answer")


def _first_line(statement: str) -> str:
    return _COMMAND.sub("", statement).strip(" \t\r\n*_:").partition("\n")[0]


def _named(statement: str, letters: str, texts: Sequence[str], *, begins: bool = False) -> set[str]:
    """The choices that a statement names; with `begins`, it must begin with the letter."""
    if alone := _ALONE.fullmatch(statement):
        return {alone[1].upper()} & set(letters)
    said = normalize(statement)
    if said in texts:
        return {letters[texts.index(said)]}
    first = _first(letters).match(statement) or _later(letters).search(statement)
    if first is None or _NEGATION.search(statement, 0, first.start(1)):
        return set()
    if begins and not _BEGINS.match(statement):
        return set()
    named = {first[1]}
    if also := re.compile(_AND + _later(letters).pattern).match(statement, first.end()):
        named.add(also[1])
    said = normalize(statement[first.end() :])
    if said in texts:  # possibly another choice's
        named.add(letters[texts.index(said)])
    return named


def _called_correct(line: str, letters: str) -> set[str]:
    """The choices of which a line says that they are correct, without a condition."""
    named = set()
    for match in _correct(letters).finditer(line):
        clause = re.split("[.,;:]", line[: match.start()])[-1]
        if not (_NEGATION.search(clause) or _CONDITION.search(clause)):
            named.add(match[1])
            if other := re.search(_later(letters).pattern + _AND + r"\Z", clause):
                named.add(other[1])
    return named


def _listed(statement: str, letters: str) -> set[str]:
    """The letter of a statement that consists of a letter only."""
    match = re.fullmatch(f"{_AND}{_later(letters).pattern}{_AND}", _COMMAND.sub("", statement))
    return {match[1]} if match else set()


def _first(letters: str) -> re.Pattern[str]:
    return re.compile(rf"[\W_]*(?:(?:[Oo]ption|[Cc]hoice)[\W_]*)?([{letters}])(?![A-Za-z0-9'’])")


def _correct(letters: str) -> re.Pattern[str]:
    unconditional = r"(?:correct|right)(?! (?:only|if|when|for|unless)\b)"
    return re.compile(rf"(?<![A-Za-z0-9])([{letters}])[)*_ \t]* is (?:the )?{unconditional}")


def _later(letters: str) -> re.Pattern[str]:
    """A letter that stands alone; the first words of "A prime" and "I think" do not."""
    return re.compile(rf"(?<![A-Za-z0-9])(?![AI] (?!and\b|or\b)[a-z])([{letters}])(?![A-Za-z0-9'’])")
