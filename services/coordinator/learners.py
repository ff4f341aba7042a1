"""The models of a run: initial weights, updates, and offloading."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.config.schema import Role, RoleSection, TrainerSection
from atoll.coordinator.algorithm.metrics import average_metrics
from atoll.coordinator.algorithm.models import ModelClient, Models
from atoll.coordinator.algorithm.schedule import learning_rate
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import Batch, StepKey

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of updating on a step's batches."""

    metrics: Mapping[str, float]
    trained: frozenset[Role]  # who learned something
    refused: Mapping[int, str]  # minibatches that no model trained on, with reasons


@dataclass(frozen=True, slots=True)
class _RoleUpdate:
    """The result of updating one model."""

    metrics: Mapping[str, float]
    trained: frozenset[int]  # minibatches
    refused: Mapping[int, str]  # minibatches refused at least once


class Learners:
    def __init__(
        self,
        models: Models,
        sections: Mapping[Role, RoleSection],
        *,
        num_steps: int,
        num_epochs: int,
        critic_warmup: int = 0,
        started_from_warmup: frozenset[Role] = frozenset(),
        one_at_a_time: bool = False,
    ) -> None:
        """`sections`: of each model. `critic_warmup`: steps in which the actor waits for its critic.
        `started_from_warmup`: roles that begin where a warm-up leaves the actor. `one_at_a_time`: no two
        models are updated at once, and the actor last, since it is published next."""
        self._models = models
        self._sections = sections
        self._num_steps = num_steps
        self._num_epochs = num_epochs
        self._critic_warmup = critic_warmup
        self._started_from_warmup = started_from_warmup
        self._one_at_a_time = one_at_a_time

    @property
    def trained(self) -> Mapping[Role, ModelClient]:
        """Trained models; none in rollout_only."""
        return {
            role: self._models[role]
            for role, section in self._sections.items()
            if isinstance(section, TrainerSection)
        }

    async def update(
        self, step: int, lineage: str, batches: Mapping[Role, Sequence[Batch]], timer: StepTimer
    ) -> UpdateResult:
        """Updates all trained models, concurrently unless `one_at_a_time`; the actor waits during critic
        warm-up.

        A model skips minibatches that it refuses.
        """
        roles = [role for role in batches if role != "actor" or step > self._critic_warmup]
        if self._one_at_a_time:
            roles.sort(key=lambda role: role == "actor")
            updates = [await self._update(role, step, lineage, batches[role], timer) for role in roles]
        else:
            updates = await asyncio.gather(
                *(self._update(role, step, lineage, batches[role], timer) for role in roles)
            )
        metrics = {name: value for update in updates for name, value in update.metrics.items()}
        refused = {number: reason for update in updates for number, reason in update.refused.items()}
        return UpdateResult(
            metrics | {"training/num_refused": float(len(refused))},
            frozenset(role for role, update in zip(roles, updates, strict=True) if update.trained),
            {
                number: reason
                for number, reason in refused.items()
                if not any(number in update.trained for update in updates)
            },
        )

    async def _update(
        self, role: Role, step: int, lineage: str, batches: Sequence[Batch], timer: StepTimer
    ) -> _RoleUpdate:
        """One optimizer step per minibatch and epoch."""
        model, section = self._models[role], self._sections[role]
        assert isinstance(section, TrainerSection)
        rate = learning_rate(section.optimizer, step, self._num_steps)
        rows: list[Mapping[str, float]] = []
        trained, refused = set[int](), dict[int, str]()
        with timer.phase(f"update_{role}"):
            for number in range(len(batches) * self._num_epochs):
                minibatch = number % len(batches)
                if minibatch in refused:
                    continue
                key = StepKey(lineage, step, number, role)
                try:
                    row = dict(await model.forward_backward(key, batches[minibatch]))
                except UserError as error:  # raised before any gradient is accumulated
                    log.warning("step %d: the %s refuses minibatch %d: %s", step, role, minibatch, error)
                    refused[minibatch] = f"{role}: {error}"
                    continue
                rows.append(row | dict(await model.optim_step(key, rate)))
                trained.add(minibatch)
            if role != "actor":  # which is published next
                await self.offload(role)
        return _RoleUpdate(average_metrics(rows), frozenset(trained), refused)

    async def offload(self, *roles: str) -> None:
        """Offloads idle models whose `offload` is set."""
        chosen = [
            self._models[role]
            for role, section in self._sections.items()
            if role in roles and section.offload
        ]
        await asyncio.gather(*(model.offload() for model in chosen))

    async def begin_at(self, warm: Path, *, resumed: bool) -> None:
        """Initializes reference and critics without their own path from the warmed-up policy.

        In a resumed run only the reference: critics come from their checkpoint.
        """
        roles = self._started_from_warmup & ({"reference"} if resumed else self._models.keys())
        await asyncio.gather(*(self._models[role].load_hf(warm) for role in roles))
