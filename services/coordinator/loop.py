"""The one loop: take finished groups, prepare experience, update, publish, for every max_staleness.

What differs between synchronous, one-step-off and asynchronous training is how far the source may
run ahead (coordinator.max_staleness) and whether a push interrupts sequences (partial_rollouts).
"""

import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from services.config.schema import RunConfig
from services.coordinator import experience
from services.coordinator.advantage import ADVANTAGES
from services.coordinator.checkpoints import Best, Checkpoints, CoordinatorState
from services.coordinator.control import Control, State
from services.coordinator.data import PromptSource, SupervisedSource
from services.coordinator.dump import write_dump
from services.coordinator.generation import Generation
from services.coordinator.journal import Journal
from services.coordinator.metrics import mean_of, step_metrics
from services.coordinator.rewards import Rewards
from services.coordinator.source import Source
from services.coordinator.sync import WeightSync
from services.coordinator.validation import ValidationSet, evaluate
from services.runtime.clients import TrainerClient
from services.runtime.telemetry import MetricsFile, StepTimer
from services.wire.types import Batch, Group, LossSettings, Sampling, StepKey, Version

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of; a mode leaves out what it does not need."""

    source: Source
    control: Control
    metrics: MetricsFile
    journal: Journal
    checkpoints: Checkpoints
    prompts: PromptSource | None  # not in a replay
    rewards: Rewards
    generation: Generation
    sync: WeightSync | None  # not in rollout_only and train_only
    trainer: TrainerClient | None  # not in rollout_only
    supervised: SupervisedSource | None
    validation_sets: tuple[ValidationSet, ...]
    sampling: Sampling  # of training


class Loop:
    def __init__(
        self, config: RunConfig, parts: Parts, version: Version, step: int, best: Best | None
    ) -> None:
        self._config = config
        self._parts = parts
        self._version = version
        self._step = step  # the last finished one
        self._best = best
        self._scores: deque[float] = deque(maxlen=config.run.target_window)
        self._rows: list[Mapping[str, float]] = []
        self._begun = time.time()

    async def run(self) -> None:
        """Runs to the last step, the target reward, or a request to stop; then writes summary.json."""
        parts, config = self._parts, self._config
        start = await self._warm_up() if self._step == 0 else {}
        await self._publish()
        await parts.control.report(state=State.TRAINING, step=self._step, num_steps=config.run.steps)
        if self._step == 0:
            if config.validation.at_start:
                start |= await self._validate()
            await self._record(start)
            if config.checkpoint.every:
                await self._checkpoint()
        while not self._ends():
            await parts.control.gate()
            await self._one_step()
        if config.checkpoint.at_end and self._step not in parts.checkpoints.steps():
            await self._checkpoint()  # stopped between two steps
        self._summarise()
        await parts.control.report(state=State.FINISHED)

    async def _one_step(self) -> None:
        """Consumes prompts_per_step groups; waits for the source; unblocked by finished generation."""
        step, timer = self._step + 1, StepTimer()
        with timer.phase("step"):
            with timer.phase("gen"):
                groups = await self._parts.control.unless_stopped(
                    self._parts.source.take(step, self._config.coordinator.prompts_per_step, self._version)
                )
            if groups is None:
                return
            if self._config.coordinator.dump:
                write_dump(self._config.folder / "dumps", step, groups)
            metrics = step_metrics(groups, self._version)
            if self._parts.trainer:
                batches = await self._prepare(groups, timer)
                with timer.phase("update_actor"):
                    metrics |= await self._update(step, batches)
                self._version = replace(self._version, number=self._version.number + 1)
            self._step = step
            self._scores.append(metrics["critic/score/mean"])
            with timer.phase("sync_weights"):
                metrics |= await self._publish()
            if self._due(self._config.validation.every, self._config.validation.at_end):
                with timer.phase("testing"):
                    metrics |= await self._validate()
            if self._due(self._config.checkpoint.every, self._config.checkpoint.at_end) or self._must_save():
                with timer.phase("save_checkpoint"):
                    await self._checkpoint()
        await self._record(metrics | self._timings(timer, metrics["perf/total_num_tokens"]))

    async def _prepare(self, groups: Sequence[Group], timer: StepTimer) -> list[Batch]:
        """Advantages over the whole batch; old logprobs where the update cannot take them along."""
        algorithm = self._config.algorithm
        with timer.phase("adv"):
            scores_N = np.array([sample.score for group in groups for sample in group.samples])
            group_N = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
            advantages_N = ADVANTAGES[algorithm.advantage](scores_N, group_N)
            batches = []
            for part, samples in experience.split(groups, algorithm.num_minibatches):
                layout = experience.lay_out(part)
                batches.append(
                    Batch(
                        segments=layout.segments,
                        loss_weights=experience.loss_weights(layout, algorithm.aggregation),
                        advantages=experience.spread(advantages_N[samples], layout),
                        rollout_logprobs=layout.rollout_logprobs_T,
                        old_logprobs=(
                            layout.rollout_logprobs_T if algorithm.old_logprobs == "rollout" else None
                        ),
                    )
                )
        if algorithm.old_logprobs == "rollout" or algorithm.num_minibatches * algorithm.num_epochs == 1:
            return batches
        with timer.phase("old_log_prob"):
            trainer = self._parts.trainer
            assert trainer is not None
            temperature = self._config.rollout.sampling.temperature
            old = [await trainer.compute_logprobs(batch.segments, temperature) for batch in batches]
        return [
            replace(batch, old_logprobs=np.where(batch.loss_weights > 0, logprobs, 0.0).astype(np.float32))
            for batch, logprobs in zip(batches, old, strict=True)
        ]

    async def _update(self, step: int, batches: Sequence[Batch]) -> dict[str, float]:
        """One optimizer step per minibatch and epoch."""
        trainer, algorithm = self._parts.trainer, self._config.algorithm
        assert trainer is not None
        loss = LossSettings(
            algorithm.loss, algorithm.clip_low, algorithm.clip_high, self._config.rollout.sampling.temperature
        )
        optimizer = self._config.trainer.optimizer
        learning_rate = optimizer.learning_rate * min(1.0, step / max(optimizer.warmup_steps, 1))
        rows: list[Mapping[str, float]] = []
        for number, batch in enumerate(list(batches) * algorithm.num_epochs):
            key = StepKey(self._version.lineage, step, number, "actor")
            row = dict(await trainer.forward_backward(key, loss, batch))
            rows.append(row | dict(await trainer.optim_step(key, learning_rate)))
        return mean_of(rows) | {"actor/lr": learning_rate}

    async def _publish(self) -> dict[str, float]:
        """Pushes the current version to every replica, then lets the source go on."""
        metrics = await self._push()
        await self._parts.source.published(self._version)
        return metrics

    async def _push(self) -> dict[str, float]:
        if not self._parts.sync:
            return {}
        report = await self._parts.sync.push(self._version)
        return {
            "weights/push_s": report.seconds,
            "weights/num_bytes": float(report.num_bytes),
            "weights/stall_s": report.stall_s,
        }

    async def _warm_up(self) -> dict[str, float]:
        """Supervised steps with the same step code: loss nll, every response token with equal weight."""
        warmup, trainer, rows = self._config.warmup, self._parts.trainer, self._parts.supervised
        if not (trainer and rows):
            return {}
        await self._parts.control.report(state=State.WARMING_UP)
        loss = LossSettings("nll", 0.0, 0.0, temperature=1.0)
        metrics: dict[str, float] = {}
        for number in range(1, warmup.steps + 1):
            layout = experience.supervised(rows.draw(warmup.rows_per_step))
            zeros_T = np.zeros(len(layout.loss_mask_T), np.float32)
            weights_T = experience.loss_weights(layout, "token_mean")
            batch = Batch(layout.segments, weights_T, zeros_T, zeros_T, old_logprobs=None)
            # warm-up steps count up to 0, so that their keys never meet those of training
            key = StepKey(self._version.lineage, number - warmup.steps, 0, "actor")
            metrics |= await trainer.forward_backward(key, loss, batch)
            await trainer.optim_step(key, warmup.learning_rate)
            metrics["warmup/steps"] = float(number)
            reached = False
            if warmup.target_reward is not None and number % warmup.check_every == 0:
                metrics["warmup/score/mean"] = await self._warmup_score()
                reached = metrics["warmup/score/mean"] >= warmup.target_reward
            await self._parts.control.report(step=number, num_steps=warmup.steps, metrics=metrics)
            if reached or self._parts.control.stopping:
                break
        return {name: value for name, value in metrics.items() if name.startswith("warmup/")}

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
        if not self._parts.validation_sets:
            return {}
        control, before = self._parts.control, self._parts.control.progress.state
        await control.report(state=State.VALIDATING)
        metrics = await evaluate(
            self._parts.validation_sets, self._parts.generation, self._config.run.name, self._version.number
        )
        await control.report(state=before)
        value = metrics.get(f"val/{self._config.validation.best}")
        if value is not None and (self._best is None or value > self._best.value):
            self._best = Best(self._step, value)
        return metrics

    async def _checkpoint(self) -> None:
        if not self._parts.trainer:
            return
        state = CoordinatorState(
            self._step, self._version, self._parts.prompts.cursor if self._parts.prompts else None, self._best
        )
        snapshot = await self._parts.journal.snapshot()
        path = await self._parts.checkpoints.save(state, snapshot, self._parts.trainer.save_checkpoint)
        await self._parts.journal.commit(self._step)
        self._parts.control.checkpoint_saved(str(path))

    def _must_save(self) -> bool:
        new_best = self._best is not None and self._best.step == self._step
        return new_best or self._parts.control.checkpoint_requested

    def _due(self, every: int, at_end: bool) -> bool:
        return (every > 0 and self._step % every == 0) or (at_end and self._ends())

    def _ends(self) -> bool:
        target = self._config.run.target_reward
        reached = (
            target is not None
            and len(self._scores) == self._scores.maxlen
            and sum(self._scores) / len(self._scores) > target
        )
        return reached or self._step >= self._config.run.steps or self._parts.control.stopping

    def _timings(self, timer: StepTimer, num_tokens: float) -> dict[str, float]:
        metrics = timer.metrics() | {"timing_s/reward": self._parts.rewards.take_seconds()}
        return metrics | {"perf/throughput": num_tokens / metrics["timing_s/step"]}

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
