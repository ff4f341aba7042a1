"""Extracts the program from a response's text, and completes it with code that its dataset provides."""

import re

from atoll.reward.verifiers.code_tests import AssertTests, CallTests, OutputTests, Tests, is_python

# Solutions in the APPS family of datasets are written for a judge that has imported all this, as APPS,
# LiveCodeBench and verl's prime_code do.
_MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json"),
)
_PRELUDE = "; ".join(
    [f"from {name} import *" for name in [*_MODULES, "builtins", "typing"]]
    + [f"import {', '.join(_MODULES)}", "sys.setrecursionlimit(50_000)"]
)
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
_FENCE = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^\n]*\n?", re.MULTILINE)
_GLUED = re.compile(r"^([^`\n]*[^`\s])```[ \t]*$", re.MULTILINE)  # a fence at the end of the code's last line
_PYTHON = ("python", "py", "python3")


def program(response: str, tests: Tests, is_file: bool = False) -> str | None:
    """None if there is no code in the response. `is_file`: all of it is code, whatever its strings hold."""
    code = response if is_file else extract_code(response)
    if code is None or not code.strip():
        return None
    match tests:
        case OutputTests() | CallTests():  # __future__ stays first
            return "\n".join([*_FUTURE.findall(code), _PRELUDE, _FUTURE.sub("", code)])
        case AssertTests(prompt=prompt, functions=functions):
            return _after(prompt, code, functions)


def extract_code(response: str) -> str | None:
    """The last fenced block marked as Python, otherwise the last one without a mark, otherwise all of the
    text if nothing is fenced; after a chain of thought. An unclosed block counts."""
    answer = response.rpartition("</think>")[2]
    parts = _FENCE.split(
        _GLUED.sub(r"\1\n```", answer)
    )  # text, mark, text, ...: every other fence opens a block
    blocks = [(mark.lower(), text) for mark, text in zip(parts[1::4], parts[2::4], strict=True)]
    if not blocks:
        return answer if answer.strip() else None
    for marks in (_PYTHON, ("",)):
        texts = [text for mark, text in blocks if mark in marks and text.strip()]
        if texts:
            return texts[-1]
    return None


def _after(prompt: str, code: str, functions: tuple[str, ...]) -> str:
    """HumanEval's prompt is the beginning of a function: `code` continues it, or defines the function again.
    In the latter case the prompt is put before it, for its imports and helpers, if it is valid by itself."""
    again = any(re.search(rf"^(async\s+)?def\s+{name}\b", code, re.MULTILINE) for name in functions)
    if not again:
        return prompt + code
    return f"{prompt}\n{code}" if prompt and is_python(prompt) else code
