"""Writes runs/NAME/summary.json: first and last results of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from atoll.config.schema import RunSection
from atoll.coordinator.journal.checkpoints import BestValidation

MetricsRow = Mapping[str, float]  # the metrics of a step


def write_summary(
    path: Path,
    run: RunSection,
    rows: Sequence[MetricsRow],
    *,
    steps: int,
    seconds: float,
    best: BestValidation | None,
    checkpoint: Path | None,
) -> None:
    scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
    validations = [validation for row in rows if (validation := _validation(row))]
    summary = {
        "run": run.name,
        "steps": steps,
        "seconds": seconds,
        "reward_first": _mean(scores[: run.target_window]),
        "reward_last": _mean(scores[-run.target_window :]),
        "reward_window": run.target_window,
        "target_reward": run.target_reward,
        "validation_first": validations[0] if validations else {},
        "validation_last": validations[-1] if validations else {},
        "best": None if best is None else asdict(best),
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _validation(row: MetricsRow) -> MetricsRow:
    return {name: value for name, value in row.items() if name.startswith("val/")}
