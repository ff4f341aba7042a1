"""Compares a program's output, or a function's return value, with the dataset's expectation. It runs on the
host, so its time is linear in the answer, whatever the answer is.
"""

import json
import re
from decimal import Decimal
from typing import Any

RELATIVE, ABSOLUTE = Decimal("1e-5"), Decimal("1e-8")

MAX_NUMBER = 400  # characters; longer ones are compared as text

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")
_SHOWN = 80  # characters


def output_difference(got: str, expected: str) -> str | None:
    """None if they are equal. Lines are compared as in LiveCodeBench: whitespace around the text and around
    each line is ignored, and tokens of lines that differ are compared as numbers. As in APPS and verl's
    prime_code (numpy.allclose), a number expected with a decimal point or an exponent may be off by 1e-8 +
    1e-5 * |expected|; an integer may not. Those two also accept lines that are equal as sets of words; this
    does not."""
    got_lines, expected_lines = (text.strip().split("\n") for text in (got, expected))
    for i, (got_line, expected_line) in enumerate(zip(got_lines, expected_lines, strict=False), start=1):
        if not _equal_lines(got_line, expected_line):
            return f"line {i}: got {excerpt(got_line)}, expected {excerpt(expected_line)}"
    if len(got_lines) != len(expected_lines):
        return f"got {len(got_lines)} lines, expected {len(expected_lines)}"
    return None


def _equal_lines(got: str, expected: str) -> bool:
    if got.strip() == expected.strip():
        return True
    tokens, expected_tokens = got.split(), expected.split()
    return len(tokens) == len(expected_tokens) and all(map(_equal_tokens, tokens, expected_tokens))


def _equal_tokens(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not _is_number(got) or not _is_number(expected):
        return False
    number, expected_number = Decimal(got), Decimal(expected)
    if _INTEGER.fullmatch(expected):
        return number == expected_number
    return abs(number - expected_number) <= ABSOLUTE + RELATIVE * abs(expected_number)


def _is_number(token: str) -> bool:
    return len(token) <= MAX_NUMBER and _NUMBER.fullmatch(token) is not None


def read_json(frame: bytes) -> Any:
    """Reads a frame of code_harness.py without building its sets and dicts, whose keys could be chosen to
    collide."""
    try:
        return json.loads(frame)
    except RecursionError:
        raise ValueError("not an encoded value: nested too deeply") from None


def equals(got: Any, expected: Any) -> bool:
    """Whether a returned value, as read by `read_json`, equals one from a dataset's JSON: by Python's ==,
    except that a tuple equals a list, and a dict's integer keys equal an object's strings, the only keys that
    JSON has."""
    match got:
        case {"tuple": list(elements)} | list(elements):
            return (
                isinstance(expected, list)
                and len(elements) == len(expected)
                and all(map(equals, elements, expected))
            )
        case {"dict": list(items)} if all(isinstance(item, list) and len(item) == 2 for item in items):
            by_key = {_key(key): value for key, value in items}
            return (
                isinstance(expected, dict)
                and len(items) == len(expected)
                and all(key in by_key and equals(by_key[key], value) for key, value in expected.items())
            )
        case {"int": str(text)}:
            return type(expected) is int and text == hex(expected)
        case dict():
            return False  # a set, bytes, a complex number: not in JSON; or not written by `encode`
    return bool(got == expected)


def _key(key: Any) -> str | None:
    return key if isinstance(key, str) else str(key) if type(key) is int else None


def excerpt(value: object) -> str:
    text = value.strip() if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
