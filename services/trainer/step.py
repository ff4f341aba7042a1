"""One rank's part of an update: forward and backward over micro-batches, then an optimizer step.

The loss of a batch is sum(loss_weights * token loss), and gradients are summed over micro-batches and
data-parallel ranks, so the result does not depend on how the batch was cut.

Letters in shapes: N trained tokens of a micro-batch.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from atoll.config.schema import OptimizerConfig
from atoll.runtime.errors import LostStateError, UserError
from atoll.trainer.batch import check_batch
from atoll.trainer.megatron.forward import Forward, reduce_over_replicas
from atoll.trainer.megatron.hf import load_weights
from atoll.trainer.objective import LossTerms, Objective
from atoll.wire.types import Batch, StepKey

Metrics = dict[str, float]

NUM_RECORDS = 1024  # answered updates kept for repeated calls: more than the minibatches of one step


class Learner:
    """Owns the optimizer of one rank's model. Every rank makes the same calls in the same order.

    `role` is the prefix of the optimizer's metrics; `objectives` says by what each type of batch is judged.
    """

    def __init__(
        self,
        role: str,
        forward: Forward,
        objectives: Mapping[type[Batch], Objective],
        optimizer: OptimizerConfig,
    ) -> None:
        self.model = forward.model
        self._role = role
        self.forward = forward
        self._objectives = objectives
        replicas = DistributedDataParallelConfig(
            use_distributed_optimizer=optimizer.distributed,
            grad_reduce_in_fp32=True,  # sums over micro-batches and ranks, whatever the weights' dtype
        )
        self.chunks = [
            DistributedDataParallel(network.config, replicas, network) for network in self.model.chunks
        ]
        self.optimizer = _adamw(self.chunks, optimizer)
        self._max_grad_norm = optimizer.max_grad_norm
        self.num_updates = 0  # of the optimizer, over all runs that led to these weights
        self.reset()

    def reset(self) -> None:
        """Forgets accumulated gradients and answered updates, as after loading a checkpoint."""
        self._forwarded: dict[StepKey, Metrics] = {}
        self._stepped: dict[StepKey, Metrics] = {}
        self._accumulated: list[StepKey] = []
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def has_gradients(self) -> bool:
        """Whether there are any that no `optim_step` has applied."""
        return bool(self._accumulated)

    def forward_backward(self, key: StepKey, batch: Batch) -> Metrics:
        """Accumulates gradients of the batch's loss; a repeated key answers from its record.

        Metrics are over the whole batch: losses, and means over the tokens that have a loss weight.
        """
        if key in self._forwarded:
            return self._forwarded[key]
        if type(batch) not in self._objectives:
            expected = " or ".join(known.__name__ for known in self._objectives)
            raise UserError(f"the {self._role} learns from {expected}, got {type(batch).__name__}")
        self.forward.check(batch.segments)
        check_batch(batch)
        objective = self._objectives[type(batch)]
        tally = _Tally(objective.nothing())

        def loss(inputs: Any, hidden_tH: Tensor) -> Tensor:
            terms = objective.terms(inputs, hidden_tH)
            tally.add(terms)
            return (terms.weights_N * terms.loss_N).sum()

        parts = self.forward.microbatches(objective.prepare(key, batch))
        self.forward.run(parts, objective.inputs, loss, backward=True)
        self._accumulated.append(key)
        return _record(self._forwarded, key, tally.metrics(self._role))

    def optim_step(self, key: StepKey, learning_rate: float) -> Metrics:
        """Applies what `forward_backward(key)` and those before it accumulated.

        Gradients are clipped to the global norm `max_grad_norm`. A gradient that is not finite changes
        nothing and reports ROLE/skipped_step = 1.
        """
        if key in self._stepped:
            return self._stepped[key]
        if key not in self._accumulated:
            raise LostStateError(
                f"no gradient was accumulated for {key}: the trainer restarted in between; "
                "load the last checkpoint and repeat the steps after it"
            )
        finalize_model_grads(self.chunks)
        self.optimizer.prepare_grads()
        norm = self._grad_norm()
        if math.isfinite(norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            for part in self.optimizer.chained_optimizers:
                clip_grads_with_norm_(
                    part.get_parameters(), self._max_grad_norm, torch.tensor(norm), foreach=True
                )
            self.optimizer.step_with_ready_grads()
            self.num_updates += 1
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._accumulated.clear()
        metrics = {
            f"{self._role}/grad_norm": norm,
            f"{self._role}/lr": learning_rate,
            f"{self._role}/skipped_step": 0.0 if math.isfinite(norm) else 1.0,
        }
        return _record(self._stepped, key, metrics)

    def _grad_norm(self) -> float:
        """L2 over the whole model: weights held by several ranks count once."""
        total = 0.0
        for part in self.optimizer.chained_optimizers:  # of all experts, of all else
            norm = get_total_norm(part.get_main_grads_for_grad_norm(), foreach=True)
            square = norm.to(self.forward.device).square()  # of no gradient at all, it is on the CPU
            dist.all_reduce(square, group=part.get_grad_stats_parallel_group())
            total += square.item()
        return math.sqrt(total)

    def load_hf(self, folder: Path) -> None:
        """Takes the weights of a folder, before the first update."""
        if self.model.lora is not None:
            raise UserError(
                f"the {self._role} learns in adapters on top of {self.model.folder}, which replicas and "
                f"checkpoints take for granted: start a new run with model.path = {folder}"
            )
        if self.num_updates:
            raise UserError(
                f"the {self._role} has made {self.num_updates} updates, whose optimizer state belongs to its "
                f"own weights: {folder} can be loaded before the first one, or start a new run from it"
            )
        load_weights(self.model, folder)
        self.optimizer.reload_model_params()


class _Tally:
    """Adds up a batch's metrics over micro-batches and data-parallel ranks."""

    def __init__(self, nothing: LossTerms) -> None:
        self._losses, self._values = tuple(nothing.losses), tuple(nothing.values)
        num_sums = 1 + len(self._losses) + len(self._values)
        self._sums = nothing.loss_N.new_zeros(num_sums, dtype=torch.float64)
        self._maxima = nothing.loss_N.new_full((len(self._values),), -math.inf, dtype=torch.float64)

    @torch.no_grad()
    def add(self, terms: LossTerms) -> None:
        if not len(terms.weights_N):  # nothing is trained in this micro-batch
            return
        values_MN = torch.stack([terms.values[name].double() for name in self._values])
        losses = [(terms.weights_N * terms.losses[name]).sum().double() for name in self._losses]
        count = self._sums.new_tensor(len(terms.weights_N))
        self._sums += torch.cat([torch.stack([count, *losses]), values_MN.sum(1)])
        self._maxima = torch.maximum(self._maxima, values_MN.amax(1))

    def metrics(self, role: str) -> Metrics:
        """Over the whole batch; the denominator of each mean is its number of tokens with a loss weight."""
        reduce_over_replicas(self._sums)
        reduce_over_replicas(self._maxima, dist.ReduceOp.MAX)
        count, *sums = self._sums.tolist()
        losses = dict(zip(self._losses, sums, strict=False))
        means = zip(self._values, sums[len(losses) :], self._maxima.tolist(), strict=True)
        values = {
            name: (maximum if count else 0.0) if name.endswith("_max") else total / max(count, 1)
            for name, total, maximum in means
        }
        return losses | {f"{role}/num_tokens": count} | values


def _record(records: dict[StepKey, Metrics], key: StepKey, metrics: Metrics) -> Metrics:
    records[key] = metrics
    if len(records) > NUM_RECORDS:
        records.pop(next(iter(records)))  # the oldest
    return metrics


def _adamw(chunks: list[DistributedDataParallel], config: OptimizerConfig) -> ChainedOptimizer:
    """Decoupled weight decay on every parameter, as torch.optim.AdamW(model.parameters()) does.

    Of bfloat16 weights it keeps and updates a copy in float32, which they are rounded from.
    """
    dtype = chunks[0].config.params_dtype
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.max_grad_norm,
            use_distributed_optimizer=config.distributed,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
        ),
        chunks,
        config_overrides={},  # Megatron's own default leaves out biases and norms
        use_gloo_process_groups=False,
    )
    for group in optimizer.param_groups:
        if "fused" in group:  # PyTorch's own AdamW, on a CPU: one kernel instead of a loop of small ones
            group["fused"] = True
    return optimizer
