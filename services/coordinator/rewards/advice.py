"""Advice on slow grading, shown in a run's status. Pure."""

from collections.abc import Mapping, Sequence

from atoll.config.schema import GraderConfig

SLOW_SHARE = 0.5  # of a step's time, from which grading is worth a hint


def timeout_note(count: int, grader: str) -> str:
    """`count`: of the step so far."""
    responses = "1 response" if count == 1 else f"{count} responses"
    return f"reward {grader}: no grade within its deadline_s for {responses} of this step (reward/timeouts)"


def slow_grading_note(metrics: Mapping[str, float], graders: Sequence[GraderConfig]) -> str:
    """A hint if a step spent its time waiting for graders that grade one response at a time; else ""."""
    alone = [grader.name for grader in graders if grader.is_users_own and (grader.concurrency or 1) == 1]
    reward_s, step_s = metrics.get("timing_s/reward", 0.0), metrics.get("timing_s/step", 0.0)
    if not alone or not SLOW_SHARE * step_s < reward_s <= step_s:  # more: a validation's answers count, too
        return ""
    return (
        f"grading took {reward_s:.1f} s of a step of {step_s:.1f} s: {' and '.join(alone)} grades one "
        "response at a time; raise its concurrency"
    )
