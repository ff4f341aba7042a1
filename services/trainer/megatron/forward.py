"""A model's forward passes over whole batches, on this rank: log-probabilities and values.

Letters in shapes: T tokens, t of them on this context rank, N that the caller asks for, n of them on this
context rank, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from atoll.runtime.errors import UserError
from atoll.trainer import progress
from atoll.trainer.batch import (
    Selection,
    check_segments,
    flatten_trees,
    pad,
    plan_microbatches,
    select,
    take,
)
from atoll.trainer.losses.logprobs import token_logprobs
from atoll.trainer.megatron import pipeline
from atoll.trainer.megatron.attention import Backend
from atoll.trainer.megatron.context import ContextSplit, join
from atoll.trainer.megatron.model import MegatronModel, output_weight
from atoll.wire.types import Batch, Bool, Float32, Int32, Int64, PolicyBatch, Segments

B = TypeVar("B", bound=Batch)


class HasSegments(Protocol):
    @property
    def segments(self) -> Segments: ...


P = TypeVar("P", bound=HasSegments)


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens of a micro-batch."""

    training: int
    forward: int  # of a forward pass without backward


class Forward:
    """Runs one model. Every rank makes the same calls in the same order.

    `temperature` is that of the policy's distribution.
    """

    def __init__(self, model: MegatronModel, budget: Budget, attention: Backend, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.device = next(model.parameters).device
        self._budget = budget
        self.num_tokens = 0  # of the micro-batch in progress
        self._attention = attention
        self._splits_sequence = model.chunks[0].config.sequence_parallel
        self._split = ContextSplit(
            parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
        )
        # what the number of a micro-batch's tokens must be a multiple of
        self._multiple = self._split.multiple(
            parallel_state.get_tensor_model_parallel_world_size() if self._splits_sequence else 1
        )

    def compute_logprobs(self, segments: Segments, temperature: float | None = None) -> Float32:
        """[T] log-probability of each token; 0 for the first token of a root. The same on every rank.

        `temperature` takes the place of the policy's own.
        """
        if temperature is None:
            self.check_temperature()
            temperature = self.temperature
        if self.model.spec.head != "language":
            raise UserError("a value model has no log-probabilities: ask the actor or the reference")

        def logprobs(hidden_tH: Tensor, part: Segments, targets: Int64) -> Tensor:
            return self.logprobs(hidden_tH, part, targets, temperature)[0]

        return self._compute(segments, segments.predecessors >= 0, logprobs)

    def compute_values(self, segments: Segments) -> Float32:
        """[T] what the value head says after each token. The same on every rank."""
        if self.model.spec.head != "value":
            raise UserError("a policy has no value head: ask a critic, a reward model or a cost model")

        def values(hidden_tH: Tensor, part: Segments, after: Int64) -> Tensor:
            return self.values(hidden_tH, after)

        return self._compute(segments, np.ones(len(segments.token_ids), bool), values)

    def check_temperature(self) -> None:
        if self.temperature <= 0:
            raise UserError(
                f"temperature {self.temperature:g} has no log-probabilities to train on: "
                "set rollout.sampling.temperature above 0"
            )

    def run(self, parts: Sequence[P], last: Callable[[P, Tensor], Tensor], backward: bool) -> None:
        """Every part through the model. `last(part, hidden_tH)` runs on the last pipeline stage; with
        `backward`, the scalar that it returns is differentiated."""

        def hidden(part: P, hidden_T1H: Tensor) -> Tensor:
            return last(part, self._whole_sequence(hidden_T1H))

        num_tokens = self._multiple
        if len(self.model.chunks) > 1:  # between virtual stages, Megatron exchanges hidden states of one size
            longest = max((len(part.segments.token_ids) for part in parts), default=0)
            num_tokens *= max(1, -(-longest // self._multiple))

        def inputs(part: P) -> pipeline.Inputs:
            progress.advance()
            return self._inputs(part.segments, num_tokens)

        pipeline.run(self.model, parts, inputs, hidden, backward, num_tokens)
        self.num_tokens = 0

    def hidden(self, segments: Segments) -> Tensor:
        """[t, H] of one micro-batch after the final norm, where the model is on one pipeline stage."""
        return self._whole_sequence(self.model.output(*self._inputs(segments)))

    def logprobs(
        self, hidden_tH: Tensor, segments: Segments, targets: Int64, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [N] of the distributions that the target tokens came from."""
        hidden_nH, which = self.local_hidden(hidden_tH, segments.predecessors[targets])
        logprobs_n, entropy_n = token_logprobs(
            hidden_nH,
            output_weight(self.model),
            self.tensor(segments.token_ids[targets[which]]).long(),
            temperature,
            parallel_state.get_tensor_model_parallel_group(),
        )
        return self.join(logprobs_n, which, len(targets)), self.join(entropy_n, which, len(targets))

    def values(self, hidden_tH: Tensor, after: Int64) -> Tensor:
        """[N] what the value head says after the tokens `after`; carries gradients."""
        hidden_nH, which = self.local_hidden(hidden_tH, after)
        return self.join(self.model.output.output_layer(hidden_nH), which, len(after))

    def local_hidden(self, hidden_tH: Tensor, tokens: Int64) -> tuple[Tensor, Int64]:
        """[n, H] hidden states of those of the N `tokens` that this context rank holds, and [n] which of them
        these are."""
        places_N = self._split.local_index(len(hidden_tH) * self._split.size)[tokens]
        which = np.flatnonzero(places_N >= 0)
        return hidden_tH.index_select(0, self.tensor(places_N[which])), which

    def join(self, values_n: Tensor, which: Int64, count: int) -> Tensor:
        """[N] the values of all tokens that `held` was asked for, on every context rank."""
        if self._split.size == 1:
            return values_n
        return join(values_n, self.tensor(which), count, parallel_state.get_context_parallel_group())

    def microbatches(self, batch: B) -> list[B]:
        """Those of this data-parallel rank: what has something to train on.

        A token that is repeated because the attention cannot share it has a loss weight in its first copy.
        """
        whole, first = self._whole(batch.segments)
        flat = take(batch, whole)
        flat = replace(flat, loss_weights=np.where(first, flat.loss_weights, np.float32(0)))
        samples = flat.samples if isinstance(flat, PolicyBatch) else None
        parts = self._parts(flat.segments, flat.loss_weights != 0, self._budget.training, samples)
        return [take(flat, part) for part in parts]

    def tensor(self, array: Float32 | Int32 | Int64 | Bool) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def check(self, segments: Segments) -> None:
        """Raises UserError if the model cannot compute `segments`."""
        check_segments(segments, self.model.spec.vocab_size, self.model.spec.max_positions)

    def _compute(
        self, segments: Segments, is_asked: Bool, per_token: Callable[[Tensor, Segments, Int64], Tensor]
    ) -> Float32:
        """[T] `per_token` where `is_asked`, else 0."""
        self.check(segments)
        whole, first = self._whole(segments)
        is_asked = first & is_asked[whole.source]  # of a repeated token, the first copy
        answers_T = torch.zeros(len(segments.token_ids), device=self.device)

        def answer(part: Selection, hidden_tH: Tensor) -> Tensor:
            targets = np.flatnonzero(is_asked[part.source])
            if len(targets):
                answers_N = per_token(hidden_tH, part.segments, targets)
                answers_T[whole.source[part.source[targets]]] = answers_N.float()
            return answers_T

        with torch.no_grad():
            parts = self._parts(whole.segments, is_asked, self._budget.forward)
            self.run(list(parts), answer, backward=False)
        # each token is on one data-parallel rank's last stage, 0 on the others
        reduce_over_replicas(answers_T)
        return answers_T.cpu().numpy()

    def _inputs(self, segments: Segments, at_least: int = 1) -> pipeline.Inputs:
        segments = pad(segments, self._multiple, at_least)
        self.num_tokens = len(segments.token_ids)
        held = self._split.local_tokens(len(segments.token_ids))
        return (
            self.tensor(segments.token_ids[held]).long(),
            self.tensor(segments.positions[held]),
            self._attention.plan(segments, self.device, self._split),
        )

    def _whole_sequence(self, hidden_T1H: Tensor) -> Tensor:
        """[t, H] of this context rank's tokens, where tensor-parallel ranks hold a part of them each."""
        if self._splits_sequence:  # what follows gives every rank the whole gradient: each takes its part
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        return hidden_T1H.squeeze(1)

    def _whole(self, segments: Segments) -> tuple[Selection, Bool]:
        """The segments as the attention takes them, and a flag for each token's first copy."""
        if not self._attention.shares_prefix:
            return flatten_trees(segments)
        num_tokens = len(segments.token_ids)
        return Selection(segments, np.arange(num_tokens)), np.ones(num_tokens, bool)

    def _parts(
        self, segments: Segments, is_asked: Bool, max_tokens: int, samples: Int32 | None = None
    ) -> Iterator[Selection]:
        """The micro-batches of this data-parallel rank, some of them empty where a layout needs them."""
        num_chunks = len(self.model.chunks)
        plan = plan_microbatches(
            segments,
            is_asked,
            max_tokens,
            parallel_state.get_data_parallel_world_size(),
            samples,
            alike=parallel_state.get_expert_model_parallel_world_size() > 1,
            multiple=parallel_state.get_pipeline_model_parallel_world_size() if num_chunks > 1 else 1,
        )
        for chosen in plan[parallel_state.get_data_parallel_rank()]:
            yield select(segments, chosen)


def reduce_over_replicas(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    """In place, over data-parallel ranks and pipeline stages: what last stages have computed, others not."""
    dist.all_reduce(tensor, op, parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(tensor, op, parallel_state.get_pipeline_model_parallel_group())
