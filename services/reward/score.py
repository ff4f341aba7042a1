"""Built-in graders, how each one runs, and how grades are combined."""

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsFloat

from atoll.reward.sources import data_source
from atoll.reward.verifiers.choice import multiple_choice
from atoll.reward.verifiers.code import code
from atoll.reward.verifiers.exact_match import exact_match
from atoll.reward.verifiers.formats import regex, think_format
from atoll.reward.verifiers.gsm8k import gsm8k, gsm8k_format
from atoll.reward.verifiers.json_schema import json_schema
from atoll.reward.verifiers.language import language_consistency
from atoll.reward.verifiers.length import length_cost, length_target, overlong
from atoll.reward.verifiers.maths import grade_over_budget as maths_over_budget
from atoll.reward.verifiers.maths import grade_quickly as quick_maths
from atoll.reward.verifiers.maths import maths
from atoll.reward.verifiers.repetition import repetition
from atoll.reward.verifiers.text_match import edit_similarity, normalized_match, search_r1, token_f1
from atoll.runtime.errors import SandboxError, ServiceUnavailableError
from atoll.wire.types import Grade, Graded, GradingError, SampleId, ScoreItem, Verdict

Grader = Callable[[ScoreItem], float | Grade]  # with its parameters bound

# (item, *, own parameters); sandboxed graders: async, (item, sandbox, is_file, *, own parameters), where
# `is_file` says that the response is a file of the session's workspace
GRADERS: Mapping[str, Callable[..., Any]] = {
    "data_source": data_source,
    "exact_match": exact_match,
    "normalized_match": normalized_match,
    "token_f1": token_f1,
    "edit_similarity": edit_similarity,
    "search_r1": search_r1,
    "multiple_choice": multiple_choice,
    "json_schema": json_schema,
    "regex": regex,
    "think_format": think_format,
    "language_consistency": language_consistency,
    "repetition": repetition,
    "code": code,
    "gsm8k": gsm8k,
    "gsm8k_format": gsm8k_format,
    "maths": maths,
    "overlong": overlong,
    "length_target": length_target,
    "length_cost": length_cost,
}

# What a grader needs of a row: needs_ground_truth, needs_data_source. `code` can take tests in extra_info.
TRAITS: Mapping[str, tuple[str, ...]] = {
    "data_source": ("needs_ground_truth", "needs_data_source"),
    "exact_match": ("needs_ground_truth",),
    "normalized_match": ("needs_ground_truth",),
    "token_f1": ("needs_ground_truth",),
    "edit_similarity": ("needs_ground_truth",),
    "search_r1": ("needs_ground_truth",),
    "multiple_choice": ("needs_ground_truth",),
    "gsm8k": ("needs_ground_truth",),
    "maths": ("needs_ground_truth",),
}

# How graders run that are not inline in the service. Inline graders take time linear in the response.
# Isolated: in worker processes, which can be killed; user-defined graders always run there.
ISOLATED = frozenset({"maths", "regex", "json_schema", "language_consistency"})
SANDBOXED = frozenset({"code"})  # in the service, with programs in its sandbox
ROUTED = frozenset({"data_source"})  # names one of the others for each item

# Fast paths of isolated graders, run in the service; None: the grader itself must decide
QUICK: Mapping[str, Callable[..., Grade | None]] = {"maths": quick_maths}

# Isolated graders whose work depends on what the response says. A response that takes more than a budget of
# CPU time gets this grade: an error would let a policy get rid of responses that would be graded as wrong.
BUDGETED: Mapping[str, Callable[..., Grade]] = {"maths": maths_over_budget}

# Modules imported before the grader's workers are forked, since importing them takes a second
PRELOADED: Mapping[str, str] = {"maths": "atoll.reward.verifiers.maths_symbolic"}

MAX_KIND = 40  # characters of a reason's kind: it becomes part of a metric's name
MAX_REASON = 300
MAX_CAUSE = 1000


@dataclass(frozen=True, slots=True)
class Failure:
    """A grader's failure; `retryable` if it may succeed the next time."""

    cause: str
    retryable: bool
    timed_out: bool = False


Outcome = Grade | Failure


def judge(grade: Grader, item: ScoreItem, file: str = "") -> Outcome:
    """`file`: the user's, if the grader is in one; errors name its line."""
    try:
        return check_grade(grade(item))
    except (Exception, SystemExit) as error:  # user graders may raise anything; the cause is reported
        failed = failure(error)
        place = error_place(error, file)
        return replace(failed, cause=f"{failed.cause} ({place})") if place else failed


def error_place(error: BaseException, file: str) -> str:
    """The innermost line of `file` that the error passed through, such as `graders.py:12`; "" if none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    lines = [line for frame, line in frames if frame.f_code.co_filename == file]
    return f"{Path(file).name}:{lines[-1]}" if lines else ""


def judge_quickly(grade: Callable[[ScoreItem], Grade | None], item: ScoreItem) -> Outcome | None:
    try:
        return grade(item)
    except Exception as error:
        return failure(error)


def check_grade(value: object) -> Grade:
    """Validates a grader's result: a finite number and a short reason. Raises if invalid."""
    got: object = value.value if isinstance(value, Grade) else value
    if not isinstance(got, SupportsFloat):
        raise TypeError(f"got {type(got).__name__} {got!r}, expected a number")
    number = float(got)
    if not math.isfinite(number):
        raise ValueError(f"got {number}, expected a finite number")
    kind, colon, detail = value.reason.partition(":") if isinstance(value, Grade) else ("", "", "")
    return Grade(number, _one_line(f"{kind[:MAX_KIND]}{colon}{detail}", MAX_REASON))


def failure(error: BaseException) -> Failure:
    """External failures (of a judge's server or the sandbox) are retryable; bugs are not."""
    outside = OSError | SandboxError | ServiceUnavailableError
    return Failure(_one_line(f"{type(error).__name__}: {error}", MAX_CAUSE), isinstance(error, outside))


def _one_line(text: str, most: int) -> str:
    """One sanitized line: lone surrogates cannot be encoded, and terminals obey control codes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])[:most]


def combine(sample: SampleId, weights: Mapping[str, float], outcomes: Mapping[str, Outcome]) -> Verdict:
    """Components keep each grader's own value, before its weight. Without graders the score is 0."""
    grades = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            return GradingError(sample, name, outcome.cause, outcome.retryable, outcome.timed_out)
        grades[name] = outcome
    score = sum([weights[name] * grade.value for name, grade in grades.items()])
    if not math.isfinite(score):  # finite grades, but a non-finite weight or an overflow
        return GradingError(sample, "", f"got a weighted sum of {score}, expected a finite number", False)
    return Graded(
        sample,
        score,
        {name: grade.value for name, grade in grades.items()},
        {name: grade.reason for name, grade in grades.items() if grade.reason},
    )
