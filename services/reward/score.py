"""A response to a verdict: the weighted sum of its graders, or why there is none."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from services.config.functions import load
from services.config.schema import GraderConfig
from services.reward.verifiers.exact_match import exact_match
from services.reward.verifiers.gsm8k import gsm8k, gsm8k_format
from services.reward.verifiers.length import length_cost, overlong
from services.wire.types import Graded, GradingError, ScoreItem, Verdict

Grader = Callable[[ScoreItem], float]  # its own parameters are bound

GRADERS: Mapping[str, Callable[..., float]] = {  # (item, *, parameters of its own)
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "gsm8k_format": gsm8k_format,
    "overlong": overlong,
    "length_cost": length_cost,
}


@dataclass(frozen=True, slots=True)
class WeightedGrader:
    name: str
    weight: float
    grade: Grader


def load_graders(configs: Sequence[GraderConfig]) -> tuple[WeightedGrader, ...]:
    """Raises ConfigError where a function of the user cannot be imported or does not fit."""
    return tuple(WeightedGrader(config.name, config.weight, load(config, GRADERS)) for config in configs)


def score(item: ScoreItem, graders: Sequence[WeightedGrader]) -> Verdict:
    """Components keep each grader's own value, before its weight. Without graders the score is 0."""
    components = {}
    for grader in graders:
        try:
            components[grader.name] = _number(grader.grade(item))
        except Exception as error:  # a user's grader may raise anything; it becomes a verdict with its cause
            cause = f"{type(error).__name__}: {error}"
            # what lies outside, such as a judge's server, may answer the next time; a bug stays
            return GradingError(item.id, grader.name, cause, retryable=isinstance(error, OSError))
    return Graded(item.id, sum(g.weight * components[g.name] for g in graders), components)


def _number(value: object) -> float:
    if not isinstance(value, Real):
        raise TypeError(f"got {type(value).__name__} {value!r}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"got {number}, expected a finite number")
    return number
