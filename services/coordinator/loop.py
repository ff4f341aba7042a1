"""The one loop: take finished groups, prepare experience, update, publish, for every max_staleness.

What differs between synchronous, one-step-off and asynchronous training is how far the source may
run ahead (coordinator.max_staleness) and whether a push interrupts sequences (partial_rollouts).
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from services.config.schema import Role, RunConfig, TrainerSection
from services.coordinator.algorithm import Algorithm, Models, Prepared
from services.coordinator.checkpoints import Best, Checkpoints, CoordinatorState
from services.coordinator.control import Control, State
from services.coordinator.data import PromptSource, SupervisedSource
from services.coordinator.dump import write_dump
from services.coordinator.experience import supervised
from services.coordinator.generation import Generation
from services.coordinator.guards import Limits, trip
from services.coordinator.journal import Journal
from services.coordinator.metrics import Reasons, mean_of, step_metrics
from services.coordinator.rewards import Rewards
from services.coordinator.schedule import learning_rate
from services.coordinator.source import Source
from services.coordinator.supervised import Supervised
from services.coordinator.sync import WeightSync
from services.coordinator.validation import ValidationSet, evaluate
from services.runtime.errors import AtollError
from services.runtime.telemetry import MetricsFile, StepTimer
from services.wire.types import Batch, Sampling, StepKey, SupervisedBatch, Version

log = logging.getLogger(__name__)

WARM = "warm"  # folder in the run's: the policy after the warm-up, where reference and critics begin


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of; a mode leaves out what it does not need."""

    source: Source | None  # not in supervised
    control: Control
    metrics: MetricsFile
    journal: Journal
    checkpoints: Checkpoints
    prompts: PromptSource | SupervisedSource | None  # whose cursor a checkpoint has; not in a replay
    rewards: Rewards
    generation: Generation
    sync: WeightSync | None  # in train only
    models: Models  # none in rollout_only
    algorithm: Algorithm | None  # not in rollout_only
    warmup: SupervisedSource | None
    supervised: Supervised | None  # in that mode only
    validation_sets: tuple[ValidationSet, ...]
    sampling: Sampling  # of training


class Loop:
    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        version: Version,
        step: int,
        best: Best | None,
        rows: Sequence[Mapping[str, float]],
        resumed: bool,
    ) -> None:
        """`rows`: metrics of the steps up to `step`."""
        self._config = config
        self._parts = parts
        self._version = version
        self._step = step  # the last finished one
        self._best = best
        self._resumed = resumed  # from a checkpoint; that of step 0 is one
        self._scores = [row["critic/score/mean"] for row in rows if "critic/score/mean" in row]
        self._rows = list(rows)
        self._reasons = Reasons()
        self._begun = time.time()

    async def run(self) -> None:
        """Runs to the last step, the target reward, or a request to stop; then writes summary.json."""
        try:
            await self._run()
        finally:
            await self._parts.checkpoints.abandon()  # where the run failed meanwhile
            self._parts.control.checkpoint_abandoned()

    async def _run(self) -> None:
        parts, config = self._parts, self._config
        start = {} if self._resumed else await self._warm_up()
        await self._begin_alike()
        await self._publish()
        await parts.control.report(state=State.TRAINING, step=self._step, num_steps=config.run.steps)
        if not self._resumed:
            if config.validation.at_start:
                start |= await self._validate()
            await self._record(start)
            if config.checkpoint.every:
                await self._checkpoint()
        while not self._ends():
            await parts.control.gate()
            await self._one_step()
        await parts.checkpoints.finish()
        if config.checkpoint.at_end and self._step not in parts.checkpoints.steps():
            await self._checkpoint()  # stopped between two steps
            await parts.checkpoints.finish()
        self._summarise()
        await parts.control.report(state=State.FINISHED)

    async def _one_step(self) -> None:
        """Consumes one step's batches; what they wait for, `_prepare` says."""
        step, timer = self._step + 1, StepTimer()
        with timer.phase("step"):
            prepared = await self._prepare(step, timer)
            if prepared is None:
                return
            metrics = dict(prepared.metrics)
            if prepared.batches:
                metrics |= await self._update(step, prepared.batches, timer)
            self._step = step
            if "critic/score/mean" in metrics:
                self._scores.append(metrics["critic/score/mean"])
            await self._guard(metrics)
            with timer.phase("sync_weights"):
                metrics |= await self._publish()
            if self._due(self._config.validation.every, self._config.validation.at_end):
                with timer.phase("testing"):
                    metrics |= await self._validate()
            if self._due(self._config.checkpoint.every, self._config.checkpoint.at_end) or self._must_save():
                with timer.phase("save_checkpoint"):
                    await self._checkpoint()
            metrics |= await self._parts.checkpoints.take_metrics()
        await self._record(metrics | self._timings(timer, metrics))

    async def _prepare(self, step: int, timer: StepTimer) -> Prepared | None:
        """What the step trains on, nothing in rollout_only; None where the run is to stop before.

        Supervised rows are there. Else it consumes prompts_per_step groups; waits for the source; unblocked
        by finished generation.
        """
        source, algorithm = self._parts.source, self._parts.algorithm
        if source is None:
            assert self._parts.supervised is not None
            return self._parts.supervised.prepare()
        with timer.phase("gen"):
            groups = await self._parts.control.unless_stopped(
                source.take(step, self._config.coordinator.prompts_per_step, self._version)
            )
        if groups is None:
            return None
        if self._config.coordinator.dump:
            write_dump(self._config.folder / "dumps", step, groups)
        metrics = step_metrics(groups, self._version) | dict(source.take_metrics())
        metrics |= self._reasons.shares(groups) | self._parts.rewards.take_metrics()
        metrics |= self._parts.generation.take_metrics()
        prepared = await algorithm.prepare(groups, timer) if algorithm else Prepared({}, {})
        return replace(prepared, metrics={**metrics, **prepared.metrics})

    async def _update(
        self, step: int, batches: Mapping[Role, Sequence[Batch]], timer: StepTimer
    ) -> dict[str, float]:
        """Every model that trains, all at once; the actor waits while its critic warms up."""
        critic = self._config.critic
        waits = critic is not None and step <= critic.warmup_steps
        roles = [role for role in batches if not (role == "actor" and waits)]
        updates = (self._train(role, step, batches[role], timer) for role in roles)
        rows = await asyncio.gather(*updates)
        if not waits:
            self._version = replace(self._version, number=self._version.number + 1)
        return {name: value for row in rows for name, value in row.items()}

    async def _train(
        self, role: Role, step: int, batches: Sequence[Batch], timer: StepTimer
    ) -> dict[str, float]:
        """One optimizer step per minibatch and epoch."""
        model, section = self._parts.models[role], self._config.roles[role]
        assert isinstance(section, TrainerSection)
        rate = learning_rate(section.optimizer, step, self._config.run.steps)
        rows: list[Mapping[str, float]] = []
        with timer.phase(f"update_{role}"):
            for number, batch in enumerate(list(batches) * self._config.algorithm.num_epochs):
                key = StepKey(self._version.lineage, step, number, role)
                row = dict(await model.forward_backward(key, batch))
                rows.append(row | dict(await model.optim_step(key, rate)))
            if role != "actor":  # which is published next
                await self._offload(role)
        return mean_of(rows)

    async def _offload(self, *roles: Role) -> None:
        """Models whose part of the step is over make room for others, where their `offload` is set."""
        models = self._parts.models
        chosen = [models[role] for role in roles if role in models and self._config.roles[role].offload]
        await asyncio.gather(*(model.offload() for model in chosen))

    async def _guard(self, metrics: Mapping[str, float]) -> None:
        """Stops or pauses a run that diverges, before its weights are published or saved."""
        guards = self._config.guards
        limits = Limits(**guards.model_dump(exclude={"action"}))
        reason = trip(metrics, self._scores, limits)
        if reason is None:
            return
        await self._parts.checkpoints.finish()
        saved = self._parts.checkpoints.steps()
        good = f"step {saved[-1]} in {self._parts.checkpoints.path(saved[-1])}" if saved else "none was saved"
        reason = f"step {self._step}: {reason}; the last good checkpoint: {good}"
        if guards.action == "pause" and not self._parts.control.stopping:
            log.warning("the run pauses: %s", reason)
            await self._parts.control.pause(reason)
            await self._parts.control.gate()
        if guards.action == "stop" or self._parts.control.stopping:
            raise AtollError(reason)

    async def _publish(self) -> dict[str, float]:
        """Pushes the current version to every replica, then lets the source go on."""
        metrics = await self._push()
        await self._offload("actor", "reference")  # the reference in the actor's processes, after its loss
        if self._parts.source:
            await self._parts.source.published(self._version)
        return metrics

    async def _push(self) -> dict[str, float]:
        if not self._parts.sync:
            return {}
        return (await self._parts.sync.push(self._version)).metrics()

    async def _warm_up(self) -> dict[str, float]:
        """Supervised steps with the same step code, every response token with equal weight."""
        warmup, rows = self._config.warmup, self._parts.warmup
        if not rows:
            return {}
        actor = self._parts.models["actor"]
        await self._parts.control.report(state=State.WARMING_UP)
        metrics: dict[str, float] = {}
        looked_at = 0  # the step that replicas were last given
        for number in range(1, warmup.steps + 1):
            batch = SupervisedBatch(*supervised(rows.draw(warmup.rows_per_step)))
            # warm-up steps count up to 0, so that their keys never meet those of training
            key = StepKey(self._version.lineage, number - warmup.steps, 0, "actor")
            metrics |= await actor.forward_backward(key, batch)
            await actor.optim_step(key, warmup.learning_rate)
            metrics["warmup/steps"] = float(number)
            reached = False
            if warmup.target_reward is not None and number % warmup.check_every == 0:
                metrics["warmup/score/mean"], looked_at = await self._warmup_score(), number
                reached = metrics["warmup/score/mean"] >= warmup.target_reward
            await self._parts.control.report(step=number, num_steps=warmup.steps, metrics=metrics)
            if reached or self._parts.control.stopping:
                break
        if 0 < looked_at < metrics["warmup/steps"]:  # a version is one state of the weights
            self._version = replace(self._version, number=self._version.number + 1)
        if self._config.followers:
            warm = self._config.folder.absolute() / WARM
            shutil.rmtree(warm, ignore_errors=True)  # of a start that got no further than this
            await actor.export_hf(warm)
        return {name: value for name, value in metrics.items() if name.startswith("warmup/")}

    async def _begin_alike(self) -> None:
        """Reference and critics without a path of their own begin where the warm-up left the policy.

        In a resumed run only the reference: critics come from their checkpoint.
        """
        warm = self._config.folder.absolute() / WARM
        if warm.exists():
            begin = self._config.followers & ({"reference"} if self._resumed else self._parts.models.keys())
            await asyncio.gather(*(self._parts.models[role].load_hf(warm) for role in begin))

    async def _warmup_score(self) -> float:
        """The mean score of the first validation set, sampled as in training."""
        self._version = replace(self._version, number=self._version.number + 1)
        await self._push()
        probe = replace(
            self._parts.validation_sets[0], name="warmup", sampling=self._parts.sampling, num_samples=1
        )
        metrics = await evaluate([probe], self._parts.generation, self._config.run.name, self._version.number)
        return metrics["val/warmup/avg@1"]

    async def _validate(self) -> dict[str, float]:
        """Metrics of every validation set; remembers the best one."""
        if not self._config.validation.sets:
            return {}
        control, before = self._parts.control, self._parts.control.progress.state
        await control.report(state=State.VALIDATING)
        if self._parts.supervised:
            metrics = await self._parts.supervised.validate()
        else:
            sets, run = self._parts.validation_sets, self._config.run.name
            metrics = await evaluate(sets, self._parts.generation, run, self._version.number)
        await control.report(state=before)
        value = metrics.get(f"val/{self._config.validation.best}")
        if value is not None and (self._best is None or self._is_better(value, self._best.value)):
            self._best = Best(self._step, value)
        return metrics

    def _is_better(self, value: float, best: float) -> bool:
        """A loss is better where it is lower."""
        return value < best if self._parts.supervised else value > best

    async def _checkpoint(self) -> None:
        """Waits until the models have copied their state; the run goes on while they write it."""
        algorithm = self._parts.algorithm
        if not algorithm:
            return
        cursor = self._parts.prompts.cursor if self._parts.prompts else None
        state = CoordinatorState(self._step, self._version, cursor, self._best, algorithm.state)
        snapshot = await self._parts.journal.snapshot(self._step)
        models = {role: self._parts.models[role] for role in self._config.trained}
        control = self._parts.control

        async def committed(path: Path) -> None:
            await self._parts.journal.commit(state.step)
            control.checkpoint_saved(str(path))

        await self._parts.checkpoints.begin(state, snapshot, models, committed)
        control.checkpoint_begun()
        await self._offload(*self._config.trained)

    def _must_save(self) -> bool:
        new_best = self._best is not None and self._best.step == self._step
        return new_best or self._parts.control.checkpoint_requested

    def _due(self, every: int, at_end: bool) -> bool:
        return (every > 0 and self._step % every == 0) or (at_end and self._ends())

    def _ends(self) -> bool:
        target, window = self._config.run.target_reward, self._config.run.target_window
        last = self._scores[-window:]
        reached = target is not None and len(last) == window and sum(last) / window > target
        return reached or self._step >= self._config.run.steps or self._parts.control.stopping

    def _timings(self, timer: StepTimer, step: Mapping[str, float]) -> dict[str, float]:
        metrics = timer.metrics() | {"timing_s/reward": self._parts.rewards.take_seconds()}
        step_s = metrics["timing_s/step"]
        if "weights/stall_s" in step:
            metrics["weights/stall_share"] = step["weights/stall_s"] / step_s
        return metrics | {"perf/throughput": step["perf/total_num_tokens"] / step_s}

    async def _record(self, metrics: Mapping[str, float]) -> None:
        if not metrics:
            return
        self._parts.metrics.write(self._step, metrics)
        self._rows.append(metrics)
        await self._parts.control.report(step=self._step, version=self._version.number, metrics=metrics)

    def _summarise(self) -> None:
        """runs/NAME/summary.json: where the run began, where it ended, what it leaves."""
        scores = [row["critic/score/mean"] for row in self._rows if "critic/score/mean" in row]
        window = self._config.run.target_window
        validated = [row for row in self._rows if any(name.startswith("val/") for name in row)]
        saved = self._parts.checkpoints.steps()
        summary = {
            "run": self._config.run.name,
            "steps": self._step,
            "seconds": time.time() - self._begun,
            "reward_first": _mean(scores[:window]),
            "reward_last": _mean(scores[-window:]),
            "reward_window": window,
            "target_reward": self._config.run.target_reward,
            "validation_first": _validation(validated[:1]),
            "validation_last": _validation(validated[-1:]),
            "best": None if self._best is None else asdict(self._best),
            "checkpoint": str(self._parts.checkpoints.path(saved[-1])) if saved else None,
        }
        (self._config.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _validation(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: value for row in rows for name, value in row.items() if name.startswith("val/")}
