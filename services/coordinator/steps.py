"""Sources of training batches, behind one protocol: groups of samples here, supervised rows in
supervised.py.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from atoll.coordinator.algorithm.algorithm import AlgorithmState, PreparedStep
from atoll.coordinator.algorithm.filters import Counters
from atoll.coordinator.algorithm.metrics import ReasonShares, step_metrics
from atoll.coordinator.algorithm.models import BatchRefusedError
from atoll.coordinator.background import BackgroundWork
from atoll.coordinator.control import RunControl
from atoll.coordinator.data.datasets import Cursor
from atoll.coordinator.rollouts.group_sources import GroupSource
from atoll.runtime.dump import DumpFolder
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import Group, SampleId, Version

log = logging.getLogger(__name__)

Meter = Callable[[], Mapping[str, float]]  # metrics since the last call


class StepSource(Protocol):
    higher_is_better: bool  # of two values of the metric that validation.best names

    @property
    def cursor(self) -> Cursor | None:
        """The data cursor; None if nothing is drawn, or if the journal keeps it."""
        ...

    @property
    def state(self) -> AlgorithmState:
        """State carried from step to step."""
        ...

    @property
    def counters(self) -> Counters:
        """Counts for the limits on dropped and filtered groups."""
        ...

    async def prepare(self, step: int, version: Version, timer: StepTimer) -> PreparedStep | None:
        """The batches of `step`, at `version`; None if the run is stopped first."""
        ...

    async def on_refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None:
        """`step` does not train on these samples: the trainer refused them."""
        ...

    async def on_published(self, version: Version) -> None:
        """The step prepared last is trained on, and `version` is live."""
        ...

    async def validate(self, step: int, version: Version) -> Mapping[str, float]:
        """After `step`, at `version`."""
        ...


class Recipe(Protocol):
    """Turns scored groups into batches; implemented by `Algorithm`."""

    state: AlgorithmState

    async def prepare(self, groups: Sequence[Group], timer: StepTimer, oldest: int) -> PreparedStep: ...


class NoRecipe:
    """For rollout_only: nothing is trained."""

    state = AlgorithmState()

    async def prepare(self, groups: Sequence[Group], timer: StepTimer, oldest: int) -> PreparedStep:
        return PreparedStep({}, {})


class GroupSteps:
    """Scored groups, generated now or replayed, become batches by a recipe."""

    higher_is_better = True
    cursor: Cursor | None = None  # it moves with the journal, which has every sample of a group

    def __init__(
        self,
        source: GroupSource,
        recipe: Recipe,
        control: RunControl,
        background: BackgroundWork,
        *,
        prompts_per_step: int,
        dumps: DumpFolder,
        meters: Sequence[Meter],
        evaluate: Callable[[int, Version], Awaitable[Mapping[str, float]]],
        release: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`background`: what the source's groups come from. `dumps` gets what is consumed. `meters` are read
        once a step. `evaluate` validates after a step, at a version. `release` has replicas give
        their devices to the models, if they take turns.
        """
        self._source = source
        self._recipe = recipe
        self._control = control
        self._background = background
        self._prompts_per_step = prompts_per_step
        self._dumps = dumps
        self._meters = [source.take_metrics, *meters]
        self._evaluate = evaluate
        self._release = release
        self._reasons = ReasonShares()

    @property
    def state(self) -> AlgorithmState:
        return self._recipe.state

    @property
    def counters(self) -> Counters:
        return self._source.counters

    async def prepare(self, step: int, version: Version, timer: StepTimer) -> PreparedStep | None:
        """Consumes prompts_per_step groups; waits for the source; unblocked by finished generation."""
        with timer.phase("gen"):
            take = self._source.take(step, self._prompts_per_step, version)
            groups = await self._control.run_unless_stopped(self._background.wait_for(take))
        if groups is None:
            return None
        writing = asyncio.create_task(self._dumps.write_batch(step, version, groups))
        try:
            return await self._prepare(step, version, groups, timer)
        finally:
            await writing  # before the step can be committed

    async def _prepare(
        self, step: int, version: Version, groups: Sequence[Group], timer: StepTimer
    ) -> PreparedStep:
        oldest = self._source.oldest_trained(version)
        metrics = step_metrics(groups, version, oldest) | self._reasons.measure(groups)
        for meter in self._meters:
            metrics |= meter()
        if self._release:
            await self._release()
        try:
            prepared = await self._recipe.prepare(groups, timer, oldest)
        except BatchRefusedError as error:
            log.warning("step %d: the batch is refused: %s", step, error)
            prepared = PreparedStep({}, {"training/num_refused": 1.0}, refusal=str(error))
            await self.on_refused(step, [id for group in groups for id in group.ids()], str(error))
        return replace(prepared, metrics={**metrics, **prepared.metrics})

    async def on_refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None:
        await self._source.on_refused(step, samples, f"refused by the trainer: {reason}")

    async def on_published(self, version: Version) -> None:
        await self._source.on_published(version)

    async def validate(self, step: int, version: Version) -> Mapping[str, float]:
        return await self._evaluate(step, version)
