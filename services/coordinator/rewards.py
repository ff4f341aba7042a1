"""Grading: the run's own reward services and other people's servers, each asked for its part of a verdict."""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from services.coordinator.servers import Servers
from services.runtime.clients import RewardClient
from services.runtime.errors import AtollError, OverloadedError, ServiceUnavailableError
from services.wire.types import Graded, GradingError, SampleId, ScoreItem, Verdict

log = logging.getLogger(__name__)

BACKOFF_S = 0.5  # before what failed is asked again; twice as long each time
MAX_BACKOFF_S = 30.0
BUSY_S = 0.1  # before those are asked again who all had too much to do; twice as long each time
MAX_BUSY_S = 2.0
MAX_CALL = 64  # responses in a call to an external server
MAX_CHARACTERS = 8 << 20  # of a call's texts, 4 bytes each at most: a message may have twice as many


class Part(Protocol):
    """Who gives a part of each verdict."""

    grader: str  # to name in errors

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        """What is asked in one call each."""
        ...

    async def ask(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """Verdicts in any order. Raises ServiceUnavailableError where there is none, OverloadedError where
        everyone who could be asked has too much to do."""
        ...


class OwnServices:
    """The run's reward services: calls go round those that are there."""

    grader = "service"

    def __init__(self, clients: Sequence[RewardClient] = ()) -> None:
        self.clients = deque(clients)

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        return cut(items, len(items))

    async def ask(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        error = ServiceUnavailableError("no reward service is registered; see logs/reward-*.log")
        self.clients.rotate(1)
        for client in tuple(self.clients):  # others' calls rotate them meanwhile
            try:
                return await client.score(items)
            except OverloadedError as busy:
                error = busy
            except ServiceUnavailableError as away:
                log.warning("%s", away)
                error = away
        raise error


class ServerGrader:
    """The grader server:NAME: those external servers that have the name at the moment."""

    def __init__(self, servers: Servers, name: str, weight: float) -> None:
        self.grader = f"server:{name}"
        self._servers = servers
        self._name = name
        self._weight = weight

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        """As many calls as the servers take at once, so that all of them have a part."""
        slots = max(self._servers.slots(self._name), 1)
        return cut(items, min(-(-len(items) // slots), MAX_CALL))

    async def ask(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        try:
            return [self._part(verdict) for verdict in await self._servers.score(self._name, items)]
        except ServiceUnavailableError:
            raise
        except AtollError as error:  # by the time that it is asked again, another one may be there
            raise ServiceUnavailableError(str(error)) from error

    def _part(self, verdict: Verdict) -> Verdict:
        """Components of the server's own stand beside its value, as server:NAME/COMPONENT."""
        if isinstance(verdict, GradingError):
            return GradingError(verdict.id, self.grader, verdict.cause, verdict.retryable)
        own, name = verdict.components, self.grader
        return Graded(
            verdict.id,
            self._weight * verdict.value,
            {name: verdict.value, **{f"{name}/{component}": value for component, value in own.items()}},
            {f"{name}/{of}" if of in own else name: reason for of, reason in verdict.reasons.items()},
        )


class Rewards:
    """A score is the weighted sum of all graders; one that cannot say anything leaves no score."""

    def __init__(
        self,
        retries: int,
        clients: Sequence[RewardClient] = (),
        servers: Sequence[ServerGrader] = (),
        *,
        asks_own: bool = True,
        patience_s: float = 600.0,
    ) -> None:
        """`asks_own`: whether any grader runs in the run's own services. `patience_s`: for those who have
        too much to do."""
        self._retries = retries
        self._patience_s = patience_s
        self._own = OwnServices(clients)
        self._parts: tuple[Part, ...] = (*((self._own,) if asks_own else ()), *servers)
        self.has_servers = bool(servers)
        self._seconds = 0.0
        self._retried = 0
        self._dropped = 0

    def add(self, client: RewardClient) -> None:
        self._own.clients.append(client)

    def remove(self, client: RewardClient) -> None:
        self._own.clients.remove(client)

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        """One verdict per item, once all parts have theirs."""
        if not items:  # all of them were cancelled meanwhile
            return []
        begun = time.perf_counter()
        parts = await asyncio.gather(*(self._part(part, items) for part in self._parts))
        verdicts = [merged(item.id, [part[item.id] for part in parts]) for item in items]
        self._dropped += sum(isinstance(verdict, GradingError) for verdict in verdicts)
        self._seconds += time.perf_counter() - begun
        return verdicts

    def take_seconds(self) -> float:
        """Seconds spent waiting for verdicts since the last call; calls that overlap add up."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_metrics(self) -> dict[str, float]:
        """Responses, since the last call: those of which a part was asked again, once per time, and those
        that were left without a reward."""
        metrics = {"reward/retried": float(self._retried), "reward/dropped": float(self._dropped)}
        self._retried = self._dropped = 0
        return metrics

    async def _part(self, part: Part, items: Sequence[ScoreItem]) -> Mapping[SampleId, Verdict]:
        """A part of the verdict on each item."""
        first, *others = await asyncio.gather(*(self._grade(part, some) for some in part.split(items)))
        for other in others:
            first |= other
        return first

    async def _grade(self, part: Part, items: Sequence[ScoreItem]) -> dict[SampleId, Verdict]:
        """What failed for a passing reason is asked again, `retries` times."""
        verdicts: dict[SampleId, Verdict] = {}
        waiting = items
        for retry in range(self._retries + 1):
            if retry:
                self._retried += len(waiting)
                await asyncio.sleep(min(BACKOFF_S * 2 ** (retry - 1), MAX_BACKOFF_S))
            verdicts |= {verdict.id: verdict for verdict in await self._ask(part, waiting)}
            waiting = [item for item in waiting if _may_be_asked_again(verdicts.get(item.id))]
            if not waiting:
                break
        for item in waiting:
            verdicts.setdefault(item.id, _silent(item.id, part))
        return verdicts

    async def _ask(self, part: Part, items: Sequence[ScoreItem]) -> list[Verdict]:
        """Waits where everyone has too much to do, and asks again: that is no failure for patience_s."""
        patient_until = asyncio.get_running_loop().time() + self._patience_s
        pause_s = BUSY_S
        while True:
            try:
                return await part.ask(items)
            except ServiceUnavailableError as error:
                is_patient = asyncio.get_running_loop().time() < patient_until
                if not (isinstance(error, OverloadedError) and is_patient):
                    return [GradingError(item.id, part.grader, str(error), True) for item in items]
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BUSY_S)


def cut(items: Sequence[ScoreItem], size: int) -> list[Sequence[ScoreItem]]:
    """Parts of at most `size` items, and of MAX_CHARACTERS (more only where one item has more): each item
    brings its own copy of the prompt and the ground truth, such as the test cases of a program."""
    parts: list[Sequence[ScoreItem]] = []
    first = characters = 0
    for number, item in enumerate(items):
        own = sum(map(len, (item.prompt, item.response, item.ground_truth, *item.extra.values())))
        if number - first == size or (number > first and characters + own > MAX_CHARACTERS):
            parts.append(items[first:number])
            first, characters = number, 0
        characters += own
    return [*parts, items[first:]]


def merged(id: SampleId, parts: Sequence[Verdict]) -> Verdict:
    """The sum of the parts with all their components; a part that failed is the verdict."""
    graded = []
    for part in parts:
        if isinstance(part, GradingError):
            return part
        graded.append(part)
    score = sum((part.value for part in graded), 0.0)
    if not math.isfinite(score):  # of finite values: they or their weights are too large
        return GradingError(id, "", f"got a weighted sum of {score}, expected a finite number", False)
    return Graded(
        id,
        score,
        {name: value for part in graded for name, value in part.components.items()},
        {name: reason for part in graded for name, reason in part.reasons.items()},
    )


def _may_be_asked_again(verdict: Verdict | None) -> bool:
    return verdict is None or (isinstance(verdict, GradingError) and verdict.retryable)


def _silent(sample: SampleId, part: Part) -> GradingError:
    return GradingError(sample, part.grader, "it sent no verdict for this response", retryable=True)
