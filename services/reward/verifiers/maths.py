"""Mathematics: the final answer of a response against the ground truth, compared exactly.

`maths` extracts the answer, normalizes the notation of both, and compares numbers, sets, tuples, intervals
and matrices as exact rationals; only expressions and relations go to math-verify. Nothing is rounded: 0.333
is not 1/3. Doubtful answers are wrong.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Annotated, Literal

from annotated_types import Gt

from atoll.reward.verifiers.answers import ground_truth
from atoll.reward.verifiers.maths_latex import canonical
from atoll.reward.verifiers.maths_numbers import TooLargeError
from atoll.reward.verifiers.maths_values import (
    NotAValueError,
    Symbolic,
    UnreadableError,
    Words,
    choice,
    equal,
    read,
    without_choice,
    words,
)
from atoll.wire.types import Grade, ScoreItem

MAX_ANSWER_CHARACTERS = 1000
MAX_BARE_CHARACTERS = 100  # of a response that consists of its answer only
MAX_BOXES = 4  # checked, from the end
TAIL_CHARACTERS = 4000  # that are searched for an answer without a box
CACHED = 65_536  # pairs of answer and ground truth

Place = Literal["any", "boxed", "line", "line_or_boxed", "hash"]
Verdict = tuple[bool, str]  # equal or not, and the reason

_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?=\{)|\s+(?=[^\s{]))")
_UNBRACED = re.compile(r"[^$\n]*")  # what a box without braces may hold
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_ANSWER_LINE = re.compile(r"answer\s{0,4}(?:\*\*)?\s{0,4}[:：][ \t]*\n?([^\n]*)", re.IGNORECASE)
_ANSWER_IS = re.compile(
    r"answer(?:\s+is\s{0,4}:?|\s{0,4}(?:\*\*)?\s{0,4}[:：])[ \t]*\n?([^\n]*)", re.IGNORECASE
)
_STATEMENT_END = re.compile(r"(?<!\.)[.!](?=\s|$)|[。；]|,?\s(?:because|since|as|so|which)\b", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
# may precede a formula without changing what it states
_THEREFORE = re.compile(
    r"\W*(?:\b(?:therefore|thus|hence|so|finally|consequently|we|get|have|find|obtain|it|this|gives|is|the"
    r"|result)\b\W*)*",
    re.IGNORECASE,
)


class NoAnswerError(ValueError):
    """The response has no answer in the expected place; the message is the verdict's reason."""


class _NeedsSymbolicError(Exception):
    """Only math-verify can decide."""


def maths(
    item: ScoreItem,
    *,
    answer: Literal["any", "boxed", "line", "line_or_boxed", "hash"] = "any",
    right: Annotated[float, Gt("wrong")] = 1.0,
    wrong: float = 0.0,
) -> Grade:
    r"""`right` if the response's final answer equals the ground truth, otherwise `wrong`; always with a
    reason.

    `answer` is where to find it. "boxed": in the last balanced \boxed or \fbox (MATH). "line": after the last
    "Answer:" (DAPO, with wrong = -1). "line_or_boxed": as "line", or as "boxed" if there is none. "hash":
    after the last #### (GSM8K). "any": the first that exists of a box; ####; after the last "answer is" or
    "Answer:"; the only formula of a concluding last line; the whole of a short response.

    May take as long as SymPy does, so run it in a process that can be killed. Raises ValueError for an empty
    ground truth.
    """
    return _grade(item, answer, right, wrong, _verdict)


def grade_quickly(
    item: ScoreItem,
    *,
    answer: Literal["any", "boxed", "line", "line_or_boxed", "hash"] = "any",
    right: float = 1.0,
    wrong: float = 0.0,
) -> Grade | None:
    """The verdict of `maths` if it needs no math-verify, in time linear in the response; otherwise None."""
    try:
        return _grade(item, answer, right, wrong, _quick_verdict)
    except _NeedsSymbolicError:
        return None


def grade_over_budget(
    item: ScoreItem,
    *,
    answer: Place = "any",
    right: float = 1.0,
    wrong: float = 0.0,
) -> Grade:
    """The verdict of `maths` on a response whose comparison had to be stopped."""
    return Grade(wrong, "unreadable: evaluation takes too long")


def find_answer(response: str, place: Place) -> str:
    """Raises NoAnswerError."""
    match place:
        case "boxed":
            return _boxed_answer(response)
        case "line":
            return _line_answer(response)
        case "line_or_boxed":
            try:
                return _line_answer(response)
            except NoAnswerError:
                return _boxed_answer(response)
        case "hash":
            return _hash_answer(response)
        case "any" if _BOX.search(response):
            return _boxed_answer(response)
        case "any" if "####" in response:
            return _hash_answer(response)
    try:
        line = _last(_ANSWER_IS, response)[: MAX_ANSWER_CHARACTERS + 1]
    except NoAnswerError:
        return _bare_answer(response.strip())
    while inner := _ANSWER_IS.search(line):  # "Final Answer: The final answer is"
        line = inner[1]
    return _statement(line)


def _grade(
    item: ScoreItem, place: Place, right: float, wrong: float, verdict: Callable[[str, str], Verdict]
) -> Grade:
    gold = _canonical_truth(ground_truth(item))
    try:
        found = find_answer(item.response, place)
    except NoAnswerError as error:
        return Grade(wrong, str(error))
    if len(found) > MAX_ANSWER_CHARACTERS:
        return Grade(wrong, f"too long: an answer of {len(found)} characters")
    is_equal, reason = verdict(found, gold)
    return Grade(right if is_equal else wrong, reason)


@lru_cache(CACHED)
def _verdict(found: str, gold: str) -> Verdict:
    return _compare(found, gold, _ask_math_verify)


@lru_cache(CACHED)
def _quick_verdict(found: str, gold: str) -> Verdict:
    return _compare(found, gold, _ask_nobody)


def _ask_math_verify(answer: str, gold: str) -> bool:
    # imported here: it takes a second, and callers of `grade_quickly` alone do not need SymPy
    from atoll.reward.verifiers.maths_symbolic import symbolically_equal

    return symbolically_equal(answer, gold)


def _ask_nobody(answer: str, gold: str) -> bool:
    raise _NeedsSymbolicError


def _compare(found: str, gold: str, symbolic: Symbolic) -> Verdict:
    answer = canonical(found)
    if not answer:
        return False, "no answer: it is empty"
    if answer == gold or ("," in gold and canonical(found.replace(",", ", ")) == gold):  # 100,200 is a list
        return True, "equal"
    if letter := choice(gold):
        return (True, "equal") if choice(answer) == letter else (False, "different")
    try:
        if isinstance(value := read(gold), Words):
            is_equal = words(answer) == value.key
        else:
            is_equal = equal(read(without_choice(answer)), value, symbolic)
    except NotAValueError as error:
        return False, f"not a value: {error}"
    except (TooLargeError, UnreadableError) as error:
        return False, f"unreadable: {error}"
    return (True, "equal") if is_equal else (False, "different")


@lru_cache(CACHED)
def _canonical_truth(truth: str) -> str:
    """Datasets contain the bare answer, or a solution with the answer in a box or after ####."""
    try:
        answer = (
            _boxed_answer(truth) if _BOX.search(truth) else _hash_answer(truth) if "####" in truth else truth
        )
    except NoAnswerError as error:
        raise ValueError(f"ground truth {truth!r}: {error}") from error
    if len(answer) > MAX_ANSWER_CHARACTERS:
        raise ValueError(
            f"ground truth: got an answer of {len(answer)} characters, expected {MAX_ANSWER_CHARACTERS} "
            "at most"
        )
    if not (text := canonical(answer)):
        raise ValueError(f"ground truth {truth!r}: expected an answer")
    return text


def _boxed_answer(response: str) -> str:
    r"""The content of the last balanced box; of nested boxes, the outermost one. If the last box has no
    braces, as in `\boxed 3`, the rest of the formula or of the line."""
    boxes = list(_BOX.finditer(response))[-MAX_BOXES:]
    if not boxes:
        raise NoAnswerError("no answer: no box")
    if unbraced := _UNBRACED.match(response, boxes[-1].end()) if response[boxes[-1].end()] != "{" else None:
        return _statement(unbraced[0])
    start, stop = 0, -1
    for box in reversed(boxes):
        closing = _closing_brace(response, box.end())
        if closing > stop:
            start, stop = box.end() + 1, closing
    if stop < 0:
        raise NoAnswerError("unbalanced box")
    return _BOX.sub("", response[start:stop])


def _line_answer(response: str) -> str:
    line = _last(_ANSWER_LINE, response)
    return _boxed_answer(line) if _BOX.search(line) else line.strip(" *")


def _statement(line: str) -> str:
    """What stands before the end of a line's first statement."""
    end = _STATEMENT_END.search(line)
    return line[: end.start() if end else None].strip(" *")


def _closing_brace(text: str, opening: int) -> int:
    """-1 if there is none."""
    depth = 0
    for brace in _BRACE.finditer(text, opening):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.start()
    return -1


def _hash_answer(response: str) -> str:
    _, mark, after = response.rpartition("####")
    if not mark:
        raise NoAnswerError("no answer: no ####")
    return after.strip().split("\n", 1)[0]


def _last(pattern: re.Pattern[str], response: str) -> str:
    found = pattern.findall(response[-TAIL_CHARACTERS:])
    if not found:
        raise NoAnswerError("no answer")
    return str(found[-1])


def _bare_answer(response: str) -> str:
    """The only formula of a last line that says nothing else, or a short response as a whole."""
    last_line = response[-TAIL_CHARACTERS:].rsplit("\n", 1)[-1]
    formulas = list(_FORMULA.finditer(last_line))
    if len(formulas) == 1:
        (formula,) = formulas
        before, after = last_line[: formula.start()], last_line[formula.end() :]
        if _THEREFORE.fullmatch(before) and not after.strip(" .*"):
            return next(group for group in formula.groups() if group)
    if "\n" not in response and 0 < len(response) <= MAX_BARE_CHARACTERS:
        return response
    raise NoAnswerError("no answer")
