"""Puts a run together from its config and the services that registered: new, or from a checkpoint."""

import asyncio
import logging
from dataclasses import dataclass

from services.config.schema import RunConfig, SamplingConfig
from services.coordinator.algorithm import Algorithm, Models
from services.coordinator.checkpoints import Checkpoints
from services.coordinator.control import Control
from services.coordinator.data import PromptSource, SupervisedSource, read_prompts
from services.coordinator.generation import Generation
from services.coordinator.groups import DynamicSampling
from services.coordinator.journal import Checkpoint, Journal
from services.coordinator.loop import Loop, Parts
from services.coordinator.membership import Membership
from services.coordinator.registry import Registry
from services.coordinator.rendering import Renderer
from services.coordinator.replicas import Replicas
from services.coordinator.rewards import Rewards
from services.coordinator.source import GenerateSource, ReplaySource, Source
from services.coordinator.sync import WeightSync
from services.coordinator.validation import ValidationSet
from services.runtime.clients import Caller, TrainerClient
from services.runtime.errors import UserError
from services.runtime.store import Store
from services.runtime.telemetry import MetricsFile
from services.wire.types import Sampling, Version

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0  # for every service to load its model and register


@dataclass(frozen=True, slots=True)
class _Data:
    """What the run reads from its files before the services are needed."""

    renderer: Renderer
    prompts: PromptSource | None  # not in a replay
    supervised: SupervisedSource | None
    validation_sets: tuple[ValidationSet, ...]


class Assembly:
    """The parts of one run. `run` waits for the services, builds the loop and runs it to the end."""

    def __init__(
        self, config: RunConfig, store: Store, registry: Registry, control: Control, caller: Caller
    ) -> None:
        self._config = config
        self._control = control
        self._journal = Journal(store, config.run.name)
        self._checkpoints = Checkpoints(config.folder / "checkpoints", config.checkpoint.keep)
        timeout_s = config.coordinator.request_timeout_s
        self._replicas = Replicas(caller, timeout_s)
        self._rewards = Rewards(config.reward.retries)
        self._generation = Generation(
            self._replicas,
            self._rewards,
            model="actor",
            max_attempts=config.coordinator.max_sample_attempts,
            timeout_s=timeout_s,
        )
        self._sync = (
            WeightSync(
                lambda: self._membership.models["actor"],
                self._replicas,
                config.rollout.dtype,
                finish_running=not config.coordinator.partial_rollouts,
            )
            if config.run.mode == "train"
            else None
        )
        # a replica gets traffic once it holds the current weights; without a trainer, its own are
        admit = self._sync.catch_up if self._sync else self._replicas.route
        self._membership = Membership(registry, self._replicas, self._rewards, caller, timeout_s, admit)

    async def run(self, resume: bool) -> None:
        """Ends with the loop, or with the first error of what runs beside it."""
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(self._membership.follow()),
                tasks.create_task(self._generation.run()),
            ]
            loop = await self._build(resume)
            await loop.run()
            for task in beside:
                task.cancel()

    async def _build(self, resume: bool) -> Loop:
        config = self._config
        trains, generates = config.run.mode != "rollout_only", config.run.mode != "train_only"
        # reading takes seconds: in a thread, since services register and progress is asked for meanwhile
        data = await asyncio.to_thread(self._read_data, trains, generates)
        # everything that can be wrong with the data has been said: now the services
        await self._membership.wait_for(
            (dict.fromkeys(config.roles, 1) if trains else {})
            | ({"reward": 1, "rollout": config.rollout.replicas} if generates else {}),
            START_TIMEOUT_S,
        )
        models = self._membership.models
        for role, model in models.items():
            await self._check_tokenizer(role, model, data.renderer)
        return await self._loop(resume, data, models)

    async def _loop(self, resume: bool, data: _Data, models: Models) -> Loop:
        """Restores the last checkpoint where asked to, and opens the run's next lineage."""
        config, checkpoint, best, carried, step = self._config, None, None, None, 0
        prompts = data.prompts
        if resume and (steps := self._checkpoints.steps()):
            state, snapshot, folder = self._checkpoints.load(steps[-1])
            step, best, checkpoint = state.step, state.best, Checkpoint(state.step, state.version, snapshot)
            carried = state.algorithm
            for role in config.trained if models else ():
                await models[role].load_checkpoint(folder / role)
            if prompts and state.cursor:
                prompts.load(state.cursor)
            log.info("resumes after step %d, version %s", step, state.version)
        restored = await self._journal.restore(checkpoint)
        sampling = _sampling(config.rollout.sampling, data.renderer, config.run.seed)
        version = Version(restored.lineage, checkpoint.version.number if checkpoint else 0)
        source: Source
        if prompts:
            source = self._generate_source(prompts, sampling, config.run.steps - step)
            source.restore(restored.groups, version)
        else:
            assert config.data.replay is not None
            source = ReplaySource(config.data.replay, step + 1)
        parts = Parts(
            source=source,
            control=self._control,
            metrics=MetricsFile(config.folder / "metrics.jsonl", step),
            journal=self._journal,
            checkpoints=self._checkpoints,
            prompts=prompts,
            rewards=self._rewards,
            generation=self._generation,
            sync=self._sync,
            models=models,
            algorithm=Algorithm(config, models, carried) if models else None,
            supervised=None if checkpoint else data.supervised,
            validation_sets=data.validation_sets,
            sampling=sampling,
        )
        return Loop(config, parts, version, step, best)

    def _read_data(self, trains: bool, generates: bool) -> _Data:
        config = self._config
        renderer = Renderer(config.model.path)
        prompts = None if config.data.replay else self._prompt_source(renderer)
        supervised = (
            SupervisedSource(config.warmup.source, renderer, config.run.seed)
            if trains and config.warmup.steps and config.warmup.source
            else None
        )
        return _Data(renderer, prompts, supervised, self._validation_sets(renderer) if generates else ())

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

    def _generate_source(self, prompts: PromptSource, sampling: Sampling, steps: int) -> GenerateSource:
        coordinator, wanted = self._config.coordinator, self._config.algorithm.filter
        return GenerateSource(
            prompts,
            self._generation,
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
