"""Estimates how much a plan transfers and how long that takes. Pure numpy."""

from dataclasses import dataclass

import numpy as np

from atoll.wire.types import Int64, Plan


@dataclass(frozen=True, eq=False, slots=True)
class PushEstimate:
    """Of one version, however many replicas receive it together."""

    source_bytes: Int64  # [trainer rank] sent, up to the last rank that sends
    target_bytes: Int64  # [target rank] received by that rank of each replica
    rounds: int
    seconds: float


def estimate(plan: Plan, itemsize: int, bytes_per_s: float) -> PushEstimate:
    """Rounds are sequential, and the parts of a round travel concurrently, so the time is the sum over rounds
    of the largest part's bytes, divided by the bandwidth.

    `itemsize`: bytes of an element of the serving dtype; `bytes_per_s`: bandwidth of the slower end of a
    part's link. More replicas do not count: a broadcast streams through them.
    """
    t = plan.transfers
    size_N = t["rows"] * t["columns"] * itemsize
    num_sources, rounds = int(t["source"].max(initial=-1)) + 1, int(t["round"].max(initial=-1)) + 1
    # in one round a source sends one part at most
    parts = np.bincount(t["round"] * np.int64(num_sources) + t["source"], size_N, rounds * num_sources)
    return PushEstimate(
        source_bytes=np.bincount(t["source"], size_N).astype(np.int64),
        target_bytes=np.bincount(t["target"], size_N).astype(np.int64),
        rounds=rounds,
        seconds=float(parts.reshape(rounds, num_sources).max(axis=1, initial=0).sum() / bytes_per_s),
    )
