"""One rank's part of an update: forward and backward over micro-batches, then the optimizer.

The loss of a batch is sum(loss_weights * token loss), and gradients are summed over micro-batches and
data-parallel ranks, so the result does not depend on how the batch was cut.

Letters in shapes: T tokens of a micro-batch, N of them that the loss or the caller asks for, H hidden size.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from services.config.schema import OptimizerConfig
from services.runtime.errors import LostStateError, UserError
from services.trainer.attention import plan_attention
from services.trainer.batch import (
    Selection,
    check_batch,
    check_segments,
    flatten_batch,
    flatten_trees,
    plan_microbatches,
    select,
    take,
)
from services.trainer.logprobs import token_logprobs
from services.trainer.loss import LOSSES, Loss
from services.trainer.model import Policy, output_weight
from services.wire.types import Batch, Float32, Int32, Int64, LossSettings, Segments, StepKey

Metrics = dict[str, float]

NUM_RECORDS = 1024  # answered updates kept for repeated calls: more than the minibatches of one step


class Learner:
    """Owns the model and optimizer of one rank. Every rank makes the same calls in the same order.

    `shares_prefix`: the attention computes a shared prompt once; else each sample gets its own copy.
    """

    def __init__(
        self, policy: Policy, optimizer: OptimizerConfig, max_tokens: int, shares_prefix: bool
    ) -> None:
        self.policy = policy
        self.model = DistributedDataParallel(
            policy.model.config, DistributedDataParallelConfig(), policy.model
        )
        self.optimizer = _adamw(self.model, optimizer)
        self._max_grad_norm = optimizer.max_grad_norm
        self._max_tokens = max_tokens
        self._shares_prefix = shares_prefix
        self._device = next(policy.model.parameters()).device
        self.num_updates = 0  # of the optimizer, over all runs that led to these weights
        self.reset()

    def reset(self) -> None:
        """Forgets accumulated gradients and answered updates, as after loading a checkpoint."""
        self._forwarded: dict[StepKey, Metrics] = {}
        self._stepped: dict[StepKey, Metrics] = {}
        self._accumulated: list[StepKey] = []
        self.model.zero_grad_buffer()

    def compute_logprobs(self, segments: Segments, temperature: float) -> Float32:
        """[T] log-probability of each token at `temperature`; 0 for the first token of a root."""
        self._check(segments, temperature)
        num_tokens = len(segments.token_ids)
        whole, asked = Selection(segments, np.arange(num_tokens)), np.ones(num_tokens, bool)
        if not self._shares_prefix:
            whole, asked = flatten_trees(segments)  # of a repeated token, the first copy
        asked = asked & (whole.segments.predecessors >= 0)
        logprobs = torch.zeros(num_tokens, device=self._device)
        with torch.no_grad():
            for part in self._microbatches(whole.segments):
                targets = np.flatnonzero(asked[part.source])
                if len(targets) == 0:
                    continue
                logprobs_N, _ = self._logprobs(part.segments, targets, temperature)
                logprobs[whole.source[part.source[targets]]] = logprobs_N.float()
        _sum_over_data_parallel(logprobs)  # each token is on one data-parallel rank, 0 on the others
        return logprobs.cpu().numpy()

    def forward_backward(self, key: StepKey, batch: Batch, settings: LossSettings) -> Metrics:
        """Accumulates gradients of the batch's loss; a repeated key answers from its record.

        Metrics are over the whole batch: the loss, and means over the tokens that have a loss weight.
        """
        if key in self._forwarded:
            return self._forwarded[key]
        if settings.kind not in LOSSES:
            raise UserError(f"loss {settings.kind!r} is unknown: choose one of {sorted(LOSSES)}")
        self._check(batch.segments, settings.temperature)
        check_batch(batch)
        loss = LOSSES[settings.kind]
        flat = batch if self._shares_prefix else flatten_batch(batch)
        tally = _Tally(loss, self._device)
        for part in self._microbatches(flat.segments):
            self._backward(take(flat, part), loss, settings, tally)
        self._accumulated.append(key)
        return _record(self._forwarded, key, tally.metrics())

    def optim_step(self, key: StepKey, learning_rate: float) -> Metrics:
        """Applies what `forward_backward(key)` and those before it accumulated.

        Gradients are clipped to the global norm `max_grad_norm`. A gradient that is not finite changes
        nothing and reports actor/skipped_step = 1.
        """
        if key in self._stepped:
            return self._stepped[key]
        if key not in self._accumulated:
            raise LostStateError(
                f"no gradient was accumulated for {key}: the trainer restarted in between; "
                "load the last checkpoint and repeat the steps after it"
            )
        finalize_model_grads([self.model])
        self.optimizer.prepare_grads()
        norm = self._grad_norm()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            clip_grads_with_norm_(
                self.optimizer.get_parameters(), self._max_grad_norm, torch.tensor(norm), foreach=True
            )
            self.optimizer.step_with_ready_grads()
            self.num_updates += 1
        self.optimizer.zero_grad()
        self.model.zero_grad_buffer()
        self._accumulated.clear()
        metrics = {
            "actor/grad_norm": norm,
            "actor/lr": learning_rate,
            "actor/skipped_step": 0.0 if math.isfinite(norm) else 1.0,
        }
        return _record(self._stepped, key, metrics)

    def _grad_norm(self) -> float:
        """L2 over the whole model: what tensor-parallel ranks hold alike counts once."""
        square = get_total_norm(self.optimizer.get_main_grads_for_grad_norm(), foreach=True).square()
        dist.all_reduce(square, group=self.optimizer.get_grad_stats_parallel_group())
        return math.sqrt(square.item())

    def _check(self, segments: Segments, temperature: float) -> None:
        if temperature <= 0:
            raise UserError(
                f"temperature {temperature:g} has no log-probabilities to train on: "
                "set rollout.sampling.temperature above 0"
            )
        check_segments(segments, self.policy.spec.vocab_size, self.policy.spec.max_positions)

    def _microbatches(self, segments: Segments) -> Iterator[Selection]:
        """Those of this data-parallel rank."""
        ranks = parallel_state.get_data_parallel_world_size()
        plan = plan_microbatches(segments, self._max_tokens, ranks)
        for chosen in plan[parallel_state.get_data_parallel_rank()]:
            yield select(segments, chosen)

    def _backward(self, part: Batch, loss: Loss, settings: LossSettings, tally: "_Tally") -> None:
        trained = np.flatnonzero(part.loss_weights)
        if len(trained) == 0:
            return
        logprobs_N, entropy_N = self._logprobs(part.segments, trained, settings.temperature)
        old_N = logprobs_N.detach()
        if part.old_logprobs is not None:
            old_N = self._tensor(part.old_logprobs[trained])
        value, sums = loss.apply(
            logprobs_N,
            old_N,
            self._tensor(part.advantages[trained]),
            self._tensor(part.loss_weights[trained]),
            settings,
        )
        value.backward()  # type: ignore[no-untyped-call]
        differences_N = (logprobs_N.detach() - self._tensor(part.rollout_logprobs[trained])).abs()
        tally.add(value.detach(), sums, entropy_N, differences_N)

    def _logprobs(self, segments: Segments, targets: Int64, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [N] of the distributions that the target tokens came from."""
        hidden_TH = self.model(
            self._tensor(segments.token_ids).long(),
            self._tensor(segments.positions),
            plan_attention(segments, self._device),
        )
        return token_logprobs(
            hidden_TH.index_select(0, self._tensor(segments.predecessors[targets])),
            output_weight(self.policy.model),
            self._tensor(segments.token_ids[targets]).long(),
            temperature,
            parallel_state.get_tensor_model_parallel_group(),
        )

    def _tensor(self, array: Float32 | Int32 | Int64) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _Tally:
    """Adds up a batch's metrics over micro-batches and data-parallel ranks."""

    def __init__(self, loss: Loss, device: torch.device) -> None:
        self._loss = loss
        self._means = ("actor/entropy", "rollout_corr/logprob_diff_mean", *loss.means)
        self._sums = torch.zeros(2 + len(self._means), dtype=torch.float64, device=device)
        self._worst = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, value: Tensor, sums: dict[str, Tensor], entropy_N: Tensor, differences_N: Tensor) -> None:
        token_sums = (entropy_N.sum(), differences_N.sum(), *(sums[name] for name in self._loss.means))
        count = value.new_tensor(len(entropy_N))
        self._sums += torch.stack([value, count, *token_sums]).double()
        self._worst = torch.maximum(self._worst, differences_N.max())

    def metrics(self) -> Metrics:
        """Over the whole batch; the denominator of each mean is its number of tokens with a loss weight."""
        _sum_over_data_parallel(self._sums)
        dist.all_reduce(self._worst, dist.ReduceOp.MAX, parallel_state.get_data_parallel_group())
        value, count, *token_sums = self._sums.tolist()
        metrics = {name: total / max(count, 1) for name, total in zip(self._means, token_sums, strict=True)}
        metrics["rollout_corr/logprob_diff_max"] = self._worst.item()
        if not self._loss.on_rollouts:
            metrics = {name: v for name, v in metrics.items() if not name.startswith("rollout_corr/")}
        return {self._loss.name: value, "actor/num_tokens": count} | metrics


def _record(records: dict[StepKey, Metrics], key: StepKey, metrics: Metrics) -> Metrics:
    records[key] = metrics
    if len(records) > NUM_RECORDS:
        records.pop(next(iter(records)))  # the oldest
    return metrics


def _sum_over_data_parallel(tensor: Tensor) -> None:
    dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())


def _adamw(model: DistributedDataParallel, config: OptimizerConfig) -> MegatronOptimizer:
    """Decoupled weight decay on every parameter, as torch.optim.AdamW(model.parameters()) does."""
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
        ),
        [model],
        config_overrides={},  # Megatron's own default leaves out biases and norms
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        if "fused" in group:  # PyTorch's own AdamW, on a CPU: one kernel instead of a loop of small ones
            group["fused"] = True
    return optimizer
