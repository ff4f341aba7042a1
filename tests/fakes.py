"""A run of the real loop on a trainer that only counts, and on batches that are there from the start."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atoll.coordinator.algorithm.algorithm import Algorithm
from atoll.coordinator.algorithm.filters import NO_COUNTS
from atoll.coordinator.background import BackgroundWork
from atoll.coordinator.control import RunControl
from atoll.coordinator.journal.checkpoints import Checkpoints
from atoll.coordinator.learners import Learners
from atoll.coordinator.loop import Loop, LoopParts, LoopSettings, LoopStart
from atoll.coordinator.steps import GroupSteps, NoRecipe, StepSource
from atoll.coordinator.warmup import NoWarmUp, WarmUp
from atoll.runtime.dump import DumpFolder
from atoll.runtime.errors import UserError
from atoll.runtime.telemetry import MetricsFile
from atoll.wire.types import Batch, CheckpointWrite, Group, SampleId, Segments, StepKey, Version
from tests.builders import group, node, run_config, sample, sample_id

Event = tuple[Any, ...]
ACTOR_METRICS = {"actor/pg_loss": 0.5, "actor/ppo_kl": 0.0, "actor/entropy": 1.0}


class FakeTrainer:
    """A model whose weights are the keys of the steps that it took."""

    def __init__(self, events: list[Event], role: str = "actor") -> None:
        self.role = role
        self.weights: list[StepKey] = []
        self.batches: dict[StepKey, Batch] = {}
        self.metrics: Callable[[StepKey], Mapping[str, float]] = lambda key: ACTOR_METRICS
        self.refuses: Callable[[StepKey], str] = lambda key: ""  # why
        self.logprob: Callable[[], float] = lambda: -1.0  # of every token
        self._events = events

    async def forward_backward(self, key: StepKey, batch: Batch) -> Mapping[str, float]:
        assert key not in self.batches, f"{key} names another batch already"
        self.batches[key] = batch
        if reason := self.refuses(key):
            raise UserError(reason)
        return self.metrics(key)

    async def optim_step(self, key: StepKey, learning_rate: float) -> Mapping[str, float]:
        self.weights.append(key)
        self._events.append(("update", self.role, key.step))
        return {}

    async def compute_logprobs(self, segments: Segments, temperature: float | None = None) -> np.ndarray:
        return np.full(len(segments.token_ids), self.logprob(), np.float32)

    async def compute_values(self, segments: Segments) -> np.ndarray:
        return np.zeros(len(segments.token_ids), np.float32)

    async def save_checkpoint(self, path: Path) -> None:
        self._events.append(("save", self.role, len(self.weights)))
        self._write(path)

    async def wait_checkpoint(self, path: Path) -> CheckpointWrite:
        return CheckpointWrite(seconds=1.0, num_bytes=1)

    async def export_hf(self, path: Path) -> int:
        self._events.append(("export", self.role))
        self._write(path)
        return 1

    async def load_hf(self, path: Path) -> None:
        self._events.append(("load", self.role))

    def _write(self, path: Path) -> None:
        path.mkdir(parents=True)
        (path / "weights.json").write_text(json.dumps([key.step for key in self.weights]))

    async def offload(self, *, keep_parameters: bool = False) -> int:
        self._events.append(("offload", self.role))
        return 1


class ListSource:
    """Hands out the batches of a list, the first of them to step `first`; then it has none, and waits."""

    counters = NO_COUNTS

    def __init__(self, batches: Sequence[Sequence[Group]], first: int = 1) -> None:
        self._batches = batches
        self._first = first
        self.published_versions: list[int] = []
        self.refusals: list[tuple[int, list[str], str]] = []

    async def take(self, step: int, count: int, current: Version) -> list[Group]:
        if step - self._first == len(self._batches):
            await asyncio.Event().wait()
        return list(self._batches[step - self._first])

    def oldest_trained(self, current: Version) -> int:
        return 0

    async def on_refused(self, step: int, samples: Sequence[SampleId], reason: str) -> None:
        self.refusals.append((step, [str(id) for id in samples], reason))

    async def on_published(self, version: Version) -> None:
        self.published_versions.append(version.number)

    def take_metrics(self) -> Mapping[str, float]:
        return {}


class FakeSnapshot:
    async def write(self, path: Path) -> None:
        await asyncio.to_thread(path.touch)


class FakeJournal:
    """Remembers which steps a checkpoint covers."""

    full = False

    def __init__(self) -> None:
        self.committed: list[int] = []

    async def snapshot(self, step: int) -> FakeSnapshot:
        return FakeSnapshot()

    async def commit(self, step: int) -> None:
        self.committed.append(step)


def batch(step: int, scores: Sequence[float] = (0.0, 1.0)) -> list[Group]:
    """One group, of one response token per sample."""
    samples = [sample(sample_id(step, index), node([3]), score=score) for index, score in enumerate(scores)]
    return [group(*samples)]


@dataclass
class FakeRun:
    """One life of a run's loop. `sections` are those of its config; `events` what happened, in order."""

    folder: Path
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    source: Any = None  # by default, batches with a score of 0.5 on average
    steps: StepSource | None = None  # by default, of the source's groups
    models: tuple[str, ...] = ("actor",)
    warmup: WarmUp = field(default_factory=NoWarmUp)
    clock: Callable[[], float] = lambda: 0.0
    validations: Sequence[float] = ()  # what each validation gives, as val/sums/avg@1

    def __post_init__(self) -> None:
        defaults: dict[str, dict[str, Any]] = {
            "run": {"name": "toy", "dir": self.folder, "steps": 3},
            "checkpoint": {"at_end": False, "every_minutes": 0},
            "reward": {"graders": [{"name": "exact_match"}]},
        }
        changed = {name: defaults.get(name, {}) | dict(keys) for name, keys in self.sections.items()}
        self.config = run_config(**(defaults | changed))
        self.config.folder.mkdir(exist_ok=True, parents=True)
        self.events: list[Event] = []
        self.trainers = {role: FakeTrainer(self.events, role) for role in self.models}
        self.control = RunControl(trains=bool(self.models))
        self.journal = FakeJournal()
        self.checkpoints = Checkpoints(self.config.folder / "checkpoints", self.config.checkpoint.keep)
        self.source = self.source or ListSource([batch(step) for step in range(1, self.config.run.steps + 1)])

    async def push(self, version: Version) -> Mapping[str, float]:
        self.events.append(("push", version.number))
        return {}

    async def background(self) -> None:
        """What generates: nothing here, for ever."""
        await asyncio.Event().wait()

    async def validate(self, step: int, version: Version) -> Mapping[str, float]:
        done = sum(event[0] == "validate" for event in self.events)
        self.events.append(("validate", version.number))
        return {"val/sums/avg@1": self.validations[done]}

    def group_steps(self) -> GroupSteps:
        return GroupSteps(
            self.source,
            Algorithm(self.config, self.trainers, None) if self.trainers else NoRecipe(),
            self.control,
            BackgroundWork(self.background()),
            prompts_per_step=1,
            dumps=DumpFolder(self.config.folder / "dumps", self.config.coordinator.dump),
            meters=[],
            evaluate=self.validate,
        )

    def loop(self, step: int = 0, **start: Any) -> Loop:
        """After `step`: if that is not 0, from its checkpoint."""
        config = self.config
        parts = LoopParts(
            steps=self.steps or self.group_steps(),
            learners=Learners(
                self.trainers,
                {role: section for role, section in config.roles.items() if role in self.trainers},
                num_steps=config.run.steps,
                num_epochs=config.algorithm.num_epochs,
                critic_warmup=config.critic.warmup_steps if config.critic else 0,
                started_from_warmup=config.started_from_warmup,
                one_at_a_time=config.takes_turns,
            ),
            push=self.push,
            warmup=self.warmup,
            control=self.control,
            metrics=MetricsFile(config.folder / "metrics.jsonl", step or None),
            journal=self.journal,  # type: ignore[arg-type]
            checkpoints=self.checkpoints,
        )
        settings = LoopSettings(
            config.run, config.validation, config.checkpoint, config.guards, config.reward.graders
        )
        begin = LoopStart(Version("a3f0", step), **{"step": step, "resumed": step > 0, **start})
        return Loop(settings, parts, begin, self.clock)

    async def run(self, step: int = 0, **start: Any) -> None:
        await self.loop(step, **start).run()

    def rows(self) -> list[dict[str, Any]]:
        """What metrics.jsonl has."""
        lines = (self.config.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.config.folder / "summary.json").read_text()))
