"""The algorithm composed by the config: turns a batch of scored groups into minibatches for each trained
model.

As in HybridFlow (https://arxiv.org/abs/2409.19256) all models compute logprobs and values of the whole batch
concurrently; then advantages are estimated here, and each trained model gets its minibatches.

Letters in shapes: N samples, K graders, T tokens of the batch, R its loss-masked tokens, which an
estimator counts as its T (coordinator/experience.py).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from atoll.config.functions import load
from atoll.config.schema import Role, RunConfig
from atoll.coordinator.algorithm.advantage import ADVANTAGES
from atoll.coordinator.algorithm.constraint import combine_advantages, update_multiplier
from atoll.coordinator.algorithm.correction import combine, correct
from atoll.coordinator.algorithm.estimates import Estimate, Estimator, Float64, Trajectories
from atoll.coordinator.algorithm.experience import BatchLayout, lay_out, loss_weights, split, weighing_tokens
from atoll.coordinator.algorithm.filters import components_of
from atoll.coordinator.algorithm.kl import adapt_kl_coef, kl_penalty
from atoll.coordinator.algorithm.metrics import critic_metrics, summarize
from atoll.coordinator.algorithm.models import BatchRefusedError, ModelClient, Models
from atoll.coordinator.algorithm.reweight import REWEIGHTS
from atoll.runtime.errors import AtollError, UserError
from atoll.runtime.telemetry import StepTimer
from atoll.wire.types import Batch, Bool, Float32, Group, PolicyBatch, SampleId, Segments, ValueBatch

Question = Callable[[ModelClient], Awaitable[Float32]]


@dataclass(frozen=True, slots=True)
class AlgorithmState:
    """Algorithm state across steps; saved in every checkpoint."""

    kl_coef: float = 0.0  # of an adaptive penalty in the reward
    log_multiplier: float = 0.0  # of the constraint on the cost


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    batches: Mapping[Role, Sequence[Batch]]  # one per minibatch, for each model that trains
    metrics: Mapping[str, float]
    samples: Sequence[Sequence[SampleId]] = ()  # of each minibatch
    refusal: str = ""  # why there is no batch: a model refused it


@dataclass(frozen=True, slots=True, eq=False)
class _ModelOutputs:
    """Outputs of the models for a batch, each [T]; None if the recipe does not need them."""

    actor: Float32 | None
    reference: Float32 | None
    values: Float32 | None
    cost_values: Float32 | None
    rewards: Float32 | None
    costs: Float32 | None


@dataclass(frozen=True, slots=True, eq=False)
class _CriticTargets:
    """A critic's targets: its old values, and the returns that they should predict."""

    role: Role
    values_R: Float64
    returns_R: Float64


class Algorithm:
    def __init__(self, config: RunConfig, models: Models, state: AlgorithmState | None) -> None:
        algorithm = config.algorithm
        self._config = algorithm
        self._models = models
        roles = config.roles
        self._asking = asyncio.Semaphore(1 if config.takes_turns else len(roles))
        # models that it does not train are called once per step; if one is asked at a time, it has room alone
        makes_room = config.takes_turns and len(roles) > 1
        self._rests = {r for r, s in roles.items() if s.offload and (makes_room or r not in config.trained)}
        self._graders = config.reward.graders
        self._ungraded_agents = config.ungraded_agents
        self._reward_weight = config.reward_model.weight if config.reward_model else 0.0
        self._max_length = config.rollout.sampling.max_new_tokens
        self._advantage: Estimator = load(algorithm.advantage, ADVANTAGES)
        self._reweight: Callable[[Float64], Float64] = (
            load(algorithm.reweight, REWEIGHTS) if algorithm.reweight else np.ones_like
        )
        self.state = state or AlgorithmState(
            kl_coef=algorithm.kl.coef if algorithm.kl else 0.0,
            log_multiplier=math.log(algorithm.constraint.initial) if algorithm.constraint else 0.0,
        )

    async def prepare(self, groups: Sequence[Group], timer: StepTimer, oldest: int = 0) -> PreparedStep:
        """Calls the models, then estimates advantages; updates the state for the next step unless it fails.
        A turn with a token of a version before number `oldest` is not trained on.

        Raises BatchRefusedError if a model does not take the batch, AtollError if the estimator fails.
        """
        before = self.state
        try:
            return await self._prepare(groups, timer, oldest)
        except Exception:
            self.state = before
            raise

    async def _prepare(self, groups: Sequence[Group], timer: StepTimer, oldest: int) -> PreparedStep:
        layout = lay_out(groups)
        answers = await self._ask(layout.segments, timer)
        with timer.phase("adv"):
            metrics: dict[str, float] = {}
            old_R = self._old_logprobs(layout, answers)
            scores_N, rewards_R = self._scores(groups, layout, answers)
            metrics |= summarize("critic/score", scores_N)
            rewards = self._rewards(groups, layout, scores_N, rewards_R, old_R, answers, metrics)
            estimate = self._estimate(rewards)
            metrics |= critic_metrics("critic", rewards.values_T, estimate.returns_T)
            advantages_R, learned = estimate.advantages_T, [_critic_targets("critic", rewards, estimate)]
            if self._config.constraint:
                costs = self._costs(groups, layout, answers, rewards)
                cost_estimate = self._estimate(costs)
                metrics |= critic_metrics("cost_critic", costs.values_T, cost_estimate.returns_T)
                learned.append(_critic_targets("cost_critic", costs, cost_estimate))
                multiplier = self._constrain(float(costs.scores_N.mean()), metrics)
                advantages_R = combine_advantages(advantages_R, cost_estimate.advantages_T, multiplier)
            metrics |= summarize("critic/advantages", advantages_R)
            weighs_R = weighing_tokens(groups, oldest)
            advantages_R, mask_T = self._correct(layout, weighs_R, advantages_R, old_R, metrics)
            old_T = None if old_R is None else layout.place(old_R)
            weight_N = self._reweight(scores_N)
            in_loss = self._config.kl is not None and self._config.kl.where == "loss"
            reference_T = answers.reference if in_loss else None
            batches = self._batches(
                layout, mask_T, weight_N, layout.place(advantages_R), old_T, reference_T, learned
            )
            return PreparedStep(batches, metrics, self._samples(groups, layout))

    async def _ask(self, segments: Segments, timer: StepTimer) -> _ModelOutputs:
        config, kl = self._config, self._config.kl
        needs_actor = config.old_logprobs == "trainer" and (
            config.num_minibatches * config.num_epochs > 1
            or bool(config.correction)
            or (kl is not None and kl.where == "reward")
        )  # otherwise the update takes them from its own forward pass

        unrouted = replace(segments, routes=None)  # the experts are the actor's

        def logprobs(asked: Segments) -> Question:
            return lambda model: model.compute_logprobs(asked)

        def values(model: ModelClient) -> Awaitable[Float32]:
            return model.compute_values(unrouted)

        async def ask(role: Role, phase: str, question: Question, needed: bool = True) -> Float32 | None:
            if role not in self._models or not needed:
                return None
            async with self._asking:
                with timer.phase(phase):
                    try:
                        answer = await question(self._models[role])
                    except UserError as error:
                        raise BatchRefusedError(f"{role}: {error}") from error
                    if role in self._rests:
                        await self._models[role].offload()
                    return answer

        return _ModelOutputs(
            *await asyncio.gather(
                ask("actor", "old_log_prob", logprobs(segments), needs_actor),
                ask("reference", "ref", logprobs(unrouted), kl is not None and kl.estimator != "full"),
                ask("critic", "values", values),
                ask("cost_critic", "cost_values", values),
                ask("reward_model", "reward_model", values),
                ask("cost_model", "cost_model", values),
            )
        )

    def _old_logprobs(self, layout: BatchLayout, answers: _ModelOutputs) -> Float64 | None:
        """[R] old logprobs of the ratios; None: the trainer detaches them from its own forward pass."""
        if self._config.old_logprobs == "rollout":
            return layout.pick(layout.rollout_logprobs_T)
        return None if answers.actor is None else layout.pick(answers.actor)

    def _scores(
        self, groups: Sequence[Group], layout: BatchLayout, answers: _ModelOutputs
    ) -> tuple[Float64, Float64]:
        """[N] and [R] the graders' rewards, and the reward model's at the last token."""
        scores_N = np.array([sample.score for group in groups for sample in group.samples])
        if answers.rewards is None:
            return scores_N, layout.rewards_R
        model_N = self._reward_weight * _scores_at_last_token(layout, answers.rewards, "reward_model")
        return scores_N + model_N, layout.rewards_R + layout.at_the_end(model_N)

    def _rewards(
        self,
        groups: Sequence[Group],
        layout: BatchLayout,
        scores_N: Float64,
        rewards_R: Float64,
        old_R: Float64 | None,
        answers: _ModelOutputs,
        metrics: dict[str, float],
    ) -> Trajectories:
        """The rewards seen by estimators: with the KL penalty subtracted if the recipe says so."""
        kl = self._config.kl
        if kl and kl.where == "reward":
            assert old_R is not None
            assert answers.reference is not None
            kl_R = kl_penalty(old_R, layout.pick(answers.reference), kl.estimator)
            penalty_R = self.state.kl_coef * kl_R
            rewards_R = rewards_R - penalty_R
            scores_N = scores_N - layout.sums(penalty_R)
            mean = float(kl_R.mean()) if len(kl_R) else 0.0
            metrics |= {"actor/reward_kl_penalty": mean, "actor/kl_coef": self.state.kl_coef}
            if kl.target is not None:
                coef = adapt_kl_coef(self.state.kl_coef, mean, kl.target, kl.horizon, layout.num_samples)
                self.state = replace(self.state, kl_coef=coef)
        metrics |= summarize("critic/rewards", scores_N)
        names = [grader.name for grader in self._graders]
        return Trajectories(
            group_N=layout.group_N,
            lengths_N=layout.lengths,
            scores_N=scores_N,
            rewards_T=rewards_R,
            components_NK=np.array([components_of(groups, name, self._ungraded_agents) for name in names]).T,
            weights_K=np.array([grader.weight for grader in self._graders]),
            values_T=_values_before(layout, answers.values),
            baselines_N=_baselines(groups),
            branches=layout.branches,
            turn_lengths_U=layout.turn_lengths,
        )

    def _estimate(self, trajectories: Trajectories) -> Estimate:
        """Raises AtollError if the estimator fails: user code may raise anything."""
        expected = trajectories.rewards_T.shape
        try:
            estimate = self._advantage(trajectories)
            shapes = estimate.advantages_T.shape, estimate.returns_T.shape
            if shapes != (expected, expected):
                raise ValueError(f"advantages and returns have shapes {shapes}, expected {expected} twice")
        except Exception as error:
            raise AtollError(
                f"algorithm.advantage = {self._config.advantage.name!r} failed: {type(error).__name__}: "
                f"{error}; fix it, then continue with --resume"
            ) from error
        return estimate

    def _costs(
        self, groups: Sequence[Group], layout: BatchLayout, answers: _ModelOutputs, rewards: Trajectories
    ) -> Trajectories:
        """The same samples with their cost as reward, given at the last token by a grader or the cost
        model.
        """
        constraint = self._config.constraint
        assert constraint is not None
        if constraint.cost is not None:
            costs_N = components_of(groups, constraint.cost, self._ungraded_agents)
        else:
            assert answers.costs is not None
            costs_N = _scores_at_last_token(layout, answers.costs, "cost_model")
        return replace(
            rewards,
            scores_N=costs_N,
            rewards_T=layout.at_the_end(costs_N),
            components_NK=costs_N[:, None],
            weights_K=np.ones(1),
            values_T=_values_before(layout, answers.cost_values),
        )

    def _constrain(self, mean_cost: float, metrics: dict[str, float]) -> float:
        """This step's multiplier; this step's cost updates the next one's."""
        constraint, log_multiplier = self._config.constraint, self.state.log_multiplier
        assert constraint is not None
        metrics |= {"cost/mean": mean_cost, "cost/multiplier": math.exp(log_multiplier)}
        moved = update_multiplier(
            log_multiplier,
            mean_cost,
            limit=constraint.limit,
            learning_rate=constraint.learning_rate,
            maximum=constraint.maximum,
        )
        self.state = replace(self.state, log_multiplier=moved)
        return math.exp(log_multiplier)

    def _correct(
        self,
        layout: BatchLayout,
        weighs_R: Bool | None,
        advantages_R: Float64,
        old_R: Float64 | None,
        metrics: dict[str, float],
    ) -> tuple[Float64, Bool]:
        """Advantages times importance weights, and the loss mask [T] without rejected tokens and those that
        have no weight.

        Every policy loss grows in proportion to the advantage, so a weight there weighs the loss.
        """
        corrections, keep_R = self._config.correction, weighs_R
        if corrections:
            assert old_R is not None
            rollout_R = layout.pick(layout.rollout_logprobs_T)
            corrected = combine(
                [
                    correct(old_R, rollout_R, layout.lengths, c.level, c.method, c.low, c.high)
                    for c in corrections
                ]
            )
            metrics |= corrected.metrics
            advantages_R = advantages_R * corrected.weights_T
            keep_R = corrected.keep_T if keep_R is None else keep_R & corrected.keep_T
        if keep_R is None:
            return advantages_R, layout.loss_mask_T
        kept_T = layout.loss_mask_T.copy()
        kept_T[layout.trained] = keep_R
        return advantages_R, kept_T

    def _samples(self, groups: Sequence[Group], layout: BatchLayout) -> list[list[SampleId]]:
        """The samples of each minibatch, which consists of whole groups."""
        return [
            [id for number in np.unique(layout.group_N[part.samples]) for id in groups[number].ids()]
            for part in split(layout, self._config.num_minibatches)
        ]

    def _batches(
        self,
        layout: BatchLayout,
        mask_T: Bool,
        weight_N: Float64,
        advantages_T: Float32,
        old_T: Float32 | None,
        reference_T: Float32 | None,
        learned: Sequence[_CriticTargets | None],
    ) -> dict[Role, list[Batch]]:
        critics = [
            (critic.role, layout.place(critic.values_R), layout.place(critic.returns_R))
            for critic in learned
            if critic
        ]
        batches: dict[Role, list[Batch]] = {"actor": [], **{role: [] for role, _, _ in critics}}
        for part in split(layout, self._config.num_minibatches):
            of = part.tokens
            weights_T = loss_weights(
                mask_T[of],
                layout.sample_T[of],
                weight_N[part.samples],
                self._config.aggregation,
                self._max_length,
                part.samples.start,
            )
            batches["actor"].append(
                PolicyBatch(
                    part.segments,
                    samples=layout.sample_T[of],
                    loss_weights=weights_T,
                    advantages=advantages_T[of],
                    rollout_logprobs=layout.rollout_logprobs_T[of],
                    old_logprobs=None if old_T is None else old_T[of],
                    ref_logprobs=None if reference_T is None else reference_T[of],
                )
            )
            unrouted = replace(part.segments, routes=None)
            for role, values_T, returns_T in critics:
                batches[role].append(ValueBatch(unrouted, weights_T, values_T[of], returns_T[of]))
        return batches


def _critic_targets(role: Role, trajectories: Trajectories, estimate: Estimate) -> _CriticTargets | None:
    values_R = trajectories.values_T
    return None if values_R is None else _CriticTargets(role, values_R, estimate.returns_T)


def _values_before(layout: BatchLayout, values_T: Float32 | None) -> Float64 | None:
    """[R] a critic's value of the state before each loss-masked token; models return values after each
    token.
    """
    if values_T is None:
        return None
    return values_T[layout.segments.predecessors[layout.trained]].astype(np.float64)


def _scores_at_last_token(layout: BatchLayout, values_T: Float32, role: str) -> Float64:
    """[N] a model's verdict on each sample, 0 without tokens. Raises AtollError if one is not finite."""
    verdicts_N = np.where(layout.last_N >= 0, values_T[layout.last_N], 0.0).astype(np.float64)
    if not np.isfinite(verdicts_N).all():
        raise AtollError(
            f"the {role} gave {verdicts_N[~np.isfinite(verdicts_N)][0]} for a sample, expected a finite "
            f"number; look at the model in {role}.path"
        )
    return verdicts_N


def _baselines(groups: Sequence[Group]) -> Float64 | None:
    """[N] the score of the greedy sample of the same prompt; None without greedy samples."""
    scores = [group.baseline.score for group in groups if group.baseline]
    if len(scores) < len(groups):
        return None
    return np.repeat(np.array(scores), [len(group.samples) for group in groups])
