"""Writes runs/NAME/summary.json: how a run ended, its first and last results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path

from atoll.config.schema import RunConfig, RunSection
from atoll.coordinator.algorithm.metrics import EQUAL_SHARE, SCORE
from atoll.coordinator.journal.checkpoints import BestValidation, Checkpoints
from atoll.runtime.telemetry import METRICS_FILE, load_metrics, metrics_of

SUMMARY_FILE = "summary.json"  # in a run's folder, once it has ended

MetricsRow = Mapping[str, float]  # the metrics of a step


class Outcome(StrEnum):
    FINISHED = "finished"
    TARGET_REACHED = "target reached"
    INTERRUPTED = "interrupted"
    STOPPED_BY_GUARD = "stopped by a guard"
    FAILED = "failed"


def write_summary(
    folder: Path,
    run: RunSection,
    rows: Sequence[MetricsRow],
    outcome: Outcome,
    *,
    reason: str = "",
    steps: int,
    seconds: float | None,
    best: BestValidation | None,
    checkpoint: Path | None,
) -> None:
    """`reason`: of a failure. `seconds`: of all starts of the run; None: unknown."""
    scores = [row[SCORE] for row in rows if SCORE in row]
    window, first, last = first_and_last(scores, run.target_window)
    validations = [validation for row in rows if (validation := _validation(row))]
    summary = {
        "run": run.name,
        "outcome": outcome,
        "reason": reason,
        "steps": steps,
        "num_steps": run.steps,
        "seconds": seconds,
        "reward_first": first,
        "reward_last": last,
        "reward_window": window,
        "target_reward": run.target_reward,
        "validation_first": validations[0] if validations else {},
        "validation_last": validations[-1] if validations else {},
        "best": None if best is None else asdict(best),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "hint": learning_hint(rows[-run.target_window :], scores),
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")


def complete_summary(config: RunConfig, outcome: Outcome, reason: str = "") -> None:
    """Writes the summary of a run that ended without one: killed, or before its loop began."""
    if (config.folder / SUMMARY_FILE).exists():
        return
    has_rows = (config.folder / METRICS_FILE).exists()
    rows = load_metrics(config.folder) if has_rows else []
    checkpoints = Checkpoints(config.folder / "checkpoints", config.checkpoint.keep)
    saved = checkpoints.steps()
    write_summary(
        config.folder,
        config.run,
        [metrics_of(row) for row in rows],
        outcome,
        reason=reason,
        steps=int(rows[-1]["step"]) if rows else 0,
        seconds=None,
        best=None,
        checkpoint=checkpoints.path(saved[-1]) if saved else None,
    )


def first_and_last(values: Sequence[float], window: int) -> tuple[int, float | None, float | None]:
    """The means of the first and of the last values, and how many these are: at most `window`, and never the
    same ones twice. Of a single value only the last is known (window 0), of none nothing.
    """
    window = min(window, len(values) // 2)
    return window, _mean(values[:window]), _mean(values[-max(window, 1) :])


def learning_hint(last: Sequence[MetricsRow], scores: Sequence[float]) -> str:
    """Why a run may have learned nothing; "" if nothing suggests it. `scores`: of all steps."""
    if len(scores) > 1 and min(scores) == max(scores):
        return (
            f"the reward was {scores[0]:g} in every step, so there was nothing to learn from: check the "
            "answers and the grader"
        )
    share = _mean([row[EQUAL_SHARE] for row in last if EQUAL_SHARE in row])
    if share is not None and share > 0.5:
        return (
            f"in {share:.0%} of the last groups all answers had the same reward, which gives no gradient: "
            "use prompts that are neither too easy nor too hard, or raise coordinator.samples_per_prompt"
        )
    return ""


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _validation(row: MetricsRow) -> MetricsRow:
    return {name: value for name, value in row.items() if name.startswith("val/")}
