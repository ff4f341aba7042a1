"""The warm-up: supervised steps before the first rollout."""

import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from atoll.config.schema import WarmupSection
from atoll.coordinator.algorithm.experience import lay_out_supervised
from atoll.coordinator.algorithm.models import ModelClient
from atoll.coordinator.control import RunControl, RunState
from atoll.coordinator.data.datasets import SupervisedSource
from atoll.wire.types import StepKey, SupervisedBatch, Version


@dataclass(frozen=True, slots=True)
class WarmUpResult:
    """The policy after the warm-up."""

    version: Version
    metrics: Mapping[str, float]
    is_complete: bool = True  # not stopped half-way


class WarmUp(Protocol):
    async def run(self, version: Version) -> WarmUpResult:
        """Starts at `version`, which no replica has yet."""
        ...


class NoWarmUp:
    async def run(self, version: Version) -> WarmUpResult:
        return WarmUpResult(version, {})


class SupervisedWarmUp:
    """With the same step code as training, every learned token with equal weight."""

    def __init__(
        self,
        section: WarmupSection,
        rows: SupervisedSource,
        actor: ModelClient,
        control: RunControl,
        score: Callable[[Version], Awaitable[float]],
        export: Path | None,
    ) -> None:
        """`score` publishes the policy as a version and returns its mean reward. `export`: where the policy
        is left for models that begin with it."""
        self._section = section
        self._rows = rows
        self._actor = actor
        self._control = control
        self._score = score
        self._export = export

    async def run(self, version: Version) -> WarmUpResult:
        section = self._section
        await self._control.report(state=RunState.WARMING_UP)
        metrics: dict[str, float] = {}
        looked_at = 0  # the step that replicas were last given
        for number in range(1, section.steps + 1):
            metrics |= await self._step(version.lineage, number)
            reached = False
            if section.target_reward is not None and number % section.check_every == 0:
                version, looked_at = replace(version, number=version.number + 1), number
                metrics["warmup/score/mean"] = await self._score(version)
                reached = metrics["warmup/score/mean"] >= section.target_reward
            await self._control.report(step=number, num_steps=section.steps, metrics=metrics)
            if reached or self._control.stopping:
                break
        is_complete = reached or number == section.steps
        if 0 < looked_at < metrics["warmup/steps"]:  # a version is one state of the weights
            version = replace(version, number=version.number + 1)
        if self._export:
            shutil.rmtree(self._export, ignore_errors=True)  # left by an earlier, interrupted start
            await self._actor.export_hf(self._export)
        warm = {name: value for name, value in metrics.items() if name.startswith("warmup/")}
        return WarmUpResult(version, warm, is_complete)

    async def _step(self, lineage: str, number: int) -> dict[str, float]:
        batch = SupervisedBatch(*lay_out_supervised(self._rows.draw(self._section.rows_per_step)))
        # warm-up steps count up to 0, so that their keys differ from those of training
        key = StepKey(lineage, number - self._section.steps, 0, "actor")
        metrics = dict(await self._actor.forward_backward(key, batch))
        await self._actor.optim_step(key, self._section.learning_rate)
        return metrics | {"warmup/steps": float(number)}
