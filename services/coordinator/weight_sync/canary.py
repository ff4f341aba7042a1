"""Canary check: compares logprobs of fixed texts between the trainer and a replica that just committed.

Checksums show that the bytes arrived. Logprobs also reveal wrongly mapped names and stale caches.
"""

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from atoll.coordinator.fleet.replicas import Replica
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import DivergedError, WeightPushError
from atoll.runtime.model_spec import read_spec
from atoll.runtime.progress_timeout import await_with_progress
from atoll.runtime.rendering import Renderer
from atoll.wire.types import Float32, Int32, Segments, Version

TEXTS = (
    "12 + 34 = 46, and 7 * 8 = 56; what is left of 100 after both are taken away from it",
    "the tide carries the boat out of the lagoon, past the reef, and the wind brings it home",
)
MAX_TOKENS = 32  # of each


class CanaryError(WeightPushError):
    """A replica's logprobs differ from the trainer's."""

    def __init__(self, difference: float, tolerance: float) -> None:
        expected = f"expected at most weights.canary_tolerance = {tolerance:g}: it gets no traffic"
        advice = (
            "raise the tolerance if this is due to its dtype's precision"
            if np.isfinite(difference)
            else "its own are not finite and the trainer's are, so its weights are damaged: look at its log"
        )
        super().__init__(
            f"its logprobs of fixed texts differ from the trainer's by {difference:.4g} on average, "
            f"{expected}; {advice}"
        )
        self.difference = difference


class Canary:
    def __init__(self, model_folder: Path, every: int, tolerance: float) -> None:
        """`every`: pushes between checks, from the first; 0: never. `tolerance`: of the mean difference."""
        self._folder = model_folder
        self._every = every
        self._tolerance = tolerance

    def is_due(self, push: int) -> bool:
        """`push` counts them from 0."""
        return self._every > 0 and push % self._every == 0

    async def ask_trainer(self, trainer: TrainerClient) -> list[Float32]:
        """Of each text [T], [T-1]: log-probability of each token but the first, at temperature 1. Raises
        DivergedError if one is not finite."""
        sequences = await asyncio.to_thread(lambda: self._sequences)  # read from disk the first time
        segments = as_segments(sequences)
        logprobs_T = await trainer.compute_logprobs(segments, temperature=1.0)
        if not np.isfinite(logprobs_T).all():
            raise DivergedError(
                "training has diverged: after this update, the policy's log-probabilities of fixed texts are "
                "not finite; lower trainer.optimizer.learning_rate"
            )
        return [logprobs[1:] for logprobs in np.split(logprobs_T, segments.offsets[1:-1])]

    async def ask_replica(self, client: RolloutClient, max_length: int) -> list[Float32]:
        """As `ask_trainer`, of as much of each text as the replica takes."""
        return await client.score_tokens([ids[: max_length - 1] for ids in self._sequences])

    def compare(self, expected: Sequence[Float32], got: Sequence[Float32]) -> float:
        """The mean absolute difference. Raises CanaryError if it is too large, or not finite."""
        pairs = zip(expected, got, strict=True)
        difference = float(np.concatenate([np.abs(ours[: len(its)] - its) for ours, its in pairs]).mean())
        if not difference <= self._tolerance:  # NaN is not, either
            raise CanaryError(difference, self._tolerance)
        return difference

    @cached_property
    def _sequences(self) -> Sequence[Int32]:
        length = min(MAX_TOKENS, read_spec(self._folder).max_positions)
        return [ids[:length] for ids in Renderer(self._folder).encode_prompts(TEXTS)]


class CanaryCheck:
    """What the trainer makes of the texts with one version, for replicas that have it to be compared with."""

    def __init__(self, canary: Canary, version: Version, trainer: TrainerClient, *, is_due: bool) -> None:
        self.version = version
        self._canary = canary
        self._trainer = trainer
        self._is_asked = not is_due
        self._expected: asyncio.Task[list[Float32]] | None = None  # its answer

    def ask_trainer(self) -> None:
        """Once, if the check is due. Does not wait for the answer."""
        if not self._is_asked:
            self._is_asked = True
            self._expected = asyncio.create_task(self._canary.ask_trainer(self._trainer))

    async def wait_for_trainer(self) -> None:
        """Raises AtollError if it could not answer."""
        if self._expected:
            await self._expected

    async def compare(self, replica: Replica, silence_s: float) -> float | None:
        """The replica's mean absolute difference; None if the check is not due. Raises CanaryError if that
        is too large, ServiceUnavailableError if the replica makes no progress for `silence_s`."""
        if self._expected is None:
            return None
        asking = self._canary.ask_replica(replica.client, replica.info.max_length)
        got = await await_with_progress(asking, replica.client.progress, silence_s)
        return self._canary.compare(await self._expected, got)

    async def cancel(self) -> None:
        if self._expected:
            self._expected.cancel()
            await asyncio.gather(self._expected, return_exceptions=True)


def as_segments(sequences: Sequence[Int32]) -> Segments:
    """Each sequence is its own group, so that data-parallel ranks share them."""
    return Segments(
        token_ids=np.concatenate(sequences),
        offsets=np.cumsum([0, *map(len, sequences)], dtype=np.int64),
        parents=np.full(len(sequences), -1, np.int32),
        groups=np.arange(len(sequences), dtype=np.int32),
    )
