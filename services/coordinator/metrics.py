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
    prompt_lengths = np.array([len(group.prompt.token_ids) for group in groups])
    num_samples = np.array([len(group.samples) for group in groups])
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
        "prompt_length/mean": float(prompt_lengths.mean()),
        "perf/total_num_tokens": float((prompt_lengths * num_samples).sum() + lengths.sum()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
    }
    totals: dict[str, float] = {}
    for sample in samples:
        for reward in sample.rewards:
            for name, value in reward.components.items():
                totals[name] = totals.get(name, 0.0) + value
    return metrics | {f"reward/{name}/mean": totals[name] / len(samples) for name in sorted(totals)}


def mean_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the minibatches that report it."""
    names = {name for row in rows for name in row}
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in sorted(names)}
