"""A step's metrics, under standard names. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from atoll.coordinator.algorithm.estimates import Float64
from atoll.coordinator.algorithm.experience import fresh_tokens
from atoll.coordinator.algorithm.filters import scores_differ
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import FinishReason, Group, Int64, Trajectory, Version

SCORE = "critic/score/mean"
EQUAL_SHARE = "critic/score/equal_share"  # of groups of several samples, those with equal scores: no gradient

MAX_KINDS = 16  # of reasons of one grader that are metrics of their own
MAX_KIND_CHARACTERS = 40


def step_metrics(groups: Sequence[Group], version: Version, oldest: int = 0) -> dict[str, float]:
    """At `version`, which does not train on turns with a token of a version before number `oldest`."""
    samples = [sample for group in groups for sample in group.samples]
    scores = np.array([sample.score for sample in samples])
    lengths = np.array([sample.num_produced for sample in samples])
    ages = np.array([sample.staleness(version, oldest) for sample in samples])
    prompt_lengths = np.array([len(group.prompt.token_ids) for group in groups])
    num_samples = np.array([len(group.samples) for group in groups])
    clipped = sum(sample.finish_reason is FinishReason.LENGTH for sample in samples)
    metrics = {
        "training/version": float(version.number),
        **summarize("critic/score", scores),
        **summarize("response_length", lengths),
        "response_length/clip_ratio": clipped / len(samples),
        "prompt_length/mean": float(prompt_lengths.mean()),
        "perf/total_num_tokens": float((prompt_lengths * num_samples).sum() + lengths.sum()),
        "staleness/mean": float(ages.mean()),
        "staleness/max": float(ages.max()),
    }
    if several := [group for group in groups if len(group.samples) > 1]:
        metrics[EQUAL_SHARE] = sum(not scores_differ(group) for group in several) / len(several)
    if oldest > 0:
        is_stale_R = ~fresh_tokens(groups, oldest)
        metrics["staleness/masked_fraction"] = float(is_stale_R.sum()) / max(len(is_stale_R), 1)
    if sessions := [sample for group in groups if group.prompt.agent for sample in group.samples]:
        metrics |= _session_metrics(sessions)
    totals: dict[str, float] = {}
    for sample in samples:
        for reward in sample.rewards:
            for name, value in reward.components.items():
                totals[name] = totals.get(name, 0.0) + value
    return metrics | {f"reward/{name}/mean": totals[name] / len(samples) for name in sorted(totals)}


def _session_metrics(sessions: Sequence[Trajectory]) -> dict[str, float]:
    """Of the samples that agents made: how many turns they took, and the shares that ended by a limit."""
    turns = np.array([len(sample.turns) for sample in sessions])
    ends = Counter(sample.reason for sample in sessions if sample.reason)
    shares = {f"agents/ended/{end.replace(' ', '_')}": n / len(sessions) for end, n in sorted(ends.items())}
    return {"agents/turns/mean": float(turns.mean()), "agents/turns/max": float(turns.max()), **shares}


class ReasonShares:
    """Shares of a step's samples by kind of reason (the part before ":"), per grader.

    A run has MAX_KINDS kinds of each grader at most, the first ones that come up, the most frequent of a step
    first; later ones count as "other", since a server may send anything.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}  # by grader

    def measure(self, groups: Sequence[Group]) -> dict[str, float]:
        """reward/NAME/KIND; 0 for known kinds that did not occur in this step."""
        samples = [sample for group in groups for sample in group.samples]
        counts = Counter(
            (grader, reason.partition(":")[0].strip()[:MAX_KIND_CHARACTERS])
            for sample in samples
            for reward in sample.rewards
            for grader, reason in reward.reasons.items()
        )
        for (grader, kind), _ in counts.most_common():
            known = self._known.setdefault(grader, [])
            if kind not in known and len(known) < MAX_KINDS:
                known.append(kind)
        shares = {f"reward/{grader}/{kind}": 0.0 for grader, known in self._known.items() for kind in known}
        for (grader, kind), number in counts.items():
            name = f"reward/{grader}/{kind if kind in self._known[grader] else 'other'}"
            shares[name] = shares.get(name, 0.0) + number / len(samples)
        return shares


def summarize(name: str, values: Float64 | Int64) -> dict[str, float]:
    """NAME/mean, NAME/max and NAME/min; empty without values."""
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(np.mean(values)),
        f"{name}/max": float(np.max(values)),
        f"{name}/min": float(np.min(values)),
    }


def critic_metrics(role: str, values: Float64 | None, returns: Float64) -> dict[str, float]:
    """Metrics of a critic's values and the returns that they predict, over all loss-masked tokens.

    Explained variance is 1 - var(returns - values) / var(returns): 1 for a perfect critic, 0 for a constant
    one.
    """
    metrics = summarize(f"{role}/returns", returns)
    if values is None or len(values) == 0:
        return metrics
    explained = 1 - np.var(returns - values) / (np.var(returns) + 1e-5)
    return metrics | summarize(f"{role}/values", values) | {f"{role}/vf_explained_var": float(explained)}


def average_metrics(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Averages each metric over the minibatches that report it."""
    names = {name for row in rows for name in row}
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in sorted(names)}


def timing_metrics(timer: StepTimer, step: Mapping[str, float]) -> dict[str, float]:
    """Seconds of a step's phases, and what the `step` metrics are per second of it."""
    metrics = timer.metrics()
    step_s = metrics["timing_s/step"]
    if "weights/stall_s" in step:
        metrics["weights/stall_share"] = step["weights/stall_s"] / step_s
    return metrics | {"perf/throughput": step["perf/total_num_tokens"] / step_s}
