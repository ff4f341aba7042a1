"""Normalizes LaTeX, Unicode and typed mathematics, so that equal formulas are mostly equal strings."""

import re
from collections.abc import Iterator

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_ROOT = re.compile(r"√\s*(\d+|[A-Za-z])")

_SIGNS = {
    "−": "-",
    "–": "-",
    "×": r"\times ",
    "·": r"\cdot ",
    "⋅": r"\cdot ",
    "÷": "/",
    "√": r"\sqrt",
    "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "∅": r"\emptyset ",
    "±": r"\pm ",
    "≤": r"\leq ",
    "≥": r"\geq ",
    "≠": r"\neq ",
    "≈": r"\approx ",
    "°": r"^\circ ",
    "½": r"\frac{1}{2}",
    "⅓": r"\frac{1}{3}",
    "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}",
    "\u00a0": " ",
    "\u202f": " ",
    "。": ".",
}
_CHARACTERS = {
    **{0xFF01 + i: chr(0x21 + i) for i in range(94)},  # full-width forms
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"), ""),  # invisible
    **{ord(sign): latex for sign, latex in _SIGNS.items()},
}

# 1,234 and 1{,}234 and 1\,234; a bare comma only outside brackets, where it cannot separate a pair
_GROUPS = r"(?<![\d.,])([1-9]\d{{0,2}}(?:(?:{})\d{{3}})+)(?!,?\d)"
_THOUSANDS = re.compile(_GROUPS.format(r"(?:\{,\}|\\,|,\\!)\s?"))
_THOUSANDS_BARE = re.compile(_GROUPS.format(","))
_THOUSANDS_SPACED = re.compile(r"(?<![\w.,}] )(?<![\w.,}])([1-9]\d{0,2}(?: \d{3})+)(?! ?[\d/\\])")
_SEPARATORS = re.compile(r"[^\d]")

_MACROS = {
    **dict.fromkeys(("left", "right", "displaystyle", "textstyle", "big", "Big", "bigl", "bigr"), ""),
    **dict.fromkeys(("Bigl", "Bigr", "bigg", "Bigg", "biggl", "biggr", "Biggl", "Biggr"), ""),
    **dict.fromkeys(("mathbf", "boldsymbol", "bm", "mathit", "mathsf"), ""),
    **dict.fromkeys(("textbf", "textit", "textrm", "textnormal", "mathrm", "mbox", "emph"), r"\text"),
    **dict.fromkeys(("quad", "qquad"), " "),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("le", "leq", "leqslant"), r"\leq "),
    **dict.fromkeys(("ge", "geq", "geqslant"), r"\geq "),
    **dict.fromkeys(("ne", "neq"), r"\neq "),
    "lt": "<",
    "gt": ">",
    "lbrace": r"\{",
    "rbrace": r"\}",
    "colon": ":",
    "degree": r"^\circ ",
    "varnothing": r"\emptyset ",
}
_MACRO = re.compile(r"\\([A-Za-z]+)")
_SPACE = re.compile(r"(?<![A-Za-z0-9.])\s+|\s+(?![A-Za-z0-9.])")

# (required substring, pattern, replacement), applied in this order
_SPELLINGS = tuple(
    (needle, re.compile(pattern), spelling)
    for needle, pattern, spelling in (
        ("$", r"(?<!\\)\$", ""),
        ("\\", r"(?<!\\)\\[()\[\]!]", ""),  # delimiters of mathematics, a negative space
        ("\\", r"(?<!\\)\\[,;: ]|\\hspace\{[^{}]*\}", " "),
        ("~", "~", " "),
        ("color", r"\\(?:text)?color\{[^{}]*\}", ""),
        ("<=", "<=", r"\\leq "),
        (">=", ">=", r"\\geq "),
        ("!=", "!=", r"\\neq "),
        (r"\circ", r"\^\{\s*\\circ\s*\}|\^\s*\\circ", r"^\\circ "),
        (r"\%", r"\\%", "%"),
        ("{:}", r"\{:\}", ":"),
        (r"\infty", r"(?<![\w})\]])\+\s*\\infty", r"\\infty"),
        (r"\{", r"^\s*\\\{\s*\\\}\s*$", r"\\emptyset"),
        (r"\frac", r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\frac", r"\\frac\s*(\d)\s*(?=\{)", r"\\frac{\1}"),
        (r"\frac", r"\\frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),
        (r"\sqrt", r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\sqrt", r"\\sqrt\s*(\[\d+\])\s*(\d)", r"\\sqrt\1{\2}"),
        ("sqrt(", r"(?<![\\A-Za-z])sqrt\(([^()]*)\)", r"\\sqrt{\1}"),  # typed
        ("pi", r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        ("^(", r"\^\(([^()]*)\)", r"^{\1}"),
        ("^", r"\^(-?(?:\d*\.\d+|\d{2,}))", r"^{\1}"),
        (" ", r"\s+", " "),
    )
)

_OPEN = r"\\begin\{\w+\*?\}|\\\{|[({\[]"
_CLOSE = r"\\end\{\w+\*?\}|\\\}|[)}\]]"
_BRACKET = re.compile(rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})")


def canonical(text: str) -> str:
    """The same mathematics in normalized notation. Linear in the text; changes no value."""
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
        text = _ROOT.sub(r"\\sqrt{\1}", text).translate(_CHARACTERS)
    if "," in text:
        text = _THOUSANDS.sub(_join, text)
        if "(" not in text and "[" not in text:
            text = _THOUSANDS_BARE.sub(_join, text)
    if "\\" in text:
        text = _MACRO.sub(lambda match: _MACROS.get(match[1], match[0]), text)
    for needle, pattern, spelling in _SPELLINGS:
        if needle in text:
            text = pattern.sub(spelling, text)
    text = _SPACE.sub("", text)
    if " " in text:
        text = _THOUSANDS_SPACED.sub(_join, text)
    text = text.strip().rstrip(",;:")
    return text if text.endswith("..") else text.rstrip(".,;:").strip()  # two dots leave something out


def split(text: str, separator: str) -> list[str]:
    """The parts between matches of the pattern `separator` outside all brackets."""
    parts, start = [], 0
    for match in _outside(text, separator):
        parts.append(text[start : match.start()].strip())
        start = match.end()
    return [*parts, text[start:].strip()]


def find_separators(text: str, separator: str) -> list[str]:
    """The separators that `split` splits at."""
    return [match[0] for match in _outside(text, separator)]


def nesting_depth(text: str) -> int:
    """The maximum depth of nested brackets."""
    depth = deepest = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match["open"] is not None else -1
        deepest = max(deepest, depth)
    return deepest


def split_brackets(text: str) -> tuple[str, str, str] | None:
    """Opening bracket, content and closing bracket of a text that one pair encloses; the two may differ in
    kind."""
    opening = re.match(_OPEN, text)
    if opening is None:
        return None
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += (match["open"] is not None) - (match["close"] is not None)
        if depth == 0:
            inside = text[opening.end() : match.start()].strip()
            return (opening[0], inside, match[0]) if match.end() == len(text) else None
    return None


def _outside(text: str, separator: str) -> Iterator[re.Match[str]]:
    depth = 0
    tokens = rf"(?P<open>{_OPEN})|(?P<close>{_CLOSE})|(?P<separator>{separator})|\\[A-Za-z]+|\\."
    for match in re.finditer(tokens, text):
        depth += (match["open"] is not None) - (match["close"] is not None)
        if match["separator"] is not None and depth == 0:
            yield match


def _join(match: re.Match[str]) -> str:
    return _SEPARATORS.sub("", match[0])
