"""Units, currencies, percent and words such as "million" around a number."""

import re
from fractions import Fraction

from atoll.reward.verifiers.maths_numbers import rational

PERCENT = "%"
_FACTORS = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_NAMES = {
    name: unit
    for unit, names in {
        PERCENT: "% percent percents pct",
        "$": "dollar dollars usd",
        "€": "euro euros",
        "degree": "degree degrees deg",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "inch inches",
        "ft": "ft foot feet",
        "mi": "mi mile miles",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "s": "s sec second seconds",
        "min": "min minute minutes",
        "h": "h hr hrs hour hours",
        "l": "l liter liters litre litres",
        "ml": "ml milliliter milliliters millilitre millilitres",
        "mi/h": "mph",
        "km/h": "kmh kph",
    }.items()
    for name in names.split()
}
# text with one of these means something other than the number before it
_NO_UNITS = re.compile(
    r"\b(?:or|and|not|no|nor|if|is|are|was|were|be|but|so|to|from|than|then|plus|minus|times|over|mod|modulo"
    r"|about|approximately|around|nearly|roughly|maybe|perhaps|possibly|either|between|more|less|fewer|at"
    r"|least|most|up|only|both|all|any|none|never|others?|too|wrong|false|incorrect|impossible|because|since"
    r"|where|when|power|pi|squared|cubed|factorial|score|gross|half|halves|thirds?|quarters?|fourths?|fifths?"
    r"|sixths?|tenths?|hundredths?|thousandths?|ish)\b"
)
MAX_WORDS = 4

_TEXTS = re.compile(r"(?:\\text\{[^{}]*\}|[A-Za-z/. ]|\^\{?[23]\}?)+")
_WORD = re.compile(r"[A-Za-z]+|%|/")
_POWER = re.compile(r"\^\{?([23])\}?")
_CURRENCY = re.compile(r"(-?)(\\\$|[€£¥])")
# plain words after a number: known units, or at least four letters, more than a product of variables has
_PLAIN = re.compile(r"(?<=[\d} ])[A-Za-z][A-Za-z/ ]*(?:\^\{?[23]\}?)?$")
TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_BASE = re.compile(r"(\d+)_\{?(\d+)\}?")


def split_unit(text: str) -> tuple[str, Fraction | int, str] | None:
    """Splits canonical text into (what is measured, factor, unit); None if its words are not a unit.

    `25\\text{ cm}^2` is ("25", 1, "cm^2"), `5 million dollars` ("5", 10**6, "$"), a bare 5 ("5", 1, "").
    """
    body, tail = _parts(text)
    currency = ""
    if before := _CURRENCY.match(body):
        currency = before[2].removeprefix("\\")
        body = before[1] + body[before.end() :]
    if base := _BASE.fullmatch(body):
        return base[1], 1, f"base {base[2]}"
    sign = ""
    if body.endswith(r"%"):
        body, sign = body[:-1], PERCENT
    elif body.endswith(r"^\circ") and not TRIGONOMETRY.search(body):  # the sine of an angle is not one
        body, sign = body.removesuffix(r"^\circ"), "degree"
    known = _unit(tail) if tail else (1, "")
    if known is None or not body:
        return None
    factor, unit = known
    if sign == PERCENT:
        return body.strip(), factor, PERCENT  # of whatever it is
    return body.strip(), factor, " ".join(dict.fromkeys(part for part in (sign, currency, unit) if part))


def _parts(text: str) -> tuple[str, str]:
    start = text.find(r"\text{")
    if start < 0:
        plain = _PLAIN.search(text)
        if plain is None or not _plainly_unit(text[: plain.start()], plain[0]):
            return text, ""
        start = plain.start()
    return text[:start].strip(), text[start:].strip()


def _plainly_unit(before: str, tail: str) -> bool:
    """After anything but a number, a letter is a variable: x + 2m, 2\\pi h."""
    words = _WORD.findall(tail)
    letters = any(len(word) == 1 and word.isalpha() for word in words)
    if letters and rational(before.removeprefix(r"\$")) is None:
        return False
    return all(word.lower() in _NAMES or len(word) >= 4 or word in ("per", "/") for word in words)


def _unit(tail: str) -> tuple[int, str] | None:
    if not _TEXTS.fullmatch(tail):
        return None
    texts = tail.replace(r"\text{", " ").replace("}", " } ").replace("^ {", "^{")
    power = _POWER.search(tail)
    words = [word.lower() for word in _WORD.findall(texts.split("^")[0])]
    if not words or len(words) > MAX_WORDS or _NO_UNITS.search(" ".join(words)):
        return None
    factor = 1
    while words and words[0] in _FACTORS:
        factor *= _FACTORS[words.pop(0)]
    if any(word in _FACTORS for word in words):
        return None
    exponent = power[1] if power else ""
    for word, meaning in (("square", "2"), ("sq", "2"), ("cubic", "3")):
        if words[:1] == [word]:
            words.pop(0)
            exponent = meaning
    names = ("/" if word in ("per", "/") else _NAMES.get(word, word.removesuffix("s")) for word in words)
    return factor, "".join(_unit_words(list(names))) + (f"^{exponent}" if exponent else "")


def _unit_words(names: list[str]) -> list[str]:
    """Keeps adjacent words apart, as in "red apple"."""
    return [name if i == 0 or "/" in (name, names[i - 1]) else f" {name}" for i, name in enumerate(names)]
