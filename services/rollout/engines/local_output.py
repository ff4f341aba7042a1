"""What the local engine has produced of a sample."""

import time
from dataclasses import dataclass

import numpy as np

from atoll.rollout.engines.base import Completion
from atoll.wire.types import FinishReason, Float32, Int32, Routes, TurnId, Version, VersionSpan

NO_ROUTES = np.empty((0, 0, 0), np.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class PartialOutput:
    """The partial output of a sample."""

    token_ids_T: Int32
    logprobs_T: Float32
    versions: tuple[tuple[Version, int], ...]  # and the number of the first token of each
    started: float  # Unix seconds
    routes_NYC: Routes  # see Completion; empty if they are not recorded

    def complete(self, id: TurnId, reason: FinishReason, text: str) -> Completion:
        return Completion(
            id=id,
            token_ids=self.token_ids_T,
            logprobs=self.logprobs_T,
            spans=self._spans(),
            finish_reason=reason,
            text=text,
            started=self.started,
            finished=time.time(),
            routes=self.routes_NYC if self.routes_NYC.size else None,
        )

    def _spans(self) -> tuple[VersionSpan, ...]:
        """Merges neighbouring spans of one version, as after a retraction."""
        spans: list[VersionSpan] = []
        ends = [*(start for _, start in self.versions[1:]), len(self.token_ids_T)]
        for (version, start), end in zip(self.versions, ends, strict=False):
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1]._replace(end=end)
            elif end > start:
                spans.append(VersionSpan(version, start, end))
        return tuple(spans)


def empty_output(started: float) -> PartialOutput:
    return PartialOutput(np.empty(0, np.int32), np.empty(0, np.float32), (), started, NO_ROUTES)
