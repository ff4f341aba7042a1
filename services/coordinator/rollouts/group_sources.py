"""Sources of finished groups: generated, or replayed from a dump.

A source owns admission and staleness. `GenerateSource` keeps at most (max_staleness + 1) batches
between issue and publish, which bounds how far generation runs ahead of training.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from atoll.coordinator.algorithm.filters import NO_COUNTS, Counters, DynamicSampling
from atoll.coordinator.data.datasets import PromptSource
from atoll.coordinator.journal.journal import InFlight, Journal, OpenSession, RestoredGroup
from atoll.coordinator.rollouts.groups import PendingGroup
from atoll.coordinator.rollouts.producer import Producer
from atoll.runtime.dump import read_dump
from atoll.runtime.errors import AtollError, UserError
from atoll.wire.types import Group, GroupId, Prompt, SampleId, Sampling, Trajectory, Version

log = logging.getLogger(__name__)

MAX_ISSUED = 10_000  # samples, in one call of the store
MIN_JUDGED = 2  # batches issued before the share of dropped groups is checked


class GroupSource(Protocol):
    @property
    def counters(self) -> Counters:
        """Counts that its limits are checked against."""
        ...

    async def take(self, step: int, count: int, current: Version) -> list[Group]:
        """The batch that `step` trains on, at version `current`."""
        ...

    def oldest_trained(self, current: Version) -> int:
        """Number of the oldest version whose turns are trained on at `current`."""
        ...

    async def on_refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None:
        """`step`, which took these samples, does not train on them."""
        ...

    async def on_published(self, version: Version) -> None:
        """The batch taken last is trained on and `version` is live."""
        ...

    def take_metrics(self) -> Mapping[str, float]:
        """Of the batch taken last: what was left out for it."""
        ...


class GenerateSource:
    """Draws prompts, has them generated and graded, and returns groups that are fresh enough."""

    def __init__(
        self,
        prompts: PromptSource,
        producer: Producer,
        journal: Journal,
        *,
        sampling: Sampling,
        prompts_per_step: int,
        samples_per_prompt: int,
        greedy_baseline: bool,
        max_staleness: int,
        weighs_turns: bool,
        cuts_sessions: bool,
        steps: int,
        max_dropped_share: float,
        dynamic_sampling: DynamicSampling | None,
    ) -> None:
        self._prompts = prompts
        self._producer = producer
        self._journal = journal
        self._sampling = sampling
        self._prompts_per_step = prompts_per_step
        self._samples_per_group = samples_per_prompt + greedy_baseline
        self._greedy_baseline = greedy_baseline
        self._max_staleness = max_staleness
        self._weighs_turns = weighs_turns
        self._cuts_sessions = cuts_sessions
        self._max_dropped_share = max_dropped_share
        self._dynamic_sampling = dynamic_sampling
        self._version = 0  # number of the last publish
        self._needed = steps * prompts_per_step  # groups still to be taken
        self._training = 0  # groups taken and not yet published
        self._issued = 0
        self._waiting: list[tuple[int, InFlight]] = []  # restored, by order: no room for them yet
        self._admission = asyncio.Lock()
        self._pending: dict[GroupId, PendingGroup] = {}
        self._ready: dict[GroupId, PendingGroup] = {}
        self._unjudged: list[PendingGroup] = []  # of those that are ready: not looked at by this `take` yet
        self._changed = asyncio.Event()
        self._failure: AtollError | None = None
        self.drops: dict[str, int] = {}  # kind of reason -> groups or samples, since the run began
        self._before = NO_COUNTS  # the restored groups are counted as issued in this life
        self._failed = 0  # groups dropped for an error, in this life
        self._num_dropped = self._num_retried = 0  # samples, since `take_metrics`
        self._metrics: Mapping[str, float] = {}

    async def take(self, step: int, count: int, current: Version) -> list[Group]:
        """Waits for `count` groups with no sample older than max_staleness at `current`; with `weighs_turns`,
        with one turn in each sample that is not.

        Groups that would be too stale at the next version are taken first and waited for; samples that are
        too stale anyway are generated again. Raises AtollError if too many groups were dropped, or left out
        by the filter.
        """
        last_chance = current.number - self._max_staleness
        self._unjudged, urgent = list(self._ready.values()), 0
        while True:
            urgent += await self._judge(current)
            if len(self._ready) >= count and (urgent >= count or not self._expects(last_chance)):
                break
            if self._dynamic_sampling and len(self._ready) < count:
                self._check_refill(self._dynamic_sampling)
            if self._cuts_sessions:
                self._producer.cut([g for g in self._pending.values() if g.oldest_number <= last_chance])
            self._changed.clear()
            await self._changed.wait()
            if self._failure:
                raise self._failure
        ready = sorted(
            self._ready.values(), key=lambda group: (group.oldest_number > last_chance, group.order)
        )
        chosen = ready[:count]
        for group in chosen:
            del self._ready[group.prompt.id]
        self._training += count
        self._needed -= count
        self._metrics = self._dynamic_sampling.take_metrics() if self._dynamic_sampling else {}
        chosen.sort(key=lambda group: group.order)
        await self._journal.consume(step, [id for group in chosen for id in group.ids()])
        return [group.group() for group in chosen]

    def oldest_trained(self, current: Version) -> int:
        return current.number - self._max_staleness if self._weighs_turns else 0

    @property
    def counters(self) -> Counters:
        """Zero after a limit has ended the run, since the user has fixed the cause before resuming."""
        if self._failure:
            return NO_COUNTS
        sampling = self._dynamic_sampling
        return Counters(
            issued=self._before.issued + self._issued,
            failed=self._before.failed + self._failed,
            kept=sampling.num_kept if sampling else 0,
            filtered=sampling.num_filtered if sampling else 0,
        )

    async def on_refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None:
        for _ in {sample.group for sample in samples}:
            self._count_failed(reason)
        await self._journal.drop(samples, reason, step)

    async def on_published(self, version: Version) -> None:
        self._version = version.number
        self._training = 0
        await self.admit()

    def take_metrics(self) -> Mapping[str, float]:
        """The filter's, and how many samples were dropped with their groups, or begun again."""
        metrics = {
            **self._metrics,
            "rollout/num_dropped": float(self._num_dropped),
            "rollout/num_retried": float(self._num_retried),
        }
        self._metrics, self._num_dropped, self._num_retried = {}, 0, 0
        return metrics

    async def admit(self) -> None:
        """Issues as many prompts as the bounds on staleness and on the store allow, restored groups first."""
        async with self._admission:  # draws are journaled in order
            live = len(self._pending) + len(self._ready)
            room = (self._max_staleness + 1) * self._prompts_per_step - self._training - live
            room = min(room, self._needed - live)
            if self._journal.full:
                room = min(room, self._prompts_per_step - live)
            if room <= 0:
                return
            waiting, self._waiting = self._waiting[:room], self._waiting[room:]
            loaded = await self._journal.load([entry for _, entry in waiting])
            groups = [
                self._restore_group(order, entry) for (order, _), entry in zip(waiting, loaded, strict=True)
            ] + await self._issue(room - len(waiting))
            self._pending |= {group.prompt.id: group for group in groups}
            self._producer.submit(groups, self)

    async def _issue(self, count: int) -> list[PendingGroup]:
        """The next prompts; the journal has them and the cursor behind them when it returns. In parts, since
        the store answers nobody else while it takes one."""
        groups: list[PendingGroup] = []
        part = max(1, MAX_ISSUED // self._samples_per_group)
        while len(groups) < count:
            issued = [
                self._group(prompt, self._issued + i, [None] * self._samples_per_group)
                for i, prompt in enumerate(self._prompts.draw(min(part, count - len(groups))))
            ]
            self._issued += len(issued)
            cursor = self._prompts.cursor.dump()
            await self._journal.issue([id for group in issued for id in group.ids()], cursor)
            groups += issued
        return groups

    def restore(self, restored: Sequence[InFlight], version: Version, counters: Counters = NO_COUNTS) -> None:
        """Restores groups that were in flight when the run stopped, in issue order and within the staleness
        bound: an old checkpoint's journal may hold groups of several steps.
        """
        self._version = version.number
        for entry in restored:
            if entry.num_samples != self._samples_per_group:
                raise UserError(
                    f"group {entry.id} was in flight with {entry.num_samples} samples, the config asks for "
                    f"{self._samples_per_group}: keep coordinator.samples_per_prompt and greedy_baseline "
                    "when resuming"
                )
        self._issued = len(restored)
        self._before = replace(counters, issued=max(counters.issued - len(restored), 0))
        if self._dynamic_sampling:
            self._dynamic_sampling.num_kept = counters.kept
            self._dynamic_sampling.num_filtered = counters.filtered
        self._waiting = list(enumerate(restored))

    def _restore_group(self, order: int, entry: RestoredGroup) -> PendingGroup:
        group = self._group(self._prompts.prompt(entry.id), order, list(entry.samples))
        group.attempts = list(entry.attempts)
        return group

    def _group(self, prompt: Prompt, order: int, samples: list[Trajectory | None]) -> PendingGroup:
        return PendingGroup(
            prompt,
            order,
            self._sampling,
            samples,
            self._version,
            has_baseline=self._greedy_baseline,
            weighs_turns=self._weighs_turns,
        )

    def _expects(self, last_chance: int) -> bool:
        """Whether a group that would be too old at the next version is not ready yet."""
        return any(group.oldest_number <= last_chance for group in self._pending.values())

    async def _judge(self, current: Version) -> int:
        """Regenerates stale samples of newly ready groups. Returns how many of the others would be too stale
        at the next version.
        """
        urgent = 0
        while self._unjudged:
            group = self._unjudged.pop()
            stale = group.stale_indices(current, self._max_staleness)
            if not stale:
                urgent += group.oldest_number <= current.number - self._max_staleness
                continue
            group.begin_next_attempt(stale)
            for index in stale:
                group.oldest[index] = current.number
            del self._ready[group.prompt.id]
            self._pending[group.prompt.id] = group
            await self.on_retried([SampleId(group.prompt.id, index) for index in stale], "stale")
            self._producer.submit([group], self)
        return urgent

    # What the producer reports

    async def on_finished(self, samples: Sequence[Trajectory], payload: bytes) -> None:
        accepted = {sample.id for sample in await self._journal.finish(samples, payload)}
        for sample in samples:
            if sample.id not in accepted and (group := self._pending.get(sample.id.group)):
                group.forget(sample)  # of an attempt that may not win any more

    async def on_retried(self, samples: Sequence[SampleId], reason: str) -> None:
        self._count(reason, len(samples))
        self._num_retried += len(samples)
        await self._journal.retry(samples, reason)

    async def on_session(self, session: OpenSession) -> bool:
        goes_on = bool(await self._journal.open([session]))
        self._changed.set()  # what is about to be too old may be cut now
        return goes_on

    async def on_completed(self, group: PendingGroup) -> None:
        keep = await self._is_accepted(group.group())
        del self._pending[group.prompt.id]
        if keep:
            self._ready[group.prompt.id] = group
            self._unjudged.append(group)
        else:
            self._count("filtered", 1)
            await self._journal.drop(group.ids(), "filtered")
            await self.admit()
        self._changed.set()

    async def on_dropped(self, group: PendingGroup, reason: str) -> None:
        del self._pending[group.prompt.id]
        self._count_failed(reason)
        self._num_dropped += len(group.ids())
        await self._journal.drop(group.ids(), reason)
        await self.admit()
        self._changed.set()

    async def _is_accepted(self, group: Group) -> bool:
        sampling = self._dynamic_sampling
        if sampling is None:
            return True
        if sampling.is_users_own:  # it may take its time
            keep = await asyncio.to_thread(sampling.accepts, group)
        else:
            keep = sampling.accepts(group)
        sampling.count(keep)
        return keep

    def _check_refill(self, sampling: DynamicSampling) -> None:
        try:
            sampling.check()
        except AtollError as error:
            self._failure = error
            raise

    def _count_failed(self, reason: str) -> None:
        self._count(reason, 1)
        self._failed += 1
        counters = self.counters
        judged = max(counters.issued, MIN_JUDGED * self._prompts_per_step)
        if counters.failed > self._max_dropped_share * judged:
            self._failure = AtollError(
                f"{counters.failed} of {counters.issued} groups were dropped, more than "
                f"coordinator.max_dropped_share = {self._max_dropped_share:g} allows; the last: {reason}; "
                "fix the cause or raise the limit, then continue with --resume"
            )

    def _count(self, reason: str, number: int) -> None:
        kind = reason.split(": ")[0]
        self.drops[kind] = self.drops.get(kind, 0) + number


class ReplaySource:
    """The batches of a dump folder, in the order in which they were consumed."""

    counters = NO_COUNTS

    def __init__(self, files: Sequence[Path]) -> None:
        """One file per remaining step."""
        self._next = iter(files)

    async def take(self, step: int, count: int, current: Version) -> list[Group]:
        _, groups = await asyncio.to_thread(read_dump, next(self._next))
        return groups

    def oldest_trained(self, current: Version) -> int:
        return 0

    async def on_refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None: ...

    async def on_published(self, version: Version) -> None: ...

    def take_metrics(self) -> Mapping[str, float]:
        return {}
