"""A response to a verdict: the weighted sum of its graders, or why there is none."""

import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

from services.config.schema import GraderConfig
from services.reward.verifiers.exact_match import exact_match
from services.reward.verifiers.gsm8k import gsm8k, gsm8k_format
from services.runtime.errors import UserError
from services.wire.types import Graded, GradingError, ScoreItem, Verdict

Grader = Callable[[ScoreItem], float]

GRADERS: Mapping[str, Grader] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "gsm8k_format": gsm8k_format,
}


@dataclass(frozen=True, slots=True)
class WeightedGrader:
    name: str
    weight: float
    grade: Grader


def load_graders(configs: Sequence[GraderConfig]) -> tuple[WeightedGrader, ...]:
    """Raises UserError for an unknown name, one given twice, and a function of the user that does not fit."""
    names = [config.name for config in configs]
    if not names or len(set(names)) != len(names):
        raise UserError(f"reward.graders: got {names}, expected at least one grader and each name once")
    return tuple(WeightedGrader(c.name, c.weight, _find_grader(c.name)) for c in configs)


def score(item: ScoreItem, graders: Sequence[WeightedGrader]) -> Verdict:
    """Components keep each grader's own value, before its weight."""
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


def _find_grader(name: str) -> Grader:
    if name in GRADERS:
        return GRADERS[name]
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise UserError(
            f"reward.graders: unknown grader {name!r}; expected {', '.join(GRADERS)} or file.py:function"
        )
    return _load_function(Path(path), function)


def _load_function(path: Path, name: str) -> Grader:
    """The user's own code, by the file that holds it."""
    if not path.exists():
        raise UserError(f"reward.graders: {path.absolute()}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # a path that ends in .py always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(
            f"reward.graders: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if name not in vars(module):
        raise UserError(f"reward.graders: {path} has no function {name!r}")
    function: Grader = vars(module)[name]
    if not _takes_one_item(function):
        raise UserError(
            f"reward.graders: {path}:{name} does not fit; expected a plain function "
            f"`def {name}(item: ScoreItem) -> float`, got {_signature(function)}"
        )
    return function


def _takes_one_item(function: object) -> bool:
    if not callable(function) or inspect.iscoroutinefunction(function):
        return False
    try:
        inspect.signature(function).bind("item")
    except TypeError:
        return False
    return True


def _signature(function: object) -> str:
    if not callable(function):
        return f"a {type(function).__name__}"
    kind = "async def" if inspect.iscoroutinefunction(function) else "def"
    return f"{kind} {inspect.signature(function)}"
