"""A step's metrics in the field's names. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np

from services.coordinator.groups import staleness
from services.wire.types import FinishReason, Group, Version


def step_metrics(groups: Sequence[Group], version: Version) -> dict[str, float]:
    samples = [sample for group in groups for sample in group.samples]
    scores = np.array([sample.score for sample in samples])
    lengths = np.array([sample.num_tokens for sample in samples])
    ages = np.array([staleness(sample, version) for sample in samples])
    clipped = sum(sample.finish_reason is FinishReason.LENGTH for sample in samples)
    metrics = {
        "training/version": float(version.number),
        "critic/score/mean": float(scores.mean()),
        "critic/score/max": float(scores.max()),
        "critic/score/min": float(scores.min()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": clipped / len(samples),
        "prompt_length/mean": float(np.mean([len(group.prompt.token_ids) for group in groups])),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
    }
    components = [reward.components for sample in samples for reward in sample.rewards]
    for name in sorted({name for values in components for name in values}):
        metrics[f"reward/{name}/mean"] = sum(values.get(name, 0.0) for values in components) / len(samples)
    return metrics


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the minibatches that report it."""
    names = {name for row in rows for name in row}
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in sorted(names)}
