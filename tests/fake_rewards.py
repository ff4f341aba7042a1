"""Reward services in this process, and what a run's graders say of some responses."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from atoll.coordinator.rewards.rewards import Rewards
from atoll.wire.info import RewardInfo
from atoll.wire.types import Graded, GradingError, SampleId, ScoreItem, Verdict
from tests.fake_servers import now

MAX_QUEUED = 1024


class FakeService:
    """A run's own reward service, with the client's methods: exact_match with weight 0.5.

    Each call begins with the next of `failures`: an exception ends it, an error stands for that item's
    verdict. `seconds`: when the verdict on a prompt comes, at once for those not named.
    """

    def __init__(
        self,
        *failures: GradingError | Exception,
        seconds: Mapping[int, float] | None = None,
        max_queued: int = MAX_QUEUED,
    ) -> None:
        self.failures = list(failures)
        self.seconds = seconds or {}
        self.max_queued = max_queued
        self.calls: list[tuple[float, int]] = []  # when, of how many items
        self.held = self.peak = 0  # responses at once
        self.described: list[float] = []  # when
        self.cannot_describe: Exception | None = None

    async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Verdict], None]:
        self.calls.append((now(), len(items)))
        failed: dict[SampleId, Verdict] = {}
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            failed = {failure.id: failure}
        self.held += len(items)
        self.peak = max(self.peak, self.held)
        begun, left = now(), len(items)
        try:
            for moment in sorted({self._seconds(item) for item in items}):
                await asyncio.sleep(begun + moment - now())
                ready = [item for item in items if self._seconds(item) == moment]
                self.held -= len(ready)
                left -= len(ready)
                yield [failed.get(item.id) or graded(item) for item in ready]
        finally:
            self.held -= left

    def _seconds(self, item: ScoreItem) -> float:
        return self.seconds.get(item.id.group.prompt, 0.0)

    async def describe(self) -> RewardInfo:
        self.described.append(now())
        if self.cannot_describe:
            raise self.cannot_describe
        return RewardInfo(("exact_match",), self.max_queued)


def graded(item: ScoreItem) -> Graded:
    return Graded(item.id, 0.5, {"exact_match": 1.0}, {"exact_match": "right"})


def rewards_of(*services: Any, retries: int = 0, **settings: Any) -> Rewards:
    """Of services in this process: what they give is all that a verdict is made of."""
    rewards = Rewards(retries, **settings)
    for service in services:
        rewards.add(service, getattr(service, "max_queued", MAX_QUEUED))
    return rewards


async def scored(rewards: Rewards, items: Sequence[ScoreItem]) -> list[Verdict]:
    """In the order of the items."""
    verdicts: list[Verdict] = []
    await rewards.score(items, verdicts.extend)
    by_id = {verdict.id: verdict for verdict in verdicts}
    assert len(by_id) == len(verdicts) == len(items), "one verdict per item"
    return [by_id[item.id] for item in items]
