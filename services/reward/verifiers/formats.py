"""Checks a response's format, whether it is right or wrong."""

import re
from typing import Literal

from atoll.wire.types import Grade, ScoreItem


def regex(item: ScoreItem, *, pattern: str, match: Literal["search", "fullmatch"] = "search") -> float:
    """1 if the regular expression (Python's `re`) occurs in the response, or matches all of it.

    A pattern may take time exponential in the response, so this runs in a process that can be killed.
    """
    search = re.search if match == "search" else re.fullmatch
    return float(search(pattern, item.response) is not None)


def think_format(item: ScoreItem, *, answer: bool = True) -> float | Grade:
    """1 for `<think>...</think><answer>...</answer>`: each tag once, neither part empty, only whitespace
    around them. Without `answer`, `</think>` is followed by any text without tags.

    If the chat template ends the prompt with `<think>`, the response must not repeat it.
    Source: DeepSeek-R1's template and format reward (2025, https://arxiv.org/abs/2501.12948), table 1.
    """
    response = item.response
    if item.prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    tags = ["<think>", "</think>", *(["<answer>", "</answer>"] if answer else [])]
    counts = [response.count(tag) for tag in tags]
    if min(counts) == 0:
        return Grade(0.0, "missing tag")
    if max(counts) > 1:
        return Grade(0.0, "repeated tag")
    places = [response.index(tag) for tag in tags]
    if places != sorted(places):
        return Grade(0.0, "order")
    before, _, rest = response.partition("<think>")
    thought, _, rest = rest.partition("</think>")
    if answer:
        between, _, rest = rest.partition("<answer>")
        final, _, after = rest.partition("</answer>")
    else:
        between, final, after = "", rest, ""
    if (before + between + after).strip():
        return Grade(0.0, "text outside")
    return 1.0 if thought.strip() and final.strip() else Grade(0.0, "empty part")
