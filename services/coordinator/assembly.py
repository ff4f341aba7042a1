"""Puts a run together from its config and the services that registered: new, or from a checkpoint."""

import asyncio
import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.config.schema import RunConfig, SamplingConfig
from services.coordinator.algorithm import Algorithm, Models
from services.coordinator.canary import Canary
from services.coordinator.checkpoints import Checkpoints
from services.coordinator.control import Control, State
from services.coordinator.data import (
    Pair,
    PromptSource,
    SupervisedSource,
    read_pairs,
    read_prompts,
    short_enough,
)
from services.coordinator.generation import Generation
from services.coordinator.groups import DynamicSampling
from services.coordinator.journal import Checkpoint, Journal
from services.coordinator.loop import Loop, Parts
from services.coordinator.membership import Membership, TrainerLostError
from services.coordinator.registry import Registry
from services.coordinator.rendering import Renderer
from services.coordinator.replicas import Replicas
from services.coordinator.rewards import Rewards, ServerGrader
from services.coordinator.servers import Servers
from services.coordinator.source import GenerateSource, ReplaySource, Source
from services.coordinator.supervised import HeldOutSet, Supervised
from services.coordinator.sync import WeightSync
from services.coordinator.validation import ValidationSet
from services.runtime.clients import Caller, TrainerClient
from services.runtime.errors import ServiceUnavailableError, UserError
from services.runtime.model_spec import read_spec
from services.runtime.store import Store
from services.runtime.telemetry import MetricsFile
from services.wire.types import ExternalServer, Sampling, Version

log = logging.getLogger(__name__)

POLICY = "actor"  # the model that replicas serve
START_TIMEOUT_S = 300.0  # for every service to load its model and register


@dataclass(frozen=True, slots=True)
class _Data:
    """What the run reads from its files before the services are needed."""

    renderer: Renderer
    prompts: PromptSource | None  # not in a replay and in supervised
    warmup: SupervisedSource | None
    rows: SupervisedSource | None  # in supervised, like the held-out ones
    validation_sets: tuple[ValidationSet, ...]
    held_out: tuple[HeldOutSet, ...]


class Assembly:
    """The parts of one run. `run` waits for the services, builds the loop and runs it to the end."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        registry: Registry,
        servers: Servers,
        control: Control,
        caller: Caller,
    ) -> None:
        self._config = config
        self._control = control
        self._journal = Journal(store, config.run.name)
        self._checkpoints = Checkpoints(config.folder / "checkpoints", config.checkpoint.keep)
        timeout_s = config.coordinator.request_timeout_s
        self._replicas = Replicas(caller, timeout_s)
        self._servers = servers
        graders = config.reward.graders
        self._rewards = Rewards(
            config.reward.retries,
            servers=[ServerGrader(servers, g.server, g.weight) for g in graders if g.server],
            asks_own=any(not grader.server for grader in graders),
            patience_s=timeout_s,
        )
        self._sync = (
            WeightSync(
                lambda: self._membership.model("actor"),
                self._replicas,
                Canary(config.model.path, config.weights.canary_every, config.weights.canary_tolerance),
                config.weights,
                config.rollout.dtype,
                finish_running=not config.coordinator.partial_rollouts,
                first_epoch=(caller.fence or 0) << 32,
            )
            if config.run.mode == "train"
            else None
        )
        # a replica gets traffic once it holds the current weights; without a trainer, its own are
        admit = self._sync.catch_up if self._sync else self._replicas.route
        self._membership = Membership(
            registry, self._replicas, self._rewards, caller, timeout_s, admit, POLICY
        )

    async def run(self, resume: bool) -> None:
        """Ends with the loop, or with the first error of what runs beside it; begins it again from the
        last checkpoint where a trainer was lost and comes back."""
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._membership.follow()),
                tasks.create_task(self._servers.watch()),
            ]
            await self._servers.open(
                [ExternalServer(**server.model_dump()) for server in self._config.servers]
            )
            while True:
                try:
                    await self._run_once(resume)
                    break
                except* ServiceUnavailableError as errors:
                    await self._recover(first_cause(errors))
                    resume = True
            for task in beside:
                task.cancel()

    async def _run_once(self, resume: bool) -> None:
        """Runs the loop to its end. Raises a group of errors, TrainerLostError among them where a trainer
        leaves; nothing of the loop goes on then."""
        async with asyncio.TaskGroup() as tasks:
            generation = Generation(
                self._replicas,
                self._rewards,
                model=POLICY,
                max_attempts=self._config.coordinator.max_sample_attempts,
                timeout_s=self._config.coordinator.request_timeout_s,
            )
            beside = [
                tasks.create_task(generation.run()),
                tasks.create_task(self._membership.watch_trainers()),
            ]
            loop = await self._build(resume, generation)
            await self._control.report(error="")
            await loop.run()
            for task in beside:
                task.cancel()

    async def _recover(self, error: BaseException) -> None:
        """Waits for the trainers that a run has lost to come back, its other services as they are.

        A call that fails says little: a trainer is lost once the registry says so. Raises `error` where
        none is.
        """
        log.warning("the step in progress is given up: %s", error)
        await self._control.report(state=State.RECOVERING, error=str(error))
        try:
            with suppress(TrainerLostError):
                async with asyncio.timeout(2 * self._config.coordinator.lease_s):
                    await self._membership.watch_trainers()
        except TimeoutError:
            raise error from None
        await self._membership.reconnect()
        if self._sync:
            await self._sync.forget_trainer()

    async def _build(self, resume: bool, generation: Generation) -> Loop:
        config = self._config
        trains, generates = config.run.mode != "rollout_only", config.run.mode in ("train", "rollout_only")
        # reading takes seconds: in a thread, since services register and progress is asked for meanwhile
        data = await asyncio.to_thread(self._read_data, trains, generates)
        # everything that can be wrong with the data has been said: now the services
        await self._membership.wait_for(
            (dict.fromkeys(config.roles, 1) if trains else {})
            | ({"rollout": config.rollout.replicas} if generates else {})
            | ({"reward": 1} if generates and config.reward.has_service else {}),
            START_TIMEOUT_S,
        )
        if generates:
            await self._wait_for_servers()
        models = self._membership.models
        for role, model in models.items():
            await self._check_tokenizer(role, model, data.renderer)
        return await self._loop(resume, data, models, generation)

    async def _wait_for_servers(self) -> None:
        """Every grader has a server to ask. People register them, so there is no deadline."""
        if missing := self._servers.missing():
            folder, graders = self._config.folder, ", ".join(f"server:{name}" for name in missing)
            reason = (
                f"waits for a server to ask for each of the graders {graders}: "
                f"atoll register reward {missing[0]} URL --protocol PROTOCOL --run {folder}"
            )
            log.warning("the run %s", reason)
            await self._control.report(error=reason)
            await self._servers.wait_for_all()

    async def _loop(self, resume: bool, data: _Data, models: Models, generation: Generation) -> Loop:
        """Restores the last checkpoint where asked to, and opens the run's next lineage."""
        config, checkpoint, best, carried, step = self._config, None, None, None, 0
        prompts = data.prompts or data.rows
        if resume and (steps := self._checkpoints.steps()):
            state, snapshot, folder = self._checkpoints.load(steps[-1])
            step, best, checkpoint = state.step, state.best, Checkpoint(state.step, state.version, snapshot)
            carried = state.algorithm
            for role in config.trained if models else ():
                await models[role].load_checkpoint(folder / role)
            if prompts and state.cursor:
                prompts.load(state.cursor)
            log.info("resumes after step %d, version %s", step, state.version)
        elif resume:
            for role in config.trained:
                await models[role].load_checkpoint(None)
            log.info("nothing was saved yet: begins again from the start")
        restored = await self._journal.restore(checkpoint)
        sampling = _sampling(config.rollout.sampling, data.renderer, config.run.seed)
        version = Version(restored.lineage, checkpoint.version.number if checkpoint else 0)
        source: Source | None = None
        if data.prompts:
            source = self._generate_source(data.prompts, generation, sampling, config.run.steps - step)
            source.restore(restored.groups, version)
        elif config.data.replay:
            source = ReplaySource(config.data.replay, step + 1)
        metrics = config.folder / "metrics.jsonl"
        parts = Parts(
            source=source,
            control=self._control,
            metrics=MetricsFile(metrics, step if checkpoint else None),
            journal=self._journal,
            checkpoints=self._checkpoints,
            prompts=prompts,
            rewards=self._rewards,
            generation=generation,
            sync=self._sync,
            models=models,
            algorithm=Algorithm(config, models, carried) if models else None,
            warmup=data.warmup,
            supervised=(
                Supervised(data.rows, data.held_out, models["actor"], config.coordinator.prompts_per_step)
                if data.rows
                else None
            ),
            validation_sets=data.validation_sets,
            sampling=sampling,
        )
        return Loop(config, parts, version, step, best, _rows_before(metrics), resumed=checkpoint is not None)

    def _read_data(self, trains: bool, generates: bool) -> _Data:
        config = self._config
        renderer = Renderer(config.model.path)
        if config.run.mode == "supervised":
            return _Data(renderer, None, None, self._rows(renderer), (), self._held_out(renderer))
        prompts = None if config.data.replay else self._prompt_source(renderer)
        warmup = (
            SupervisedSource([read_pairs(config.warmup.source.path, renderer)], [1.0], config.run.seed, True)
            if trains and config.warmup.steps and config.warmup.source
            else None
        )
        return _Data(
            renderer, prompts, warmup, None, self._validation_sets(renderer) if generates else (), ()
        )

    def _rows(self, renderer: Renderer) -> SupervisedSource:
        data = self._config.data
        rows = [self._pairs(source.path, renderer) for source in data.train]
        weights = [source.weight for source in data.train]
        return SupervisedSource(rows, weights, self._config.run.seed, data.shuffle)

    def _held_out(self, renderer: Renderer) -> tuple[HeldOutSet, ...]:
        return tuple(
            HeldOutSet(entry.name, self._pairs(entry.path, renderer)[: entry.max_prompts])
            for entry in self._config.validation.sets
        )

    def _pairs(self, path: Path, renderer: Renderer) -> list[Pair]:
        """The rows with their answers that the model can take as a whole."""
        limit = read_spec(self._config.model.path).max_positions
        pairs = read_pairs(path, renderer)
        return short_enough(
            path,
            pairs,
            [len(prompt) + len(response) for prompt, response in pairs],
            limit,
            self._config.data.overlong_prompts,
            what="prompt and response",
            expected=f"the model's max_position_embeddings = {limit}; shorten it",
        )

    def _prompt_source(self, renderer: Renderer) -> PromptSource:
        data, run = self._config.data, self._config.run
        return PromptSource(
            data.train,
            renderer,
            run=run.name,
            seed=run.seed,
            shuffle=data.shuffle,
            max_prompt_tokens=data.max_prompt_tokens,
            overlong=data.overlong_prompts,
        )

    def _generate_source(
        self, prompts: PromptSource, generation: Generation, sampling: Sampling, steps: int
    ) -> GenerateSource:
        coordinator, wanted = self._config.coordinator, self._config.algorithm.filter
        return GenerateSource(
            prompts,
            generation,
            self._journal,
            sampling=sampling,
            prompts_per_step=coordinator.prompts_per_step,
            samples_per_prompt=coordinator.samples_per_prompt,
            max_staleness=coordinator.max_staleness,
            steps=steps,
            max_dropped_share=coordinator.max_dropped_share,
            greedy_baseline=coordinator.greedy_baseline,
            dynamic_sampling=DynamicSampling(wanted, coordinator.prompts_per_step) if wanted else None,
        )

    def _validation_sets(self, renderer: Renderer) -> tuple[ValidationSet, ...]:
        return tuple(
            ValidationSet(
                name=entry.name,
                prompts=tuple(read_prompts(entry.path, renderer, self._config.run.name)[: entry.max_prompts]),
                num_samples=entry.num_samples,
                sampling=_sampling(entry.sampling, renderer, self._config.run.seed),
            )
            for entry in self._config.validation.sets
        )

    async def _check_tokenizer(self, role: str, model: TrainerClient, renderer: Renderer) -> None:
        info = await model.info()
        if info.tokenizer_digest != renderer.digest:
            raise UserError(
                f"the {role}'s model folder {info.model} has another tokenizer.json than the coordinator's "
                f"{self._config.model.path}: give both the same folder"
            )


def _rows_before(path: Path) -> list[dict[str, float]]:
    """What a metrics file has of each step; null, which was not finite, is left out."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if name != "step" and value is not None} for row in rows
    ]


def _sampling(config: SamplingConfig, renderer: Renderer, seed: int) -> Sampling:
    return Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop_token_ids=renderer.stop_ids,
        stop=config.stop,
        seed=seed,
    )


def first_cause(error: BaseException) -> BaseException:
    """Of tasks that ended together, the error of the one that failed first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
