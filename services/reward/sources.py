"""Routes rows to built-in graders by verl's `data_source`, so that verl's datasets work unchanged.

The names and their meaning are those of verl's `default_compute_score`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from atoll.wire.types import ScoreItem


@dataclass(frozen=True, slots=True)
class Route:
    """A built-in grader and its parameters."""

    grader: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


GSM8K = Route("gsm8k")
BOXED = Route("maths", {"answer": "boxed"})
DAPO = Route("maths", {"answer": "line_or_boxed", "wrong": -1.0})
ANY = Route("maths", {"answer": "any"})
CODE = Route("code", {"pass_fraction": True})
SEARCH = Route("search_r1")

# *: any characters. The first match counts.
ROUTES: Mapping[str, Route] = {
    "openai/gsm8k": GSM8K,
    "lighteval/MATH": BOXED,
    "DigitalLearningGmbH/MATH-lighteval": BOXED,
    "HuggingFaceH4/MATH-500": BOXED,
    "hiyouga/geometry3k": BOXED,  # verl adds 0.1 for the format: add the grader think_format for that
    "math": DAPO,
    "math_dapo": DAPO,
    "math_dapo_reasoning": DAPO,
    "aime*": DAPO,
    "numina_*": ANY,
    "codecontests": CODE,
    "apps": CODE,
    "codeforces": CODE,
    "taco": CODE,
    "searchR1_*": SEARCH,
}


def data_source(item: ScoreItem, *, default: str | None = None) -> Route:
    """The grader for an item; `default` names the built-in grader for unknown sources.

    Raises ValueError if there is none: an ungradable row is an error, not a 0.
    """
    for pattern, route in ROUTES.items():
        if fnmatchcase(item.data_source, pattern):
            return route
    if default is None:
        raise ValueError(
            f"data_source {item.data_source!r} has no grader; known: {', '.join(ROUTES)}. Name a grader in "
            'reward.graders, or one for such rows: { name = "data_source", default = "exact_match" }'
        )
    return Route(default)
