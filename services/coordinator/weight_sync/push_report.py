"""The result of a weight push, and its metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.coordinator.fleet.replicas import Replica
from atoll.coordinator.weight_sync.canary import CanaryError
from atoll.runtime.errors import AtollError


@dataclass(frozen=True, slots=True)
class LiveReplica:
    """How a version became live on one replica."""

    stall_s: float  # seconds without generation
    canary_diff: float | None  # from the trainer; none: not due


@dataclass(frozen=True, slots=True)
class PushReport:
    seconds: float
    num_bytes: int  # sent by the trainer; 0: the version's bytes equal those of the last
    stall_s: float  # the longest of the replicas'
    num_replicas: int  # that hold the version and get traffic
    failed: Mapping[str, str]  # why, by the name of each replica that was dropped from the push
    canary_diffs: Sequence[float]  # of each replica that was compared with the trainer
    canary_failed: int  # of these, how many differ by too much

    def metrics(self) -> dict[str, float]:
        metrics = {
            "weights/push_s": self.seconds,
            "weights/num_bytes": float(self.num_bytes),
            "weights/stall_s": self.stall_s,
            "weights/num_replicas": float(self.num_replicas),
            "weights/failed": float(len(self.failed)),
        }
        if self.canary_diffs:
            metrics["weights/canary_diff/max"] = max(self.canary_diffs)
            metrics["weights/canary_failed"] = float(self.canary_failed)
        return metrics


def summarize_push(
    seconds: float, num_bytes: int, live: Mapping[Replica, LiveReplica], failed: Mapping[Replica, AtollError]
) -> PushReport:
    too_different = [error.difference for error in failed.values() if isinstance(error, CanaryError)]
    tolerable = [one.canary_diff for one in live.values() if one.canary_diff is not None]
    return PushReport(
        seconds=seconds,
        num_bytes=num_bytes,
        stall_s=max((one.stall_s for one in live.values()), default=0.0),
        num_replicas=len(live),
        failed={replica.entry.name: str(error) for replica, error in failed.items()},
        canary_diffs=tolerable + too_different,
        canary_failed=len(too_different),
    )
