"""Assembles a run from its config and registered services, new or from a checkpoint."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from atoll.config.schema import Role, RunConfig
from atoll.coordinator.algorithm.algorithm import Algorithm, AlgorithmState
from atoll.coordinator.algorithm.filters import NO_COUNTS, DynamicSampling
from atoll.coordinator.algorithm.models import Models
from atoll.coordinator.background import BackgroundWork, first_cause
from atoll.coordinator.control import RunControl, RunState
from atoll.coordinator.data.datasets import Cursor
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.directory import ServiceDirectory, TrainerLostError
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.fleet.replicas import Replicas
from atoll.coordinator.fleet.run_end import expected_services
from atoll.coordinator.journal.checkpoints import Checkpoints, CoordinatorState
from atoll.coordinator.journal.journal import Checkpoint, Journal, Restored
from atoll.coordinator.journal.ledger import LEDGER, Ledger
from atoll.coordinator.learners import Learners
from atoll.coordinator.loop import WARMUP_EXPORT, Loop, LoopParts, LoopSettings, LoopStart, Push, skip_push
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rewards.servers import Servers
from atoll.coordinator.rewards.verdict_sources import ServerGrader
from atoll.coordinator.rollouts.generation import Generation
from atoll.coordinator.rollouts.group_sources import GenerateSource, GroupSource, ReplaySource
from atoll.coordinator.rollouts.session_servers import SessionServers
from atoll.coordinator.run_data import RunData, read_data
from atoll.coordinator.steps import GroupSteps, NoRecipe, StepSource
from atoll.coordinator.summary import Outcome
from atoll.coordinator.supervised import SupervisedSteps
from atoll.coordinator.validation import evaluate
from atoll.coordinator.warmup import NoWarmUp, SupervisedWarmUp, WarmUp
from atoll.coordinator.weight_sync.canary import Canary
from atoll.coordinator.weight_sync.sync import OwnWeights, WeightSync
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.dump import DUMPS, DumpFolder, last_dump, set_dumps_aside
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.runtime.rendering import Renderer
from atoll.runtime.store import Store
from atoll.runtime.telemetry import METRICS_FILE, MetricsFile, rows_before
from atoll.wire.types import ExternalServer, Group, ServiceEntry, Version

log = logging.getLogger(__name__)

POLICY = "actor"  # the model that replicas serve


class Assembly:
    """Owns the parts of one run. `run` waits for the services, builds the loop and runs it to the end."""

    def __init__(
        self,
        config: RunConfig,
        store: Store,
        registry: Registry,
        servers: Servers,
        control: RunControl,
        caller: Caller,
    ) -> None:
        self._config, self._control = config, control
        ledger = Ledger(config.folder / LEDGER)
        self._journal = Journal(store, config.run.name, ledger, config.store.max_mb << 20)
        self._checkpoints = Checkpoints(config.folder / "checkpoints", config.checkpoint.keep)
        timeout_s = config.coordinator.request_timeout_s
        self._dumps = DumpFolder(
            config.folder / DUMPS, config.coordinator.dump, required=config.run.mode == "rollout_only"
        )
        self._replicas = Replicas(caller, timeout_s)
        self._servers = servers
        graders = config.reward.graders
        self._rewards = Rewards(
            config.reward.retries,
            [ServerGrader(servers, g.server, g.weight, timeout_s) for g in graders if g.server],
            asks_own=any(not grader.server for grader in graders),
            wait_timeout_s=timeout_s,
            absence_timeout_s=config.coordinator.start_timeout_s,
            tell=control.note,
        )
        self._agent_hosts, self._gateways = AgentHosts(), Gateways()
        self._session_servers = SessionServers(servers, self._rewards, caller.token)
        self._sync = (
            WeightSync(
                self._replicas,
                Canary(config.model.path, config.weights.canary_every, config.weights.canary_tolerance),
                config.weights,
                config.rollout.dtype,
                finish_running=not config.coordinator.partial_rollouts,
                first_epoch=(caller.fence or 0) << 32,
                takes_turns=config.takes_turns,
            )
            if config.run.mode == "train"
            else None
        )
        self._membership = ServiceDirectory(
            registry,
            self._replicas,
            self._rewards,
            self._agent_hosts,
            self._gateways,
            caller,
            timeout_s,
            self._sync or OwnWeights(self._replicas),
            POLICY,
            control.note,
        )
        control.departures.serve(self._let_go)

    async def _let_go(self, entry: ServiceEntry) -> None:
        """Returns once a service that leaves has nothing in progress; a trainer, once the loop has saved."""
        await self._membership.drain(entry)
        if entry.role in self._config.roles:
            await self._control.hand_over(entry.name)

    async def run(self, resume: bool) -> Outcome:
        """Ends with the loop, or with the first error of a background task. If a trainer is lost and returns,
        restarts the loop from the last checkpoint. Returns how the run ended.
        """
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._membership.follow()),
                tasks.create_task(self._servers.watch()),
            ]
            await self._servers.open(
                [ExternalServer(**server.model_dump()) for server in self._config.servers]
            )
            while True:
                try:
                    outcome = await self._run_once(resume)
                    break
                except* ServiceUnavailableError as errors:
                    await self._recover(first_cause(errors))
                    resume = True
            for task in background:
                task.cancel()
        return outcome

    async def _run_once(self, resume: bool) -> Outcome:
        """Runs the loop to its end. Raises a group of errors, including TrainerLostError if a trainer leaves;
        the loop has ended by then.
        """
        async with asyncio.TaskGroup() as tasks:
            generation = Generation(
                self._replicas,
                self._rewards,
                {agent.name: agent for agent in self._config.agents},
                self._agent_hosts,
                self._gateways,
                self._session_servers,
                model=POLICY,
                max_attempts=self._config.coordinator.max_sample_attempts,
                sample_timeout_s=self._config.coordinator.sample_timeout_s,
                timeout_s=self._config.coordinator.request_timeout_s,
            )
            watching = tasks.create_task(self._membership.watch_trainers())
            background = BackgroundWork(generation.run())
            try:
                loop = await self._build(resume, generation, background)
                await self._control.report(error="")
                outcome = await loop.run()
            finally:
                await background.end()
            watching.cancel()
        return outcome

    async def _recover(self, error: BaseException) -> None:
        """Waits for lost trainers to return, while other services keep running.

        A failed call is not enough: a trainer is lost once the registry says so. Raises `error` if none is.
        """
        log.warning("the loop stops: %s", error)
        await self._control.report(state=RunState.RECOVERING, error=str(error))
        await self._control.let_go()
        try:
            with suppress(TrainerLostError):
                async with asyncio.timeout(2 * self._config.coordinator.lease_s):
                    await self._membership.watch_trainers(or_absent=True)
        except TimeoutError:
            raise error from None
        await self._membership.reconnect()
        if self._sync:
            await self._sync.use_trainer(None)

    async def _build(self, resume: bool, generation: Generation, background: BackgroundWork) -> Loop:
        config = self._config
        trains, generates = config.run.mode != "rollout_only", config.run.mode in ("train", "rollout_only")
        # reading takes seconds: in a thread, so that services can register and query progress
        data = await asyncio.to_thread(read_data, config)
        # data errors have been raised by now; wait for the services
        await self._membership.wait_for(
            self._membership.needed(
                expected_services(config) | (dict.fromkeys(config.roles, 1) if trains else {})
            ),
            config.coordinator.start_timeout_s,
        )
        if generates:
            await self._wait_for_servers()
        if self._sync:
            await self._sync.use_trainer(self._membership.model("actor"), self._membership.models)
        models = self._membership.models
        for role, model in models.items():
            await self._check_tokenizer(role, model, data.renderer)
        return await self._loop(resume, data, models, generation, background)

    async def _wait_for_servers(self) -> None:
        """Waits until graders and agents have their servers. Users register them: there is no deadline."""
        needed = self._config.needed_servers
        if missing := [" ".join(name) for name in self._servers.missing(needed)]:
            register = f"atoll register {missing[0]} URL --protocol PROTOCOL --run {self._config.folder}"
            reason = f"waiting for external servers: {', '.join(missing)}; register each: {register}"
            log.warning("the run is %s", reason)
            await self._control.report(error=reason)
            await self._servers.wait_for(needed)

    async def _loop(
        self,
        resume: bool,
        data: RunData,
        models: Mapping[str, TrainerClient],
        generation: Generation,
        background: BackgroundWork,
    ) -> Loop:
        """Restores the last checkpoint if asked to, and opens the run's next lineage."""
        config = self._config
        trained = {role: models[role] for role in config.trained if role in models}
        checkpoint, state = await self._resume(trained) if resume else (None, None)
        step = state.step if state else 0
        if data.rows and state and state.cursor:
            data.rows.load(state.cursor)
        set_dumps_aside(config.folder / DUMPS, after=step)
        with self._checkpoints.explain_damage(step):
            restored = await self._journal.restore(checkpoint)
        version = Version(restored.lineage, checkpoint.version.number if checkpoint else 0)
        metrics = MetricsFile(config.folder / METRICS_FILE, step if checkpoint else None)
        push = self._sync.push_and_measure if self._sync else skip_push
        parts = LoopParts(
            steps=self._steps(data, models, generation, background, restored, version, state),
            learners=Learners(
                models,
                {role: section for role, section in config.roles.items() if role in models},
                num_steps=config.run.steps,
                num_epochs=config.algorithm.num_epochs,
                critic_warmup=config.critic.warmup_steps if config.critic else 0,
                started_from_warmup=config.started_from_warmup,
                one_at_a_time=config.takes_turns,
            ),
            push=push,
            warmup=self._warmup(data, models, generation, background, push),
            control=self._control,
            metrics=metrics,
            journal=self._journal,
            checkpoints=self._checkpoints,
            finish_running=generation.finish_running,
        )
        rows = rows_before(config.folder)
        self._control.continue_from(state.seconds if state else 0.0)
        start = LoopStart(version, rows=list(rows.values()), seconds=self._control.seconds)
        if state:
            start = replace(
                start,
                step=step,
                best=state.best,
                unrecorded=None if step in rows else state.row,
                resumed=True,
            )
        settings = LoopSettings(
            config.run, config.validation, config.checkpoint, config.guards, config.reward.graders
        )
        return Loop(settings, parts, start, time.monotonic)

    async def _resume(
        self, trained: Mapping[Role, TrainerClient]
    ) -> tuple[Checkpoint, CoordinatorState] | tuple[None, None]:
        """Restores the last checkpoint in every trained model; in rollout_only, reads the last dump."""
        folder = self._config.folder
        if not trained and (dump := await asyncio.to_thread(last_dump, folder / DUMPS)):
            log.info("resuming after the dump of step %d", dump[0])
            return Checkpoint(*dump, None), CoordinatorState(*dump, None, None, AlgorithmState())
        if trained and (saved := self._checkpoints.steps()):
            with self._checkpoints.explain_damage(saved[-1]):
                state, journal, path = self._checkpoints.load(saved[-1])
                for role, model in trained.items():
                    await model.load_checkpoint(path / role)
            log.info("resuming after step %d, version %s", state.step, state.version)
            return Checkpoint(state.step, state.version, journal), state
        for model in trained.values():
            await model.load_checkpoint(None)
        log.info("no checkpoint found, starting from scratch")
        return None, None

    def _steps(
        self,
        data: RunData,
        models: Models,
        generation: Generation,
        background: BackgroundWork,
        restored: Restored,
        version: Version,
        state: CoordinatorState | None,
    ) -> StepSource:
        """The step source for the steps after that of `state`."""
        config, coordinator = self._config, self._config.coordinator
        if data.rows:
            actor, rows_per_step = models["actor"], coordinator.prompts_per_step
            return SupervisedSteps(data.rows, data.held_out, actor, rows_per_step)

        async def validate(step: int, version: Version) -> Mapping[str, float]:
            async def keep(name: str, groups: Sequence[Group]) -> None:
                await self._dumps.write_answers(name, step, version, groups)

            sets, run = data.validation_sets, config.run.name
            return await background.wait_for(evaluate(sets, generation, run, version.number, keep))

        return GroupSteps(
            self._groups(data, generation, restored, version, state),
            Algorithm(config, models, state.algorithm if state else None) if models else NoRecipe(),
            self._control,
            background,
            prompts_per_step=coordinator.prompts_per_step,
            dumps=self._dumps,
            meters=[
                self._rewards.take_metrics,
                lambda: {
                    "timing_s/reward": self._rewards.take_seconds(),
                    "reward/timeouts": self._rewards.take_timeouts(),
                },
                generation.take_metrics,
            ],
            evaluate=validate,
            release=self._sync.release if self._sync else None,
        )

    def _groups(
        self,
        data: RunData,
        generation: Generation,
        restored: Restored,
        version: Version,
        state: CoordinatorState | None,
    ) -> GroupSource:
        coordinator, wanted = self._config.coordinator, self._config.algorithm.filter
        step = state.step if state else 0
        if not data.prompts:
            return ReplaySource(data.replay[step:])
        if restored.cursor:
            data.prompts.load(Cursor.parse(restored.cursor))
        source = GenerateSource(
            data.prompts,
            generation,
            self._journal,
            sampling=data.sampling,
            prompts_per_step=coordinator.prompts_per_step,
            samples_per_prompt=coordinator.samples_per_prompt,
            max_staleness=coordinator.max_staleness,
            weighs_turns=coordinator.on_age == "weigh",
            cuts_sessions=coordinator.on_age == "cut",
            steps=self._config.run.steps - step,
            max_dropped_share=coordinator.max_dropped_share,
            greedy_baseline=coordinator.greedy_baseline,
            dynamic_sampling=DynamicSampling(wanted, coordinator.prompts_per_step) if wanted else None,
        )
        source.restore(restored.groups, version, state.counters if state else NO_COUNTS)
        return source

    def _warmup(
        self, data: RunData, models: Models, generation: Generation, background: BackgroundWork, push: Push
    ) -> WarmUp:
        config = self._config
        if not data.warmup:
            return NoWarmUp()

        async def score(version: Version) -> float:
            """The mean score of the first validation set, sampled as in training."""
            await push(version)
            first = data.validation_sets[0]
            probe = replace(first, name="warmup", sampling=data.sampling, num_samples=1)
            score = evaluate([probe], generation, config.run.name, version.number)
            metrics = await background.wait_for(score)
            self._rewards.take_metrics()  # what it dropped or retried is not the first step's
            if self._sync:
                await self._sync.release()
            return metrics["val/warmup/avg@1"]

        export = config.folder.absolute() / WARMUP_EXPORT if config.started_from_warmup else None
        return SupervisedWarmUp(config.warmup, data.warmup, models["actor"], self._control, score, export)

    async def _check_tokenizer(self, role: str, model: TrainerClient, renderer: Renderer) -> None:
        info = await model.info()
        if info.tokenizer_digest != renderer.digest:
            raise UserError(
                f"the {role}'s model folder {info.model} has a different tokenizer.json than the "
                f"coordinator's {self._config.model.path}: use the same folder for both"
            )
