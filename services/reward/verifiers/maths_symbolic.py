"""Compares answers with math-verify, and so SymPy, if exact rationals cannot decide.

Its timeouts use SIGALRM and cannot stop a long operation in C, so they stay off: this runs in worker
processes that are killed at their deadline, and expressions that look too expensive are refused beforehand.
Importing this module takes a second.
"""

import logging
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, I, Rational

from atoll.reward.verifiers.maths_numbers import MAX_FACTORIAL, TooLargeError, rational
from atoll.reward.verifiers.maths_units import TRIGONOMETRY
from atoll.reward.verifiers.maths_values import WORK, UnreadableError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off

MAX_CHARACTERS = 400
MAX_DIGITS = 40  # SymPy factorises integers under roots and logarithms
MAX_EXPONENT_OF_SUM = 32  # expanded by SymPy; terms grow with its power
MAX_EXPONENT = 5000
MAX_TOWER = 3  # exponentials in each other's exponents: mpmath needs as many bits as the second one's value
DIGITS = 50  # of precision when expressions are evaluated
TOLERANCE = 1e-40  # relative to the larger value
POINTS = (Rational(37, 23), Rational(-71, 13), Rational(3, 29))  # values for their variables, in rotation

_SPELLING = LatexExtractionConfig().normalization_config
_LATEX = (  # units are removed before; math-verify takes the t of 2\pi t for one
    LatexExtractionConfig(boxed_match_priority=-1, normalization_config=replace(_SPELLING, units=False)),
)
_DECIMAL = re.compile(r"(\d*)\.(\d+)")
_DOTS = re.compile(r"\\[lcv]?dots(?:[a-z](?![A-Za-z]))?|\.\.\.|…")
_EXPONENT = re.compile(r"(.)\^(?:(\d)|(?=(\{)))", re.DOTALL)
_GROWTH = re.compile(r"(?:\^|\\(?:exp|sinh|cosh)(?![A-Za-z]))")
_FACTORIAL = re.compile(r"(\d+|\))!")
_BINOMIAL = re.compile(r"\\binom(?=\{)")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?|[A-Za-z])\^\\circ")


def symbolically_equal(answer: str, gold: str) -> bool:
    """Takes canonical LaTeX. Raises UnreadableError and TooLargeError."""
    for text in (answer, gold):
        check(text)
    if _primes(answer) != _primes(gold):
        return False  # math-verify takes f' for f
    parsed_gold, parsed_answer = _parse(gold), _parse(answer)
    try:
        agree = _agree(parsed_answer[0], parsed_gold[0])
    except Exception as error:  # SymPy raises all sorts of exceptions for odd expressions
        raise UnreadableError(f"{answer}: {type(error).__name__}") from error
    return agree and bool(
        verify(parsed_gold, parsed_answer, allow_set_relation_comp=True, timeout_seconds=None)
    )


def check(latex: str) -> None:
    """Raises UnreadableError or TooLargeError for expressions that may keep SymPy busy for long."""
    if len(latex) > MAX_CHARACTERS:
        raise TooLargeError(f"more than {MAX_CHARACTERS} characters")
    if work := WORK.search(latex):
        raise UnreadableError(f"{work[0]} is not evaluated")
    if dots := _DOTS.search(latex):
        raise UnreadableError(f"{dots[0]} leaves something out")
    if re.search(rf"\d{{{MAX_DIGITS + 1}}}", latex):
        raise TooLargeError(f"more than {MAX_DIGITS} digits")
    for match in _EXPONENT.finditer(latex):
        exponent = match[2] if match[2] else _group(latex[match.end() :])
        value = rational(exponent)
        largest = MAX_EXPONENT_OF_SUM if match[1] in ")}]" else MAX_EXPONENT
        if value is not None and abs(value) > largest:
            raise TooLargeError(f"exponent {exponent}")
        if value is None and "^" in exponent and re.search(r"\d\^", exponent):
            raise TooLargeError(f"exponent {exponent}")
    if _tower(latex) > MAX_TOWER:
        raise TooLargeError(f"more than {MAX_TOWER} nested exponentials")
    for match in _FACTORIAL.finditer(latex):
        if match[1] == ")" or len(match[1]) > 4 or int(match[1]) > MAX_FACTORIAL:
            raise TooLargeError("a factorial")
    if _BINOMIAL.search(latex) and re.search(r"\d{4}|\d\^", latex):
        raise TooLargeError("a binomial coefficient")


def _agree(answer: Any, gold: Any) -> bool:
    """False for expressions that differ at a point. This takes milliseconds, while math-verify first
    simplifies their difference; and it is more precise: math-verify ignores differences below 1e-15."""
    if isinstance(answer, Eq) and isinstance(gold, Eq):
        return _may_have_the_same_solutions(answer.lhs - answer.rhs, gold.lhs - gold.rhs)
    if not (isinstance(answer, Expr) and isinstance(gold, Expr)):
        return True
    answer, gold = answer.doit(), gold.doit()
    variables = sorted(answer.free_symbols | gold.free_symbols, key=str)
    for shift in range(len(POINTS) if variables else 1):
        point = {variable: POINTS[(shift + i) % len(POINTS)] + i for i, variable in enumerate(variables)}
        x, y = (value.evalf(DIGITS, subs=point) for value in (answer, gold))
        if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
            continue
        if abs(x - y) > TOLERANCE * max(abs(x), abs(y), TOLERANCE):
            return False
    return True


def _may_have_the_same_solutions(answer: Expr, gold: Expr) -> bool:
    """Whether answer = 0 and gold = 0 may have the same solutions. math-verify considers any two equations
    equal that it finds no solutions of, after a possibly long search, so equations in one variable, or linear
    in one, are compared here."""
    variables = answer.free_symbols | gold.free_symbols
    for variable in sorted(answer.free_symbols & gold.free_symbols, key=str):
        slopes = answer.diff(variable), gold.diff(variable)
        if all(slopes) and not any(variable in slope.free_symbols for slope in slopes):
            return _agree(answer.subs(variable, 0) / slopes[0], gold.subs(variable, 0) / slopes[1])
    if len(variables) > 1:
        return True
    x, y = (side.subs(dict.fromkeys(variables, POINTS[0])) for side in (answer, gold))
    return _agree(x, y) if x == 0 or y == 0 else _agree(answer / x, gold / y)


def _primes(latex: str) -> int:
    return latex.count("'") + latex.count(r"\prime")


def _tower(latex: str) -> int:
    """The depth of nested exponents, and of arguments of functions that grow like them. Bases do not matter:
    e and x are as expensive as numbers."""
    arguments = (_group(latex[match.end() :]) for match in _GROWTH.finditer(latex))
    return max((1 + _tower(argument) for argument in arguments), default=0)


def _group(latex: str) -> str:
    """The content of the brackets at the beginning of the text; "" if it begins otherwise."""
    depth = 0
    for position, character in enumerate(latex):
        depth += (character in "{([") - (character in "})]")
        if depth == 0:
            return latex[1:position]
    return latex[1:]


@lru_cache(4096)  # a ground truth is compared with every sample of its group
def _parse(latex: str) -> list[Any]:
    # decimals as fractions: SymPy would compare floating-point numbers rounded to six places
    exact = _DECIMAL.sub(lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}", latex)
    if TRIGONOMETRY.search(exact):  # math-verify takes sin 10° for sin 10
        exact = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", exact)
    parsed: list[Any] = parse(f"${exact}$", _LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    if not parsed:
        raise UnreadableError(latex)
    return [_with_imaginary_unit(value) if isinstance(value, Expr) else value for value in parsed]


def _with_imaginary_unit(value: Expr) -> Expr:
    """For math-verify, i is a variable."""
    return value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})
