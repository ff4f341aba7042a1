"""Grading: combines verdicts of the run's reward services and of external servers."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from atoll.coordinator.rewards.advice import timeout_note
from atoll.coordinator.rewards.verdict_sources import (
    NoRewardServiceError,
    RewardServices,
    ServerGrader,
    VerdictSource,
    item_texts,
)
from atoll.runtime.clients.base import MAX_MESSAGE_BYTES
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import AtollError, StaleFenceError
from atoll.wire.codec.rewards import encode_score_item
from atoll.wire.types import Graded, GradingError, SampleId, ScoreItem, Verdict

log = logging.getLogger(__name__)

BACKOFF_S = 0.5  # before a retry; doubles each time
MAX_BACKOFF_S = 30.0

Deliver = Callable[[Sequence[Verdict]], None]


class Rewards:
    """A score is the weighted sum of all graders; if one fails, there is no score."""

    def __init__(
        self,
        retries: int,
        servers: Sequence[ServerGrader] = (),
        *,
        asks_own: bool = True,
        wait_timeout_s: float = 600.0,
        absence_timeout_s: float = 14400.0,
        tell: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        """`asks_own`: whether any grader runs in the run's own services. `wait_timeout_s`: how long responses
        wait for such a service while none makes progress; `absence_timeout_s`: while none is registered.
        `tell` gets notes on what holds grading up, "" once that has passed.
        """
        self._tell = tell or _tell_nobody
        self._timeouts = 0
        self._retries = retries
        self._own = RewardServices(wait_timeout_s, absence_timeout_s, self._tell)
        self._parts: tuple[VerdictSource, ...] = (*((self._own,) if asks_own else ()), *servers)
        self._seconds = 0.0
        self._retried = 0
        self._dropped = 0

    def add(self, client: RewardClient, max_queued: int) -> None:
        """`max_queued`: the service's limit of concurrent responses; 0: unknown."""
        self._own.add(client, max_queued)

    async def drain(self, client: RewardClient) -> None:
        """It gets no new responses; returns once its verdicts have arrived."""
        await self._own.drain(client)

    def remove(self, client: RewardClient) -> None:
        self._own.remove(client)

    async def addresses(self) -> list[str]:
        """Of the run's own services; waits until there is one."""
        return await self._own.addresses()

    async def score(self, items: Sequence[ScoreItem], deliver: Deliver) -> None:
        """Delivers one verdict per item as soon as all its parts have arrived. Raises a group with
        NoRewardServiceError if there is no service for too long.
        """
        begun = time.perf_counter()
        refused = [error for item in items if (error := _check_sendable(item))]
        if refused:
            self._deliver(refused, deliver)
            ids = {error.id for error in refused}
            items = [item for item in items if item.id not in ids]
        if not self._parts:
            self._deliver([merge_verdicts(item.id, []) for item in items], deliver)
        sums = _PartialVerdicts(len(self._parts))
        async with asyncio.TaskGroup() as calls:
            for number, part in enumerate(self._parts):
                add = partial(self._add, sums, number, deliver)
                for some in part.split(items):
                    calls.create_task(self._grade(part, some, add))
        self._seconds += time.perf_counter() - begun

    async def wait_until_dispatched(self) -> None:
        """Waits until all earlier requests are being graded: items that arrive until then can share a
        call.
        """
        for part in self._parts:
            await part.wait_until_dispatched()

    def take_seconds(self) -> float:
        """Seconds spent waiting for verdicts since the last call; calls that overlap add up."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def take_timeouts(self) -> float:
        """Responses that a grader's deadline has passed for since the last call, once per time."""
        timeouts, self._timeouts = self._timeouts, 0
        return float(timeouts)

    def take_metrics(self) -> dict[str, float]:
        """Since the last call, of training: number of retried responses, and of responses left without a
        reward. Validation and the warm-up's scoring have metrics of their own."""
        metrics = {"reward/retried": float(self._retried), "reward/dropped": float(self._dropped)}
        self._retried = self._dropped = 0
        return metrics

    async def _grade(self, part: VerdictSource, items: Sequence[ScoreItem], add: Deliver) -> None:
        """Collects one part of the verdicts; retries transient failures up to `retries` times."""
        since = asyncio.get_running_loop().time()
        waiting = {item.id: item for item in items}
        failed: dict[SampleId, GradingError] = {}
        for retry in range(self._retries + 1):
            if retry:
                self._retried += sum(map(_is_of_training, waiting))
                await asyncio.sleep(min(BACKOFF_S * 2 ** (retry - 1), MAX_BACKOFF_S))
            failed.clear()
            cause = "it sent no verdict for this response"
            try:
                async with aclosing(part.ask(list(waiting.values()), since)) as answers:
                    async for verdicts in answers:
                        await self._note_timeouts(verdicts)
                        add(list(_take_final(verdicts, waiting, failed)))
            except (StaleFenceError, NoRewardServiceError):
                raise  # another coordinator has taken over, or nobody can grade: either ends the run
            except AtollError as error:
                cause = str(error)
            if not waiting:
                return
        add([failed.get(id) or GradingError(id, part.grader, cause, retryable=True) for id in waiting])

    async def _note_timeouts(self, verdicts: Sequence[Verdict]) -> None:
        late = [verdict for verdict in verdicts if isinstance(verdict, GradingError) and verdict.timed_out]
        if late:
            self._timeouts += len(late)
            note = timeout_note(self._timeouts, late[-1].grader)
            log.warning("%s", note)
            await self._tell(note)

    def _add(
        self, sums: "_PartialVerdicts", number: int, deliver: Deliver, verdicts: Sequence[Verdict]
    ) -> None:
        if complete := list(sums.add(number, verdicts)):
            self._deliver(complete, deliver)

    def _deliver(self, verdicts: Sequence[Verdict], deliver: Deliver) -> None:
        self._dropped += sum(
            [isinstance(verdict, GradingError) and _is_of_training(verdict.id) for verdict in verdicts]
        )
        deliver(verdicts)


async def _tell_nobody(note: str) -> None: ...


class _PartialVerdicts:
    """The partial verdicts of each response so far."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._said: dict[SampleId, dict[int, Verdict]] = {}

    def add(self, number: int, verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
        """Adds verdicts of source `number`; yields those that are complete now."""
        for verdict in verdicts:
            if self._num_parts == 1:
                yield merge_verdicts(verdict.id, [verdict])
                continue
            said = self._said.setdefault(verdict.id, {})
            said[number] = verdict
            if len(said) == self._num_parts:  # summed in the order of the sources, whichever came first
                yield merge_verdicts(verdict.id, [said[part] for part in range(self._num_parts)])


def merge_verdicts(id: SampleId, parts: Sequence[Verdict]) -> Verdict:
    """Sums partial verdicts, with all their components; a failed part becomes the verdict."""
    if len(parts) == 1 and isinstance(parts[0], Graded) and math.isfinite(parts[0].value):
        return parts[0]  # the common case
    graded = []
    for part in parts:
        if isinstance(part, GradingError):
            return part
        graded.append(part)
    score = sum((part.value for part in graded), 0.0)
    if not math.isfinite(score):  # overflow of finite values
        return GradingError(id, "", f"got a weighted sum of {score}, expected a finite number", False)
    return Graded(
        id,
        score,
        {name: value for part in graded for name, value in part.components.items()},
        {name: reason for part in graded for name, reason in part.reasons.items()},
    )


def _take_final(
    verdicts: Sequence[Verdict], waiting: dict[SampleId, ScoreItem], failed: dict[SampleId, GradingError]
) -> Iterator[Verdict]:
    """Yields final verdicts, removed from `waiting`; retryable failures go to `failed`."""
    for verdict in verdicts:
        if isinstance(verdict, GradingError) and verdict.retryable:
            failed[verdict.id] = verdict
        elif waiting.pop(verdict.id, None):
            yield verdict


def _is_of_training(id: SampleId) -> bool:
    return id.group.validation_set is None


def _check_sendable(item: ScoreItem) -> GradingError | None:
    """An error verdict if no message can carry the item."""
    parts = item_texts(item)
    if 8 * sum(map(len, parts)) < MAX_MESSAGE_BYTES and all(map(str.isascii, parts)):
        return None
    try:
        size = encode_score_item(item).ByteSize()
    except ValueError as error:  # such as half of a surrogate pair
        return GradingError(item.id, "", f"its texts cannot be encoded: {error}", retryable=False)
    if size < MAX_MESSAGE_BYTES - 16:  # leaves room for the enclosing message
        return None
    cause = (
        f"got {size:,} bytes of prompt, response, ground truth and extra fields, expected less than the "
        f"{MAX_MESSAGE_BYTES:,} of a message: remove or shorten the row"
    )
    return GradingError(item.id, "", cause, retryable=False)
