"""Evaluates arithmetic in LaTeX or plain text exactly: integers, decimals, fractions, powers, perfect roots.

Its cost is bounded: a number that would need more than MAX_BITS is refused before it is computed.
"""

import math
import re
from fractions import Fraction

MAX_BITS = 16_384
MAX_DIGITS = 4000  # of a number as written; Python's int refuses 4,301
MAX_EXPONENT_DIGITS = 5  # such as those of 1e-9999, including the sign
MAX_FACTORIAL = 1000  # 1000! has 8,530 bits
MAX_DEPTH = 40  # of brackets

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<symbol>\\(?:frac|sqrt|binom|cdot|times|div)(?![A-Za-z])|[-+*/^!(){}\[\]])|(?P<other>.))"
)
_MIXED = re.compile(r"(-?)(\d+) (\d+)/(\d+)")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\overline\{(\d{1,20})\}")
_ONLY_ARITHMETIC = re.compile(
    r"(?:[-+*/^!(){}\[\].\d\s]|[eE]|\\(?:frac|sqrt|binom|cdot|times|div)(?![A-Za-z]))+"
)


class TooLargeError(ValueError):
    """A number with too many digits to compute, or in too many brackets."""


class _NotRationalError(ValueError):
    """Text that is not arithmetic, or whose value is irrational or undefined."""


def rational(text: str) -> Fraction | None:
    """The value of canonical text; None if that is not a rational number. Raises TooLargeError."""
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return Fraction(int(text))
    if r"\overline" in text:
        text = _REPEATING.sub(_repeating, text)
    if r"\bmod" in text:
        return _remainder(*text.split(r"\bmod"))
    if not _ONLY_ARITHMETIC.fullmatch(text):
        return None
    if mixed := _MIXED.fullmatch(text):
        sign, whole, above, below = mixed.groups()
        if int(above) < int(below):
            return (-1 if sign else 1) * (int(whole) + Fraction(int(above), int(below)))
    try:
        return _Arithmetic(text).value()
    except _NotRationalError:
        return None


def _remainder(dividend: str, *divisors: str) -> Fraction | None:
    """Of a single division; None for a sum, of which it is unclear what is divided."""
    if len(divisors) != 1 or re.search(r"(?<=[^\^{(])[-+]", dividend):
        return None
    above, below = rational(dividend.strip()), rational(divisors[0].strip())
    if above is None or below is None or below <= 0 or (above.denominator, below.denominator) != (1, 1):
        return None
    return above % below


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} is (16 - 1) / 90."""
    whole, digits, period = match.groups()
    above = int(whole + digits + period) - int("0" + whole + digits)
    return rf"\frac{{{above}}}{{{'9' * len(period)}{'0' * len(digits)}}}"


class _Arithmetic:
    """A recursive-descent parser that computes as it reads."""

    def __init__(self, text: str) -> None:
        self._tokens = [match[0].strip() for match in _TOKEN.finditer(text) if match[0].strip()]
        self._next = 0
        self._depth = 0

    def value(self) -> Fraction:
        value = self._sum()
        if self._next != len(self._tokens):
            raise _NotRationalError
        return value

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self, *expected: str) -> bool:
        if self._peek() in expected:
            self._next += 1
            return True
        return False

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooLargeError("too many brackets")
        negative = self._sign()
        total = -self._product() if negative else self._product()
        while (operator := self._peek()) in ("+", "-"):
            self._next += 1
            term = self._product()
            total = _bounded(total + term if operator == "+" else total - term)
        self._depth -= 1
        return total

    def _sign(self) -> bool:
        if self._take("-"):
            return True
        self._take("+")
        return False

    def _product(self) -> Fraction:
        product = self._power()
        while True:
            if self._take("*", r"\cdot", r"\times"):
                product = _bounded(product * self._signed_power())
            elif self._take("/", r"\div"):
                product = _bounded(_quotient(product, self._signed_power()))
            elif self._peek() in ("(", r"\frac", r"\sqrt", r"\binom"):
                product = self._juxtaposed(product)
            else:
                return product

    def _signed_power(self) -> Fraction:
        return -self._power() if self._sign() else self._power()

    def _juxtaposed(self, left: Fraction) -> Fraction:
        """A whole number before a proper fraction is a mixed number; anything else is a product."""
        literal = self._tokens[self._next - 1].isdigit()
        fraction = self._peek() == r"\frac"
        alone = self._next < 2 or self._tokens[self._next - 2] in ("-", "+", "(", "{")
        right = self._power()
        if not (literal and fraction):
            return _bounded(left * right)
        if not alone or not 0 < right < 1 or left.denominator != 1:
            raise _NotRationalError  # 2 * 3\frac{1}{2}, 2\frac{5}{3}: ambiguous
        return left + right

    def _power(self) -> Fraction:
        base = self._atom()
        if self._take("!"):
            base = _factorial(base)
            if self._peek() == "!":  # n!! is a different function
                raise _NotRationalError
        if self._take("^"):
            exponent = self._signed_atom()
            if self._peek() in ("^", "!"):
                raise _NotRationalError
            return _power(base, exponent)
        return base

    def _signed_atom(self) -> Fraction:
        return -self._atom() if self._sign() else self._atom()

    def _atom(self) -> Fraction:
        if self._take("("):
            return self._until(")")
        if self._peek() == "{":
            return self._group()
        if self._take(r"\frac"):
            return _bounded(_quotient(self._group(), self._group()))
        if self._take(r"\binom"):
            return _binomial(self._group(), self._group())
        if self._take(r"\sqrt"):
            degree = self._until("]") if self._take("[") else Fraction(2)
            return _root(self._group(), degree)
        token = self._peek()
        if not token.lstrip(".")[:1].isdecimal():
            raise _NotRationalError
        self._next += 1
        return _number(token)

    def _group(self) -> Fraction:
        if not self._take("{"):
            raise _NotRationalError
        return self._until("}")

    def _until(self, closing: str) -> Fraction:
        value = self._sum()
        if not self._take(closing):
            raise _NotRationalError
        return value


def _number(token: str) -> Fraction:
    mantissa, _, exponent = token.lower().partition("e")
    if len(exponent) > MAX_EXPONENT_DIGITS or len(mantissa) > MAX_DIGITS:
        raise TooLargeError("too many digits")
    if not exponent:
        return Fraction(mantissa)
    return _bounded(Fraction(mantissa) * _power(Fraction(10), Fraction(int(exponent))))


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > 2 * MAX_BITS:
        raise TooLargeError("too many digits")
    return value


def _quotient(above: Fraction, below: Fraction) -> Fraction:
    if below == 0:
        raise _NotRationalError
    return above / below


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if base in (0, 1) and exponent > 0:
        return base
    if exponent.denominator != 1:
        return _power(_root(base, Fraction(exponent.denominator)), Fraction(exponent.numerator))
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > MAX_BITS:
        raise TooLargeError("too many digits")
    if base == 0:
        raise _NotRationalError  # 0^0 and division by zero
    return Fraction(base ** int(exponent))


def _root(value: Fraction, degree: Fraction) -> Fraction:
    """The real root (for even degrees the positive one), if it is rational."""
    if value < 0 and degree % 2 == 1:
        return -_root(-value, degree)
    if value < 0 or degree.denominator != 1 or not 2 <= degree <= 64:
        raise _NotRationalError
    return Fraction(
        _integer_root(value.numerator, int(degree)), _integer_root(value.denominator, int(degree))
    )


def _integer_root(value: int, degree: int) -> int:
    """By Newton's method from above; each step doubles the digits, since an answer may contain sixty long
    roots."""
    if value == 0:
        return 0
    root = 1 << -(-value.bit_length() // degree)
    while (lower := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:
        root = lower
    if root**degree != value:
        raise _NotRationalError
    return root


def _factorial(value: Fraction) -> Fraction:
    if value.denominator != 1 or value < 0:
        raise _NotRationalError
    if value > MAX_FACTORIAL:
        raise TooLargeError("too many digits")
    return Fraction(math.factorial(int(value)))


def _binomial(n: Fraction, k: Fraction) -> Fraction:
    if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
        raise _NotRationalError
    if n > MAX_FACTORIAL:
        raise TooLargeError("too many digits")
    return Fraction(math.comb(int(n), int(k)))
