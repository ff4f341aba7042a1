"""The training loop, for every mode: prepare a step's batches, update, publish, validate, save.

What a step trains on is behind `StepSource`. Synchronous, one-step-off and asynchronous training differ only
in how far the source may run ahead (coordinator.max_staleness) and whether a push interrupts sequences
(partial_rollouts).
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.config.schema import CheckpointSection, GraderConfig, GuardsSection, RunSection, ValidationSection
from atoll.coordinator.algorithm.algorithm import PreparedStep
from atoll.coordinator.algorithm.guards import GuardError, GuardLimits, check_divergence
from atoll.coordinator.algorithm.metrics import SCORE, timing_metrics
from atoll.coordinator.control import RunControl, RunState, TrainerLeavesError
from atoll.coordinator.journal.checkpoints import BestValidation, Checkpoints, CoordinatorState
from atoll.coordinator.journal.journal import Journal
from atoll.coordinator.learners import Learners
from atoll.coordinator.rewards.advice import slow_grading_note
from atoll.coordinator.steps import StepSource
from atoll.coordinator.summary import MetricsRow, Outcome, write_summary
from atoll.coordinator.warmup import WarmUp
from atoll.runtime.errors import AtollError, DivergedError, ServiceUnavailableError
from atoll.runtime.telemetry import MetricsFile, StepTimer
from atoll.wire.types import Version

log = logging.getLogger(__name__)

WARMUP_EXPORT = "warm"  # folder in the run's: the policy after the warm-up, where reference and critics begin

MAX_REFUSED = 2  # consecutive steps refused by the trainer before the run fails

Push = Callable[[Version], Coroutine[Any, Any, Mapping[str, float]]]  # to every replica; returns metrics


async def skip_push(version: Version) -> Mapping[str, float]:
    """For modes without weight pushes."""
    return {}


async def no_generation() -> None:
    """For runs that generate nothing."""


@dataclass(frozen=True, slots=True)
class LoopSettings:
    run: RunSection
    validation: ValidationSection
    checkpoint: CheckpointSection
    guards: GuardsSection
    graders: tuple[GraderConfig, ...] = ()

    @property
    def folder(self) -> Path:
        return self.run.dir / self.run.name


@dataclass(frozen=True, slots=True)
class LoopParts:
    steps: StepSource
    learners: Learners
    push: Push
    warmup: WarmUp
    control: RunControl
    metrics: MetricsFile
    journal: Journal
    checkpoints: Checkpoints
    finish_running: Callable[[], Awaitable[None]] = no_generation


@dataclass(frozen=True, slots=True)
class LoopStart:
    """The starting point of the loop: a new run, or the step after a checkpoint."""

    version: Version
    step: int = 0  # the last finished one
    best: BestValidation | None = None
    rows: Sequence[MetricsRow] = ()  # metrics of the steps so far
    unrecorded: MetricsRow | None = None  # those of `step`, if they are not among `rows`
    seconds: float = 0.0  # that the run has taken so far, over all its starts
    resumed: bool = False  # from a checkpoint, also that of step 0


class Loop:
    def __init__(
        self, settings: LoopSettings, parts: LoopParts, start: LoopStart, clock: Callable[[], float]
    ) -> None:
        """`clock` counts seconds, as time.monotonic does."""
        self._settings = settings
        self._parts = parts
        self._version = start.version
        self._step = start.step
        self._best = start.best
        self._resumed = start.resumed
        self._rows = list(start.rows)
        self._unrecorded = start.unrecorded
        self._row: MetricsRow = start.unrecorded or {}  # metrics of the last step, as far as they are known
        rows = [*start.rows, self._row]
        self._scores = [row[SCORE] for row in rows if SCORE in row]
        self._clock = clock
        self._begun = clock() - start.seconds
        self._saved = start.step if start.resumed else None  # the step of the last checkpoint
        self._saved_at = clock()
        self._can_save = start.resumed  # models are at `step`, and no guard has tripped
        self._num_refused = 0  # steps in a row of which the trainer took nothing

    async def run(self) -> Outcome:
        """Runs to the last step, the target reward, or a request to stop; then writes summary.json. Raises
        TrainerLeavesError once it has saved for a trainer that leaves.

        If it ends with any other error than a lost trainer or divergence, the last complete step is
        checkpointed first.
        """
        try:
            await self._begin()
            while not self._ends():
                await self._parts.control.gate(self._answer_checkpoint)
                if not self._ends():
                    await self._one_step()
            return await self._end()
        except ServiceUnavailableError:
            raise  # a trainer is gone: the others go back to the last checkpoint with it
        except DivergedError as error:
            reason = await self._with_last_good(str(error))
            self._summarize_failure(Outcome.FAILED, reason)
            raise AtollError(reason) from error
        except Exception as error:
            await self._save_after(error)
            is_guards = isinstance(error, GuardError)
            self._summarize_failure(Outcome.STOPPED_BY_GUARD if is_guards else Outcome.FAILED, str(error))
            raise
        finally:
            await self._parts.checkpoints.abandon()  # if the run failed
            self._parts.control.requeue_checkpoint()

    async def _begin(self) -> None:
        """To the first published version; a new run warms up before, which is saved, and is validated."""
        parts, settings = self._parts, self._settings
        if not self._resumed:
            warm = await parts.warmup.run(self._version)
            self._version, self._unrecorded, self._row = warm.version, warm.metrics, warm.metrics
            self._can_save = warm.is_complete  # else a resume begins with it again
        if (left := settings.folder.absolute() / WARMUP_EXPORT).exists():
            await parts.learners.begin_at(left, resumed=self._resumed)
        if not self._resumed and self._unrecorded and self._can_save:
            await self._checkpoint()
        await self._publish()
        await parts.control.report(state=RunState.TRAINING, step=self._step, num_steps=settings.run.steps)
        if self._unrecorded is not None:
            metrics = dict(self._unrecorded)
            if self._owes_validation(metrics):
                metrics |= await self._validate()
            await self._record(metrics)
            if not self._resumed and settings.checkpoint.every:
                await self._checkpoint()

    async def _end(self) -> Outcome:
        parts, settings = self._parts, self._settings
        await parts.control.report(state=RunState.SAVING)
        await parts.checkpoints.finish()
        if settings.checkpoint.at_end and self._step not in parts.checkpoints.steps():
            await self._checkpoint()  # stopped between two steps
            await parts.checkpoints.finish()
        is_complete = self._step >= settings.run.steps
        outcome = Outcome.FINISHED if is_complete else Outcome.INTERRUPTED
        outcome = Outcome.TARGET_REACHED if self._has_reached_target() else outcome
        self._summarize(outcome)
        await parts.control.report(state=RunState.FINISHED)
        return outcome

    def _summarize(self, outcome: Outcome, reason: str = "") -> None:
        settings, checkpoints = self._settings, self._parts.checkpoints
        saved = checkpoints.steps()
        write_summary(
            settings.folder,
            settings.run,
            self._rows,
            outcome,
            reason=reason,
            steps=self._step,
            seconds=self._clock() - self._begun,
            best=self._best,
            checkpoint=checkpoints.path(saved[-1]) if saved else None,
        )

    def _summarize_failure(self, outcome: Outcome, reason: str) -> None:
        with suppress(OSError):  # a full disk, perhaps the failure itself
            self._summarize(outcome, reason)

    async def _one_step(self) -> None:
        """Consumes what the step trains on; waits for it; unblocked by the source, and by a stop."""
        parts, settings = self._parts, self._settings
        step, timer = self._step + 1, StepTimer()
        with timer.phase("step"):
            prepared = await parts.steps.prepare(step, self._version, timer)
            if prepared is None:
                return
            self._can_save = False
            metrics, refusal = await self._update(step, prepared, timer)
            self._step, self._row = step, metrics
            if SCORE in metrics:
                self._scores.append(metrics[SCORE])
            await self._guard(metrics)
            self._can_save = True
            with timer.phase("sync_weights"):
                metrics |= await self._publish()
            if self._due(settings.validation.every, settings.validation.at_end):
                with timer.phase("testing"):
                    metrics |= await self._validate()
            if self._must_save():
                with timer.phase("save_checkpoint"):
                    await self._checkpoint()
            metrics |= await parts.checkpoints.take_metrics()
        await self._record(metrics | timing_metrics(timer, metrics))
        self._num_refused = self._num_refused + 1 if refusal else 0
        if self._num_refused == MAX_REFUSED:
            raise AtollError(
                f"step {step}: the trainer refused {MAX_REFUSED} steps in a row, the last time "
                f"because {refusal}; fix the cause, then continue with --resume"
            )

    async def _update(
        self, step: int, prepared: PreparedStep, timer: StepTimer
    ) -> tuple[dict[str, float], str]:
        """The step's metrics, and why nothing was trained on, if nothing was although a batch was there."""
        parts, metrics = self._parts, dict(prepared.metrics)
        if not prepared.batches:
            return metrics, prepared.refusal
        updated = await parts.learners.update(step, self._version.lineage, prepared.batches, timer)
        for number, reason in updated.refused.items():
            await parts.steps.on_refused(step, prepared.samples[number], reason)
        if "actor" in updated.trained:
            self._version = replace(self._version, number=self._version.number + 1)
        refusal = "" if updated.trained else next(iter(updated.refused.values()))
        return {**metrics, **updated.metrics}, refusal

    async def _guard(self, metrics: MetricsRow) -> None:
        """Stops or pauses a diverging run before its weights are published or saved."""
        guards, control = self._settings.guards, self._parts.control
        reason = check_divergence(metrics, self._scores, GuardLimits(**guards.model_dump(exclude={"action"})))
        if reason is None:
            return
        reason = await self._with_last_good(reason)

        async def refuse() -> None:
            control.refuse_checkpoint(f"Checkpoint: a guard has paused the run: {reason}; resume or stop it")
            await control.let_go()  # trainers that leave take with them what nobody wants

        if guards.action == "pause" and not control.stopping:
            log.warning("the run pauses: %s", reason)
            await control.pause(reason)
            await control.gate(refuse)
        if guards.action == "stop" or control.stopping:
            raise GuardError(reason)

    async def _with_last_good(self, reason: str) -> str:
        """Why this step's weights are no good, and which are."""
        checkpoints = self._parts.checkpoints
        await checkpoints.finish()
        saved = checkpoints.steps()
        good = f"step {saved[-1]} in {checkpoints.path(saved[-1])}" if saved else "none was saved"
        return f"step {self._step}: {reason}; the last good checkpoint: {good}"

    async def _publish(self) -> dict[str, float]:
        """Pushes the current version to every replica, then lets the source continue; not if it hurries."""
        pushed = await self._parts.control.run_unless_hurried(self._parts.push(self._version))
        if pushed is None:
            return {}
        # the reference in the actor's processes, after its loss
        await self._parts.learners.offload("actor", "reference")
        await self._parts.steps.on_published(self._version)
        return dict(pushed)

    async def _validate(self) -> dict[str, float]:
        """Metrics of every validation set; remembers the best one. Given up if a trainer leaves, and by a run
        that stops at once."""
        if not self._settings.validation.sets:
            return {}
        control, before = self._parts.control, self._parts.control.progress.state
        await control.report(state=RunState.VALIDATING)
        validating = self._parts.steps.validate(self._step, self._version)
        metrics = await control.run_unless_left(control.run_unless_hurried(validating))
        await control.report(state=before)
        if metrics is None:
            if control.leaving:
                await self._answer_checkpoint()
            return {}
        value = metrics.get(f"val/{self._settings.validation.best}")
        if value is not None and (self._best is None or self._is_better(value, self._best.value)):
            self._best = BestValidation(self._step, value)
        return dict(metrics)

    def _owes_validation(self, metrics: MetricsRow) -> bool:
        """Whether the step before a start was to be validated; a trainer may have left in the midst of it."""
        validation = self._settings.validation
        if self._step == 0:
            return validation.at_start
        is_due = self._due(validation.every, validation.at_end)
        return is_due and not any(name.startswith("val/") for name in metrics)

    def _is_better(self, value: float, best: float) -> bool:
        return value > best if self._parts.steps.higher_is_better else value < best

    async def _checkpoint(self) -> None:
        """Waits until the models have copied their state; the run continues while they write it."""
        parts, trained = self._parts, self._parts.learners.trained
        if self._saved == self._step or not self._can_save:
            return
        if not trained:  # its dump is all that a step leaves
            await parts.journal.commit(self._step)
            self._saved = self._step
            return
        state = CoordinatorState(
            step=self._step,
            version=self._version,
            cursor=parts.steps.cursor,
            best=self._best,
            algorithm=parts.steps.state,
            row=self._row,
            seconds=self._clock() - self._begun,
            counters=parts.steps.counters,
        )
        snapshot = await parts.journal.snapshot(self._step)

        async def committed(path: Path) -> None:
            await parts.journal.commit(state.step)
            parts.control.finish_checkpoint(str(path))

        await parts.checkpoints.begin(state, snapshot, trained, committed)
        self._saved, self._saved_at = self._step, self._clock()
        parts.control.begin_checkpoint()
        await parts.learners.offload(*trained)

    async def _answer_checkpoint(self) -> None:
        """That of the last step; there may be one. For a trainer that leaves, also waits for the samples that
        replicas are generating: the next life of the loop finds them in the journal."""
        parts = self._parts
        await self._checkpoint()
        parts.control.begin_checkpoint()
        await parts.checkpoints.finish()
        parts.control.finish_checkpoint(str(parts.checkpoints.path(self._step)))
        if names := parts.control.leaving:
            await parts.finish_running()
            await parts.control.let_go()
            raise TrainerLeavesError(f"{names} leaves; step {self._step} is saved")

    async def _save_after(self, error: Exception) -> None:
        """Saves the last step of a failing run."""
        if self._saved == self._step or not self._can_save:
            return
        log.error("the run is ending; saving its last step first: %s", error)
        try:
            await self._checkpoint()
            await self._parts.checkpoints.finish()
        except Exception:
            log.exception("the last step could not be saved")

    def _must_save(self) -> bool:
        checkpoint = self._settings.checkpoint
        elapsed_s = self._clock() - self._saved_at
        return (
            not self._parts.learners.trained
            or self._due(checkpoint.every, checkpoint.at_end)
            or (checkpoint.every_minutes > 0 and elapsed_s >= 60 * checkpoint.every_minutes)
            or (self._best is not None and self._best.step == self._step)
            or self._parts.control.checkpoint_requested
            or self._parts.journal.full
        )

    def _due(self, every: int, at_end: bool) -> bool:
        return (every > 0 and self._step % every == 0) or (at_end and self._ends())

    def _ends(self) -> bool:
        is_over = self._step >= self._settings.run.steps or self._parts.control.stopping
        return is_over or self._has_reached_target()

    def _has_reached_target(self) -> bool:
        run = self._settings.run
        last = self._scores[-run.target_window :]
        return (
            run.target_reward is not None
            and len(last) == run.target_window
            and sum(last) / run.target_window > run.target_reward
        )

    async def _record(self, metrics: MetricsRow) -> None:
        if not metrics:
            return
        self._parts.metrics.write(self._step, metrics)
        self._rows.append(metrics)
        note = slow_grading_note(metrics, self._settings.graders)
        version = self._version.number
        await self._parts.control.report(step=self._step, version=version, metrics=metrics, note=note)
