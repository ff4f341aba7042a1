"""The models of a run: where they begin, their updates, and which of them leave the device in between."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from services.config.schema import Role, RoleSection, TrainerSection
from services.coordinator.metrics import mean_of
from services.coordinator.schedule import learning_rate
from services.runtime.telemetry import StepTimer
from services.wire.types import Batch, Float32, Segments, StepKey, Written


class Model(Protocol):
    """What the loop asks of a trainer service; `TrainerClient` is one."""

    async def compute_logprobs(self, segments: Segments, temperature: float | None = None) -> Float32: ...
    async def compute_values(self, segments: Segments) -> Float32: ...
    async def forward_backward(self, key: StepKey, batch: Batch) -> Mapping[str, float]: ...
    async def optim_step(self, key: StepKey, learning_rate: float) -> Mapping[str, float]: ...
    async def save_checkpoint(self, path: Path) -> None: ...
    async def wait_checkpoint(self, path: Path) -> Written: ...
    async def export_hf(self, path: Path) -> int: ...
    async def load_hf(self, path: Path) -> None: ...
    async def offload(self) -> int: ...


Models = Mapping[str, Model]  # by role


class Learners:
    def __init__(
        self,
        models: Models,
        sections: Mapping[Role, RoleSection],
        *,
        num_steps: int,
        num_epochs: int,
        critic_warmup: int = 0,
        followers: frozenset[Role] = frozenset(),
    ) -> None:
        """`sections`: of each model. `critic_warmup`: steps in which the actor waits for its critic.
        `followers`: roles that begin where a warm-up leaves the actor."""
        self._models = models
        self._sections = sections
        self._num_steps = num_steps
        self._num_epochs = num_epochs
        self._critic_warmup = critic_warmup
        self._followers = followers

    @property
    def trained(self) -> Mapping[Role, Model]:
        """Those that learn; none in rollout_only."""
        return {
            role: self._models[role]
            for role, section in self._sections.items()
            if isinstance(section, TrainerSection)
        }

    def updates_actor(self, step: int) -> bool:
        return step > self._critic_warmup

    async def update(
        self, step: int, lineage: str, batches: Mapping[Role, Sequence[Batch]], timer: StepTimer
    ) -> dict[str, float]:
        """Every model that trains, all at once; the actor waits while its critic warms up."""
        roles = [role for role in batches if role != "actor" or self.updates_actor(step)]
        rows = await asyncio.gather(
            *(self._update(role, step, lineage, batches[role], timer) for role in roles)
        )
        return {name: value for row in rows for name, value in row.items()}

    async def _update(
        self, role: Role, step: int, lineage: str, batches: Sequence[Batch], timer: StepTimer
    ) -> dict[str, float]:
        """One optimizer step per minibatch and epoch."""
        model, section = self._models[role], self._sections[role]
        assert isinstance(section, TrainerSection)
        rate = learning_rate(section.optimizer, step, self._num_steps)
        rows: list[Mapping[str, float]] = []
        with timer.phase(f"update_{role}"):
            for number, batch in enumerate(list(batches) * self._num_epochs):
                key = StepKey(lineage, step, number, role)
                row = dict(await model.forward_backward(key, batch))
                rows.append(row | dict(await model.optim_step(key, rate)))
            if role != "actor":  # which is published next
                await self.offload(role)
        return mean_of(rows)

    async def offload(self, *roles: str) -> None:
        """Models whose part of the step is over make room for others, if their `offload` is set."""
        chosen = [
            self._models[role]
            for role, section in self._sections.items()
            if role in roles and section.offload
        ]
        await asyncio.gather(*(model.offload() for model in chosen))

    async def begin_at(self, warm: Path, *, resumed: bool) -> None:
        """Reference and critics without a path of their own begin with the policy that a warm-up left.

        In a resumed run only the reference: critics come from their checkpoint.
        """
        roles = self._followers & ({"reference"} if resumed else self._models.keys())
        await asyncio.gather(*(self._models[role].load_hf(warm) for role in roles))
