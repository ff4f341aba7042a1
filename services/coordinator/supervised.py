"""The supervised mode: trains on rows with answers, without rollout and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.algorithm.algorithm import AlgorithmState, PreparedStep
from atoll.coordinator.algorithm.experience import lay_out_supervised
from atoll.coordinator.algorithm.filters import NO_COUNTS
from atoll.coordinator.algorithm.models import ModelClient
from atoll.coordinator.data.conversations import SupervisedSequence
from atoll.coordinator.data.datasets import Cursor, SupervisedSource
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import SampleId, SupervisedBatch, Version


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutSet:
    """A held-out validation set."""

    name: str
    rows: Sequence[SupervisedSequence]


class SupervisedSteps:
    higher_is_better = False  # a loss
    state = AlgorithmState()
    counters = NO_COUNTS

    def __init__(
        self,
        rows: SupervisedSource,
        held_out: Sequence[HeldOutSet],
        actor: ModelClient,
        rows_per_step: int,
    ) -> None:
        self._rows = rows
        self._held_out = held_out
        self._actor = actor
        self._rows_per_step = rows_per_step

    @property
    def cursor(self) -> Cursor:
        return self._rows.cursor

    async def prepare(self, step: int, version: Version, timer: StepTimer) -> PreparedStep:
        """The next batch; its loss is the mean over all learned tokens."""
        batch = SupervisedBatch(*lay_out_supervised(self._rows.draw(self._rows_per_step)))
        cursor, num_tokens = self._rows.cursor, len(batch.segments.token_ids)
        metrics = {
            "perf/total_num_tokens": float(num_tokens),
            "data/epoch": sum(cursor.drawn) / sum(cursor.rows),  # rows drawn, in the number of rows there are
        }
        return PreparedStep({"actor": [batch]}, metrics, samples=[()])

    async def on_refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None: ...

    async def on_published(self, version: Version) -> None: ...

    async def validate(self, step: int, version: Version) -> dict[str, float]:
        """val/SET/nll: the mean negative log-likelihood of a learned token, in nats."""
        metrics = {}
        for held_out in self._held_out:
            segments, weights_T = lay_out_supervised(held_out.rows)
            logprobs_T = await self._actor.compute_logprobs(segments)
            metrics[f"val/{held_out.name}/nll"] = -float(np.dot(weights_T, logprobs_T.astype(np.float64)))
        return metrics
