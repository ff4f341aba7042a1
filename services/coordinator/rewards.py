"""Grading by whichever reward services are there: one of several, with retries."""

import itertools
import logging
import time
from collections.abc import Sequence

from services.runtime.clients import RewardClient
from services.runtime.errors import ServiceUnavailableError
from services.wire.types import Graded, GradingError, SampleId, ScoreItem, Verdict

log = logging.getLogger(__name__)


class Rewards:
    def __init__(self, clients: Sequence[RewardClient], retries: int) -> None:
        self._clients = itertools.cycle(clients)
        self._retries = retries
        self._seconds = 0.0

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """One verdict per item. What failed for a passing reason is asked again, `retries` times."""
        begun = time.perf_counter()
        verdicts: dict[SampleId, Verdict] = {}
        waiting = list(items)
        for _ in range(self._retries + 1):
            verdicts |= {verdict.id: verdict for verdict in await self._ask(waiting)}
            waiting = [item for item in waiting if _may_be_asked_again(verdicts.get(item.id))]
            if not waiting:
                break
        self._seconds += time.perf_counter() - begun
        return [verdicts.get(item.id) or _silent(item.id) for item in items]

    def take_seconds(self) -> float:
        """Seconds spent waiting for verdicts since the last call; calls that overlap add up."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    async def _ask(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        client = next(self._clients)
        try:
            return await client.score(items)
        except ServiceUnavailableError as error:
            log.warning("%s", error)
            return [GradingError(item.id, "", str(error), retryable=True) for item in items]


def _may_be_asked_again(verdict: Verdict | None) -> bool:
    return verdict is None or (not isinstance(verdict, Graded) and verdict.retryable)


def _silent(sample: SampleId) -> GradingError:
    return GradingError(sample, "", "the reward service sent no verdict for this item", retryable=True)
