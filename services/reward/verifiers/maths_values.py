"""Parses answers (a number, an expression, words, several values, a relation) and compares two of them.

Comparisons are exact. Whatever exact rationals and the structure can decide is decided here; the rest, such
as `2\\sqrt{3}` against `\\sqrt{12}`, is left to a function of the caller.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from atoll.reward.verifiers.maths_latex import find_separators, nesting_depth, split, split_brackets
from atoll.reward.verifiers.maths_numbers import MAX_DEPTH, TooLargeError, rational
from atoll.reward.verifiers.maths_units import PERCENT, split_unit

MAX_DETERMINANT = 5  # rows
Symbolic = Callable[[str, str], bool]  # (answer, gold) in canonical LaTeX: are they equal?

_AND = r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*|[,;]"
_RELATION = (
    r"\\(?:leq|geq|neq|approx|equiv|sim|simeq|cong|propto|in|notin|subset|subseteq|to|rightarrow|Rightarrow"
    r"|implies|iff|mid|pmod|bmod|mod)(?![A-Za-z])|[<>=]"
)
_OTHER_RELATION = _RELATION.replace("|bmod", "")
# asks for something to be worked out: in \lim_{x \to 0} x = 0, the left side restates the question
WORK = re.compile(r"\\(?:sum|prod|int|iint|oint|lim|limsup|liminf|sup|inf|max|min|gcd|lcm)(?![A-Za-z])")
_INEQUALITY = re.compile(r"[<>]|\\leq|\\geq")
_SET_OPERATION = r"\\(?:cup|cap|setminus)(?![A-Za-z])|\\backslash"
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|rho|sigma|tau|phi"
    r"|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Sigma|Phi|Psi|Omega|ell)"
)
# x, x_1, a_{10}, f(x), f^{-1}(x), y', P(X=2), AB, \angle ABC, \text{Area}
_NAME = re.compile(
    rf"(?:\\(?:angle|triangle)\s*)?(?:{_GREEK}|[A-Za-z]{{1,4}}|\\text\{{[^{{}}]*\}}|\\over(?:line|rightarrow)\{{[A-Z]+\}})"
    r"(?:_(?:\w|\{[^{}]*\}))?'*(?:\^\{-1\})?(?:\([^()=<>]*\)|(?<=P)\([^()]*\))?"
)
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[clr|]*\})?(.*)\\end\{\1\}", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
# a word (variables in LaTeX have one letter); two adjacent numbers
_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}|(?<![_\d])\d+\s+\d")
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
# without meaning in prose, unlike signs, brackets and characters between digits
_NO_WORD = re.compile(
    r"""\s|["“”;]|,(?!\d)|(?<!\d),|\.(?!\d)|(?<=[^\W\d_]{2})(?:[!?]|-(?=[^\W\d_]{2}))"""
    r"""|(?<=[^\W\d_])['’](?=[^\W\d_])"""
)
_CHOICE = re.compile(  # with its value; (A)+5, (A)(B) and (A) or (B) are no options
    r"\\text\{\(([A-Z])\)\}\s*(.+)|\(\\text\{([A-Z])\}\)\s*(.+)"
    r"|\(([A-Z])\)(?![-+*/^=(]|.*(?:\b(?:and|or)\b|\([A-Z]\)))(.+)"
)
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_CONSTANTS = {"e", "i"}
_SET_BUILDER = re.compile(r"[A-Za-z](?:\\mid(?![A-Za-z])|[|:])([^,;|:]+)")  # x \mid 1<x<2
# a ratio or a length of things named by capital letters: \frac{AB}{CD}, V_1:V_2, |AB|
_CAPITALS = r"[A-Z]{1,3}(?:_(?:\w|\{[^{}]*\}))?'*"
_RATIO = re.compile(rf"\\frac\{{{_CAPITALS}\}}\{{{_CAPITALS}\}}|{_CAPITALS}[:/]{_CAPITALS}|\|{_CAPITALS}\|")


@dataclass(frozen=True, slots=True)
class Scalar:
    number: Fraction | None  # None: an expression
    latex: str  # without its unit
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    key: str


@dataclass(frozen=True, slots=True)
class ValueList:
    """`brackets`: "" a list, "{}" a set, "()", "[)" and so on, ":" a ratio, "matrix", "row", "det"."""

    brackets: str
    items: tuple["Value", ...]
    latex: str


@dataclass(frozen=True, slots=True)
class Relation:
    """An equality has `sides`; x = 6/3 = 2 has the name x and two of them. A rounded value at the end is not
    a side: 4/3 \\approx 1.33 has the side 4/3."""

    latex: str
    name: str = ""
    sides: tuple["Value", ...] = ()


Value = Scalar | Words | ValueList | Relation


class NotAValueError(ValueError):
    """The answer is a relation, but the gold is a value."""


class UnreadableError(ValueError):
    """Not understood or not evaluated: a sum, an integral, a limit."""


@lru_cache(maxsize=65_536)
def read(text: str) -> Value:
    """The value of canonical text. Raises TooLargeError."""
    if nesting_depth(text) > MAX_DEPTH:
        raise TooLargeError("too many brackets")
    if (number := rational(text)) is not None:
        return Scalar(number, text)
    if len(parts := _list(text)) > 1:
        return ValueList("", _items(parts), text)
    if relations := find_separators(text, _RELATION):
        return _relation(text, relations)
    if find_separators(text, _SET_OPERATION):
        return Scalar(None, text)
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix[1], matrix[2], text)
    if pair := split_brackets(text):
        return _bracketed(*pair, text)
    if len(parts := split(text, ":")) > 1 and all(rational(part) is not None for part in parts):
        return ValueList(":", tuple(map(read, parts)), text)
    if text.count(r"\pm") == 1:
        return ValueList(
            "", (read(text.replace(r"\pm", "+").lstrip("+")), read(text.replace(r"\pm", "-"))), text
        )
    return _scalar(text)


def equal(answer: Value, gold: Value, symbolic: Symbolic) -> bool:
    """Raises NotAValueError if the answer is a relation and the gold is not, and what `symbolic` raises."""
    match answer, gold:
        case Relation(), Relation():
            return _same_relation(answer, gold, symbolic)
        case Relation(), _:
            if answer.sides:
                return all(equal(side, gold, symbolic) for side in answer.sides)
            if _is_interval(gold) and _INEQUALITY.search(answer.latex):
                return symbolic(answer.latex, _latex_of(gold))
            raise NotAValueError(answer.latex)
        case _, Relation():
            if gold.name or (gold.sides and _is_statement(gold.latex)):
                return equal(answer, gold.sides[-1], symbolic)
            inequality = _INEQUALITY.search(gold.latex) is not None
            return inequality and _may_be_interval(answer) and symbolic(_latex_of(answer), gold.latex)
        case ValueList(), ValueList():
            return _same_items(answer, gold, symbolic)
        case ValueList(), _:
            return (
                answer.brackets == "{}" and len(answer.items) == 1 and equal(answer.items[0], gold, symbolic)
            )
        case _, ValueList():
            return gold.brackets == "{}" and len(gold.items) == 1 and equal(answer, gold.items[0], symbolic)
        case Scalar(), Scalar():
            return _same_scalar(answer, gold, symbolic)
        case _:
            return _key(answer) == _key(gold) != ""


def without_choice(text: str) -> str:
    """The value of an option with its value: `12` of `\\text{(B)} 12`."""
    option = _CHOICE.fullmatch(text)
    return next(group for group in option.groups()[1::2] if group) if option else text


def choice(text: str) -> str:
    """The letter of canonical text that is an option, with or without its value; otherwise ""."""
    plain = _TEXT.sub(r"\1", text).strip()
    alone = re.fullmatch(r"\(([A-Za-z])\)|([A-Z])[.:)]?", plain)
    if alone:
        return (alone[1] or alone[2]).upper()
    option = _CHOICE.fullmatch(text)
    return next(group for group in option.groups()[::2] if group) if option else ""


def words(text: str) -> str:
    """The words of canonical text, however they are written."""
    return _NO_WORD.sub("", _TEXT.sub(r"\1", text)).casefold()


def _list(text: str) -> list[str]:
    return [part for part in split(text, _AND) if part]


def _items(parts: Sequence[str]) -> tuple[Value, ...]:
    """Both values of \\pm become items themselves, not a nested list."""
    values = map(read, parts)
    return tuple(
        item
        for value in values
        for item in (value.items if isinstance(value, ValueList) and not value.brackets else (value,))
    )


def _relation(text: str, relations: Sequence[str]) -> Value:
    parts = split(text, _RELATION)
    if r"\bmod" in relations and r"\equiv" not in relations:  # an operator: 17 \bmod 5 = 2
        relations = find_separators(text, _OTHER_RELATION)
        parts = split(text, _OTHER_RELATION)
    if set(relations) <= {">", r"\geq"}:  # 2 > x > 1 is 1 < x < 2
        text = parts[-1] + "".join(
            ("<" if relation == ">" else r"\leq ") + part
            for relation, part in zip(reversed(relations), reversed(parts[:-1]), strict=True)
        )
        return Relation(text)
    if relations == [r"\in"] and _is_name(parts[0]):
        return read(parts[1])
    if relations[-1] == r"\approx" and set(relations[:-1]) <= {"="} and _is_remark(parts[:-1], parts[-1]):
        parts.pop()
    elif set(relations) != {"="} or not all(parts):
        return Relation(text)
    if not _is_name(parts[0]) and _is_name(parts[-1]) and len(parts) == 2:
        parts.reverse()
    if _is_name(parts[0]):
        return Relation(text, parts[0], tuple(map(read, parts[1:])))
    return Relation(text, "", tuple(map(read, parts)))


def _is_remark(exact: Sequence[str], rounded: str) -> bool:
    """x = 4/3 \\approx 1.33 means 4/3; in x \\approx 1.33, the rounded value is all there is."""
    value = _scalar(rounded)
    return all(exact) and not _is_name(exact[-1]) and isinstance(value, Scalar) and value.number is not None


def _is_name(text: str) -> bool:
    if _RATIO.fullmatch(text) or WORK.match(text):
        return True
    pair = split_brackets(text)
    names = split(pair[1], ",") if pair else [text]
    return all(_NAME.fullmatch(name) for name in names)


def _matrix(environment: str, rows: str, latex: str) -> Value:
    lines = [line for line in split(rows, r"\\\\") if line]
    items = tuple(ValueList("row", tuple(map(read, split(line, "&"))), line) for line in lines)
    if environment == "vmatrix" and (number := _determinant(items)) is not None:
        return Scalar(number, latex)
    return ValueList("det" if environment in ("vmatrix", "Vmatrix") else "matrix", items, latex)


def _determinant(rows: Sequence[ValueList]) -> Fraction | None:
    """None if an entry is no number, or if there are too many."""
    numbers = [
        [item.number for item in row.items if isinstance(item, Scalar) and item.number is not None]
        for row in rows
    ]
    if not 0 < len(rows) <= MAX_DETERMINANT or any(len(row) != len(rows) for row in numbers):
        return None
    return _expand(numbers)


def _expand(matrix: Sequence[Sequence[Fraction]]) -> Fraction:
    """Laplace's expansion along the first row."""
    if not matrix:
        return Fraction(1)
    minors = ([[*row[:i], *row[i + 1 :]] for row in matrix[1:]] for i in range(len(matrix)))
    terms = ((-1) ** i * matrix[0][i] * _expand(minor) for i, minor in enumerate(minors))
    return sum(terms, Fraction(0))


def _bracketed(opening: str, content: str, closing: str, latex: str) -> Value:
    brackets = (opening + closing).replace("\\", "")
    items = [part for part in split(content, "[,;]") if part]
    if len(items) < 2 and opening in ("(", "{"):
        return Scalar(None, latex) if choice(latex) else read(content)
    builder = _SET_BUILDER.fullmatch(content) if opening == r"\{" else None
    if builder and find_separators(builder[1], _RELATION):
        return read(builder[1].strip())
    if opening == "{":  # an invisible group
        return read(content)
    return ValueList(brackets, _items(items), latex)


def _scalar(text: str) -> Scalar | Words:
    inner = _TEXT.fullmatch(text)
    if inner:
        body, factor, unit = split_unit(inner[1]) or ("", 1, "")
        number = rational(body)
        return Words(words(inner[1])) if number is None else Scalar(number * factor, body, unit)
    if _WORDS.fullmatch(text) and (len(text) > 2 or text.lower() == "no"):
        return Words(words(text))
    parts = split_unit(text)
    if parts is None:
        return Words(words(text))
    body, factor, unit = parts
    number = rational(body)
    if number is None and (factor != 1 or _PROSE.search(body)):
        return Words(words(text))
    return Scalar(None if number is None else number * factor, body, unit)


def _key(value: Value) -> str:
    """The key of words, or of an expression that consists of letters only, such as a bare yes."""
    if isinstance(value, Words):
        return value.key
    if isinstance(value, Scalar) and value.number is None and re.fullmatch(r"[A-Za-z :.]+", value.latex):
        return words(value.latex)
    return ""


def _latex_of(value: Value) -> str:
    return "" if isinstance(value, Words) else value.latex


def _is_interval(value: Value) -> bool:
    if isinstance(value, ValueList):
        return value.brackets in ("[)", "(]", "[]") or (value.brackets == "()" and r"\infty" in value.latex)
    return isinstance(value, Scalar) and r"\cup" in value.latex


def _may_be_interval(value: Value) -> bool:
    return _is_interval(value) or (isinstance(value, ValueList) and value.brackets == "()")


def _same_relation(answer: Relation, gold: Relation, symbolic: Symbolic) -> bool:
    if answer.name and answer.name == gold.name:
        return all(equal(side, gold.sides[-1], symbolic) for side in answer.sides)
    if gold.name and not _variables(_latex_of(gold.sides[-1])):
        return False  # x = 5 is a value with a name, not an equation to be solved
    if bool(_INEQUALITY.search(answer.latex)) != bool(_INEQUALITY.search(gold.latex)):
        return False
    if answer.latex == gold.latex:
        return True
    if _is_statement(gold.latex):
        return _same_statement(answer.latex, gold.latex, symbolic)
    if _PROSE.search(gold.latex):
        return words(answer.latex) == words(gold.latex)
    return _variables(answer.latex) == _variables(gold.latex) and symbolic(answer.latex, gold.latex)


def _is_statement(relation: str) -> bool:
    """\\log_2 8 = 3 has nothing to solve for: true or false, it would equal every other statement."""
    return r"\begin" in relation or _variables(_TEXT.sub("", relation)) <= _CONSTANTS


def _same_statement(answer: str, gold: str, symbolic: Symbolic) -> bool:
    if find_separators(answer, _RELATION) != find_separators(gold, _RELATION):
        return False
    sides = zip(split(answer, _RELATION), split(gold, _RELATION), strict=True)
    return all(equal(read(a), read(g), symbolic) for a, g in sides)


def _variables(latex: str) -> set[str]:
    return {letter for letter in _LETTERS.findall(latex) if not letter.startswith("\\")}


def _same_items(answer: ValueList, gold: ValueList, symbolic: Symbolic) -> bool:
    if len(answer.items) != len(gold.items):
        return False
    if _only_lacks_names(answer, gold):  # 1, 2 or (1, 2) for x = 1, y = 2
        return all(equal(a, g, symbolic) for a, g in zip(answer.items, gold.items, strict=True))
    unordered = gold.brackets in ("", "{}") and answer.brackets in ("", "{}")
    if not unordered and answer.brackets != gold.brackets:
        return False
    names = [{item.name for item in side.items if isinstance(item, Relation)} for side in (answer, gold)]
    if names[0] != names[1] and max(map(len, names)) > 1:
        return False  # x = 1, y = 2 are not two values of one thing
    if not unordered:
        return all(equal(a, g, symbolic) for a, g in zip(answer.items, gold.items, strict=True))
    left = list(gold.items)
    for item in answer.items:
        found = next((other for other in left if equal(item, other, symbolic)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _only_lacks_names(answer: ValueList, gold: ValueList) -> bool:
    names = {item.name for item in gold.items if isinstance(item, Relation)} - {""}
    if gold.brackets or answer.brackets not in ("", "()") or len(names) < len(gold.items):
        return False
    return not any(isinstance(item, Relation) for item in answer.items)


def _same_scalar(answer: Scalar, gold: Scalar, symbolic: Symbolic) -> bool:
    if PERCENT in (answer.unit, gold.unit) and answer.unit != gold.unit:
        return _same_percent(answer, gold)
    if answer.unit not in ("", gold.unit) and (gold.unit or answer.unit.startswith("base")):
        return False
    if answer.number is not None and gold.number is not None:
        return answer.number == gold.number
    if (r"\infty" in answer.latex) != (r"\infty" in gold.latex):
        return False
    if answer.latex == gold.latex:
        return True
    one, other = _variables(answer.latex), _variables(gold.latex)
    if any(letter.swapcase() in one | other for letter in one ^ other):
        return False  # x and X are two variables
    return symbolic(answer.latex, gold.latex)


def _same_percent(answer: Scalar, gold: Scalar) -> bool:
    """One has a percent sign. The other is the same number, or was asked for in percent."""
    if answer.number is None or gold.number is None or (answer.unit and gold.unit):
        return False
    signed, plain = (answer, gold) if answer.unit else (gold, answer)
    assert signed.number is not None
    asked = plain is answer or abs(gold.number) > 1  # of a gold of 0.5, 0.5 % is not the same
    return signed.number / 100 == plain.number or (asked and signed.number == plain.number)
