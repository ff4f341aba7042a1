"""Loss terms of trained tokens: for the policy, a critic, and the warm-up.

An objective computes the loss terms of a micro-batch's tokens from their hidden states; the caller sums
loss_weights * token loss and takes the gradient.

Letters in shapes: T tokens of a batch or micro-batch, t of them on this context rank, N trained ones (loss
weight not 0), n of them on this context rank, H hidden size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from atoll.config.schema import KLConfig
from atoll.runtime.errors import UserError
from atoll.trainer.losses.kl import full_kl, kl_penalty
from atoll.trainer.losses.loss import MAX_LOG_RATIO, PolicyTokens, value_loss
from atoll.trainer.megatron import pipeline
from atoll.trainer.megatron.forward import Forward, Rows, Targets
from atoll.trainer.megatron.model import output_weight
from atoll.wire.types import Batch, Bool, Float32, PolicyBatch, StepKey, SupervisedBatch, ValueBatch

TokenLoss = Callable[[PolicyTokens], tuple[Tensor, dict[str, Tensor]]]
# (logprobs_N, old_logprobs_N, advantages_N, seed) -> chosen_N, N being the tokens of the whole minibatch
Select = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """A micro-batch's trained tokens. All tensors are [N]."""

    loss_N: Tensor
    weights_N: Tensor
    losses: Mapping[str, Tensor]  # reported as the sum of weight * value
    values: Mapping[str, Tensor]  # reported as the mean over tokens; where the name ends in _max, as maximum


class Objective(Protocol):
    """Of one type of batch."""

    def prepare(self, key: StepKey, batch: Any) -> Batch:
        """The batch as `terms` needs it, before it is cut. Raises UserError if it lacks something."""
        ...

    def inputs(self, part: Any) -> Any:
        """What `terms` needs of one micro-batch, on the host."""
        ...

    def terms(self, inputs: Any, hidden_tH: Tensor) -> LossTerms:
        """Of one micro-batch; `inputs` are on the device."""
        ...

    def nothing(self) -> LossTerms:
        """Empty terms with the names of all metrics, for ranks without a micro-batch."""
        ...


class SupervisedObjective:
    """The negative log-likelihood of the policy's own distribution: temperature 1."""

    def __init__(self, policy: Forward) -> None:
        self._policy = policy

    def prepare(self, key: StepKey, batch: SupervisedBatch) -> SupervisedBatch:
        return batch

    def inputs(self, part: SupervisedBatch) -> tuple[Targets, Tensor]:
        trained = np.flatnonzero(part.loss_weights)
        return self._policy.targets(part.segments, trained), torch.from_numpy(part.loss_weights[trained])

    def terms(self, inputs: tuple[Targets, Tensor], hidden_tH: Tensor) -> LossTerms:
        targets, weights_N = inputs
        return self._of(*self._policy.logprobs(hidden_tH, targets, temperature=1.0), weights_N)

    def nothing(self) -> LossTerms:
        return self._of(*_empty(self._policy, 3))

    def _of(self, logprobs_N: Tensor, entropy_N: Tensor, weights_N: Tensor) -> LossTerms:
        return LossTerms(
            -logprobs_N, weights_N, {"actor/nll_loss": -logprobs_N}, {"actor/entropy": entropy_N}
        )


class ValueObjective:
    """A critic's: a token's value is what the head says after the token before it."""

    def __init__(self, critic: Forward, role: str, clip: float) -> None:
        self._critic, self._role, self._clip = critic, role, clip

    def prepare(self, key: StepKey, batch: ValueBatch) -> ValueBatch:
        return batch

    def inputs(self, part: ValueBatch) -> tuple[Rows, Tensor, Tensor, Tensor]:
        trained = np.flatnonzero(part.loss_weights)
        values_N, returns_N, weights_N = (
            torch.from_numpy(array[trained]) for array in (part.values, part.returns, part.loss_weights)
        )
        return self._critic.rows(part.segments.predecessors[trained]), values_N, returns_N, weights_N

    def terms(self, inputs: tuple[Rows, Tensor, Tensor, Tensor], hidden_tH: Tensor) -> LossTerms:
        rows, *rest = inputs
        return self._of(self._critic.values(hidden_tH, rows), *rest)

    def nothing(self) -> LossTerms:
        return self._of(*_empty(self._critic, 4))

    def _of(self, values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, weights_N: Tensor) -> LossTerms:
        loss_N, values = value_loss(values_N, old_values_N, returns_N, self._clip)
        named = {f"{self._role}/{name}": value for name, value in values.items()}
        return LossTerms(loss_N, weights_N, {f"{self._role}/vf_loss": loss_N}, named)


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The run's settings of the policy loss; functions have their parameters bound."""

    loss: TokenLoss
    select: Select | None = None  # picks the tokens that the loss acts on
    entropy_coef: float = 0.0
    kl: KLConfig | None = None  # none: not in the loss


@dataclass(frozen=True, eq=False)
class _Minibatch(PolicyBatch):
    chosen: Bool  # [T] the tokens that the loss acts on


@dataclass(frozen=True, eq=False)
class _PolicyInputs:
    """What the policy's objective reads of a micro-batch's N trained tokens."""

    targets: Targets
    old_logprobs_N: Tensor | None  # none: those of this forward pass
    ref_logprobs_N: Tensor | None
    advantages_N: Tensor
    sample_N: Tensor
    chosen_N: Tensor
    rollout_logprobs_N: Tensor
    weights_N: Tensor
    reference: pipeline.Inputs | None  # of the reference's own forward pass, for the full KL


class PolicyObjective:
    """policy loss + kl.coef * KL(policy || reference) - entropy_coef * entropy.

    `reference` is the policy that the `full` KL is computed from; other estimators take its
    log-probabilities from the batch.
    """

    def __init__(self, policy: Forward, settings: PolicySettings, reference: Forward | None = None) -> None:
        self._policy, self._settings, self._reference = policy, settings, reference

    def prepare(self, key: StepKey, batch: PolicyBatch) -> _Minibatch:
        self._check(batch)
        return _Minibatch(**vars(batch), chosen=self._choose(key, batch))

    def inputs(self, part: _Minibatch) -> _PolicyInputs:
        trained = np.flatnonzero(part.loss_weights)

        def trained_only(array_T: Float32 | Bool | None) -> Any:
            return None if array_T is None else torch.from_numpy(array_T[trained])

        kl = self._settings.kl
        _, sample_N = np.unique(part.samples[trained], return_inverse=True)
        targets = self._policy.targets(part.segments, trained)
        is_full = kl is not None and kl.estimator == "full"
        assert self._reference is not None or not is_full, "the full KL is computed beside the reference"
        return _PolicyInputs(
            targets,
            trained_only(part.old_logprobs),
            trained_only(part.ref_logprobs),
            trained_only(part.advantages),
            torch.from_numpy(sample_N),
            trained_only(part.chosen),
            trained_only(part.rollout_logprobs),
            trained_only(part.loss_weights),
            self._reference.inputs(replace(part.segments, routes=None))
            if self._reference and is_full
            else None,
        )

    def terms(self, inputs: _PolicyInputs, hidden_tH: Tensor) -> LossTerms:
        logprobs_N, entropy_N = self._policy.logprobs(hidden_tH, inputs.targets, self._policy.temperature)
        old_N = logprobs_N.detach() if inputs.old_logprobs_N is None else inputs.old_logprobs_N
        tokens = PolicyTokens(
            logprobs_N, old_N, inputs.advantages_N, sample_N=inputs.sample_N, chosen_N=inputs.chosen_N
        )
        kl_N = self._kl(inputs, hidden_tH, logprobs_N)
        return self._of(tokens, entropy_N, kl_N, inputs.rollout_logprobs_N, inputs.weights_N)

    def nothing(self) -> LossTerms:
        logprobs, old, advantages, *rest = _empty(self._policy, 7)
        none = torch.zeros(0, dtype=torch.int64, device=self._policy.device)
        tokens = PolicyTokens(logprobs, old, advantages, sample_N=none, chosen_N=none.bool())
        return self._of(tokens, *rest)

    def _check(self, batch: PolicyBatch) -> None:
        """Before the first micro-batch, so that ranks which have none raise, too."""
        self._policy.check_temperature()
        kl = self._settings.kl
        if kl is not None and kl.estimator != "full" and batch.ref_logprobs is None:
            raise UserError(
                f"the loss has a KL penalty ({kl.estimator}), but the batch no reference logprobs: "
                "send ref_logprobs"
            )

    def _choose(self, key: StepKey, batch: PolicyBatch) -> Bool:
        """[T] the tokens that the loss acts on, the same however the batch is cut."""
        chosen_T = np.zeros(len(batch.loss_weights), bool)
        if self._settings.select is not None:
            trained = np.flatnonzero(batch.loss_weights)
            logprobs_N = self._policy.compute_logprobs(batch.segments)[trained]
            old_N = logprobs_N if batch.old_logprobs is None else batch.old_logprobs[trained]
            logprobs, old, advantages = map(torch.from_numpy, (logprobs_N, old_N, batch.advantages[trained]))
            seed = (key.step << 32) + key.minibatch
            chosen_T[trained] = self._settings.select(logprobs, old, advantages, seed).numpy()
        return chosen_T

    def _kl(self, inputs: _PolicyInputs, hidden_tH: Tensor, logprobs_N: Tensor) -> Tensor:
        kl, policy, reference = self._settings.kl, self._policy, self._reference
        if kl is None:
            return torch.zeros_like(logprobs_N)
        if inputs.reference is None:
            assert inputs.ref_logprobs_N is not None
            return kl_penalty(logprobs_N, inputs.ref_logprobs_N, kl.estimator)
        assert reference is not None
        with torch.no_grad():
            ref_hidden_tH = reference.hidden(inputs.reference)
        rows = inputs.targets.rows
        kl_n = full_kl(
            policy.local_hidden(hidden_tH, rows),
            output_weight(policy.model),
            reference.local_hidden(ref_hidden_tH, rows),
            output_weight(reference.model),
            policy.temperature,
            parallel_state.get_tensor_model_parallel_group(),
        )
        return policy.join(kl_n, rows)

    def _of(
        self, tokens: PolicyTokens, entropy_N: Tensor, kl_N: Tensor, rollout_N: Tensor, weights_N: Tensor
    ) -> LossTerms:
        """`kl_N` is 0 where the loss has no KL."""
        settings = self._settings
        policy_N, values = settings.loss(tokens)
        for name, value in {"its loss": policy_N, **values}.items():
            if value.shape != weights_N.shape:  # found in `nothing`, before anything is accumulated
                raise UserError(
                    f"algorithm.loss: {name} has shape {tuple(value.shape)}, expected one number per token: "
                    "return what each token contributes, without mean or sum"
                )
        loss_N = policy_N
        losses = {"actor/pg_loss": policy_N}
        if settings.entropy_coef:
            loss_N = loss_N - settings.entropy_coef * entropy_N
        if settings.kl is not None:
            loss_N = loss_N + settings.kl.coef * kl_N
            losses["actor/kl_loss"] = kl_N
        mismatch = _rollout_mismatch(tokens.old_logprobs_N, rollout_N)
        return LossTerms(loss_N, weights_N, losses, {"actor/entropy": entropy_N} | mismatch | values)


def _rollout_mismatch(old_N: Tensor, rollout_N: Tensor) -> dict[str, Tensor]:
    """How far the rollout engine's logprobs are from the trainer's; k3 estimates KL(rollout || trainer).

    Source: http://joschu.net/blog/kl-approx.html.
    """
    difference_N = old_N - rollout_N
    clamped_N = difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "rollout_corr/logprob_diff_mean": difference_N.abs(),
        "rollout_corr/logprob_diff_max": difference_N.abs(),
        "rollout_corr/k3": torch.expm1(clamped_N) - clamped_N,
    }


def _empty(forward: Forward, count: int) -> list[Tensor]:
    return [torch.zeros(0, device=forward.device) for _ in range(count)]
