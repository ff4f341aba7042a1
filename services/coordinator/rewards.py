"""Grading by whichever reward services are there: one of several, with retries."""

import logging
import time
from collections import deque
from collections.abc import Sequence

from services.runtime.clients import RewardClient
from services.runtime.errors import ServiceUnavailableError
from services.wire.types import Graded, GradingError, SampleId, ScoreItem, Verdict

log = logging.getLogger(__name__)


class Rewards:
    """Calls go round the services that are there."""

    def __init__(self, retries: int, clients: Sequence[RewardClient] = ()) -> None:
        self._clients = deque(clients)
        self._retries = retries
        self._seconds = 0.0

    def add(self, client: RewardClient) -> None:
        self._clients.append(client)

    def remove(self, client: RewardClient) -> None:
        self._clients.remove(client)

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
        try:
            if not self._clients:
                raise ServiceUnavailableError("no reward service is registered; see logs/reward-*.log")
            self._clients.rotate(1)
            return await self._clients[0].score(items)
        except ServiceUnavailableError as error:
            log.warning("%s", error)
            return [GradingError(item.id, "", str(error), retryable=True) for item in items]


def _may_be_asked_again(verdict: Verdict | None) -> bool:
    return verdict is None or (not isinstance(verdict, Graded) and verdict.retryable)


def _silent(sample: SampleId) -> GradingError:
    return GradingError(sample, "", "the reward service sent no verdict for this item", retryable=True)
