"""What a step trains on, behind one protocol: groups of samples here, rows with answers in supervised.py."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from atoll.coordinator.algorithm.algorithm import AlgorithmState, Prepared
from atoll.coordinator.algorithm.filters import Counters
from atoll.coordinator.algorithm.metrics import Reasons, step_metrics
from atoll.coordinator.algorithm.models import BatchRefusedError
from atoll.coordinator.beside import Beside
from atoll.coordinator.control import Control
from atoll.coordinator.data.datasets import Cursor
from atoll.coordinator.journal.dump import write_dump
from atoll.coordinator.rollouts.source import Source
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import Group, SampleId, Version

log = logging.getLogger(__name__)

Meter = Callable[[], Mapping[str, float]]  # what was counted since its last call


class StepSource(Protocol):
    higher_is_better: bool  # of two values of the metric that validation.best names

    @property
    def cursor(self) -> Cursor | None:
        """How far the run's data is drawn; None: nothing is drawn, or the journal has it."""
        ...

    @property
    def state(self) -> AlgorithmState:
        """What is carried from step to step."""
        ...

    @property
    def counters(self) -> Counters:
        """Of what the limits on dropped and filtered groups are judged by."""
        ...

    async def prepare(self, step: int, version: Version, timer: StepTimer) -> Prepared | None:
        """What `step` trains on, at `version`; None if the run is to stop before that is there."""
        ...

    async def refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None:
        """`step` does not train on these samples: the trainer does not take them."""
        ...

    async def published(self, version: Version) -> None:
        """The step prepared last is trained on, and `version` is live."""
        ...

    async def validate(self, version: Version) -> Mapping[str, float]: ...


class Recipe(Protocol):
    """From scored groups to batches; `Algorithm` is one."""

    state: AlgorithmState

    async def prepare(self, groups: Sequence[Group], timer: StepTimer) -> Prepared: ...


class NoRecipe:
    """In rollout_only: nothing is trained."""

    state = AlgorithmState()

    async def prepare(self, groups: Sequence[Group], timer: StepTimer) -> Prepared:
        return Prepared({}, {})


class GroupSteps:
    """Scored groups, generated now or replayed, become batches by a recipe."""

    higher_is_better = True
    cursor: Cursor | None = None  # it moves with the journal, which has every sample of a group

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        control: Control,
        beside: Beside,
        *,
        prompts_per_step: int,
        dumps: Path | None,
        meters: Sequence[Meter],
        evaluate: Callable[[Version], Awaitable[Mapping[str, float]]],
    ) -> None:
        """`beside`: what the source's groups come from. `dumps`: the folder for consumed groups; None: they
        are not kept. `meters` are read once a step."""
        self._source = source
        self._recipe = recipe
        self._control = control
        self._beside = beside
        self._prompts_per_step = prompts_per_step
        self._dumps = dumps
        self._meters = [source.take_metrics, *meters]
        self._evaluate = evaluate
        self._reasons = Reasons()

    @property
    def state(self) -> AlgorithmState:
        return self._recipe.state

    @property
    def counters(self) -> Counters:
        return self._source.counters

    async def prepare(self, step: int, version: Version, timer: StepTimer) -> Prepared | None:
        """Consumes prompts_per_step groups; waits for the source; unblocked by finished generation."""
        with timer.phase("gen"):
            take = self._source.take(step, self._prompts_per_step, version)
            groups = await self._control.unless_stopped(self._beside.wait_for(take))
        if groups is None:
            return None
        if self._dumps:
            await asyncio.to_thread(write_dump, self._dumps, step, version, groups)
        metrics = step_metrics(groups, version) | self._reasons.shares(groups)
        for meter in self._meters:
            metrics |= meter()
        try:
            prepared = await self._recipe.prepare(groups, timer)
        except BatchRefusedError as error:
            log.warning("step %d: the batch is refused: %s", step, error)
            prepared = Prepared({}, {"training/num_refused": 1.0}, refusal=str(error))
            await self.refused(step, [id for group in groups for id in group.ids()], str(error))
        return replace(prepared, metrics={**metrics, **prepared.metrics})

    async def refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None:
        await self._source.refused(step, samples, f"refused by the trainer: {reason}")

    async def published(self, version: Version) -> None:
        await self._source.published(version)

    async def validate(self, version: Version) -> Mapping[str, float]:
        return await self._evaluate(version)
