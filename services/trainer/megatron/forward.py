"""A model's forward passes over whole batches, on this rank: log-probabilities and values.

Letters in shapes: T tokens, t of them on this context rank, N requested tokens, n of them on this context
rank, H hidden size.
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
from atoll.trainer.megatron.upload import upload
from atoll.wire.types import Batch, Bool, Float32, Int32, Int64, PolicyBatch, Segments

B = TypeVar("B", bound=Batch)


class HasSegments(Protocol):
    @property
    def segments(self) -> Segments: ...


P = TypeVar("P", bound=HasSegments)
S = TypeVar("S")
H = TypeVar("H")


@dataclass(frozen=True, eq=False)
class Rows:
    """The N hidden states of a micro-batch that a head reads."""

    places_n: Tensor  # index of those that this context rank holds, among its tokens
    which_n: Tensor  # which of the N they are
    count: int  # N


@dataclass(frozen=True, eq=False)
class Targets:
    """N tokens to predict, from the hidden states of those before them."""

    rows: Rows
    ids_n: Tensor  # token ids of those that this context rank predicts


@dataclass(frozen=True, slots=True)
class Budget:
    """Maximum tokens of a micro-batch."""

    training: int
    forward: int  # of a pass without gradients


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
        self._num_parts = (
            parallel_state.get_tensor_model_parallel_world_size() if self._splits_sequence else 1
        )
        # the number of a micro-batch's tokens must be a multiple of this
        self._multiple = self._split.multiple(self._num_parts)

    def compute_logprobs(self, segments: Segments, temperature: float | None = None) -> Float32:
        """[T] log-probability of each token; 0 for the first token of a root. The same on every rank.

        `temperature` replaces the policy's.
        """
        if temperature is None:
            self.check_temperature()
            temperature = self.temperature
        if self.model.spec.head != "language":
            raise UserError("a value model has no log-probabilities: use the actor or the reference")

        def logprobs(hidden_tH: Tensor, targets: Targets) -> Tensor:
            return self.logprobs(hidden_tH, targets, temperature)[0]

        return self._compute(segments, segments.predecessors >= 0, self.targets, logprobs)

    def compute_values(self, segments: Segments) -> Float32:
        """[T] the value head's output after each token. The same on every rank."""
        if self.model.spec.head != "value":
            raise UserError("a policy has no value head: use a critic, a reward model or a cost model")

        def after(part: Segments, tokens: Int64) -> Rows:
            return self.rows(tokens)

        return self._compute(segments, np.ones(len(segments.token_ids), bool), after, self.values)

    def check_temperature(self) -> None:
        if self.temperature <= 0:
            raise UserError(
                f"temperature {self.temperature:g} has no log-probabilities to train on: "
                "set rollout.sampling.temperature above 0"
            )

    def run(
        self,
        parts: Sequence[P],
        prepare: Callable[[P], S],
        last: Callable[[S, Tensor], Tensor],
        backward: bool,
    ) -> None:
        """Runs every part through the model. `last(prepared, hidden_tH)` runs on the last pipeline stage;
        with `backward`, the scalar that it returns is differentiated.

        `prepare(part)` builds on the host what `last` needs: it goes to the device with the model's inputs.
        """

        def hidden(prepared: S, hidden_T1H: Tensor) -> Tensor:
            return last(prepared, self._whole_sequence(hidden_T1H))

        num_tokens = self._multiple
        if len(self.model.chunks) > 1:  # between virtual stages, Megatron exchanges hidden states of one size
            longest = max((len(part.segments.token_ids) for part in parts), default=0)
            num_tokens *= max(1, -(-longest // self._multiple))

        def inputs(part: P) -> tuple[pipeline.Inputs, S]:
            progress.advance()
            return upload((self.inputs(part.segments, num_tokens), prepare(part)), self.device)

        pipeline.run(self.model, parts, inputs, hidden, backward, num_tokens)
        self.num_tokens = 0

    def inputs(self, segments: Segments, at_least: int = 1) -> pipeline.Inputs:
        """What the model takes of a micro-batch, on the host."""
        segments = pad(segments, self._multiple, at_least)
        self.num_tokens = len(segments.token_ids)
        held = self._split.local_tokens(self.num_tokens)
        routes_tYC = None
        if segments.routes is not None:  # a router sees its own part of the sequence
            part = parallel_state.get_tensor_model_parallel_rank() if self._splits_sequence else 0
            routes_tYC = torch.from_numpy(segments.routes[np.split(held, self._num_parts)[part]])
        return (
            torch.from_numpy(segments.token_ids[held]).long(),
            torch.from_numpy(segments.positions[held]),
            self._attention.plan(segments, self.device, self._split),
            routes_tYC,
        )

    def rows(self, tokens: Int64) -> Rows:
        """Of the hidden states of `tokens` ([N]) of the micro-batch that `inputs` was last called with, on
        the host."""
        places_N = self._split.local_index(self.num_tokens)[tokens]
        which = np.flatnonzero(places_N >= 0)
        return Rows(torch.from_numpy(places_N[which]), torch.from_numpy(which), len(tokens))

    def targets(self, segments: Segments, tokens: Int64) -> Targets:
        """Of `tokens` ([N]), likewise."""
        rows = self.rows(segments.predecessors[tokens])
        return Targets(rows, torch.from_numpy(segments.token_ids[tokens[rows.which_n.numpy()]]).long())

    def hidden(self, inputs: pipeline.Inputs) -> Tensor:
        """[t, H] hidden states of one micro-batch after the final norm. Only without pipeline parallelism."""
        return self._whole_sequence(self.model.output(*inputs))

    def logprobs(self, hidden_tH: Tensor, targets: Targets, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N] of the target tokens, and entropies [N] of their distributions."""
        logprobs_n, entropy_n = token_logprobs(
            self.local_hidden(hidden_tH, targets.rows),
            output_weight(self.model),
            targets.ids_n,
            temperature,
            parallel_state.get_tensor_model_parallel_group(),
        )
        return self.join(logprobs_n, targets.rows), self.join(entropy_n, targets.rows)

    def values(self, hidden_tH: Tensor, rows: Rows) -> Tensor:
        """[N] the value head's output after the tokens of `rows`; carries gradients."""
        return self.join(self.model.output.output_layer(self.local_hidden(hidden_tH, rows)), rows)

    def local_hidden(self, hidden_tH: Tensor, rows: Rows) -> Tensor:
        """[n, H] the hidden states that this context rank holds."""
        return hidden_tH.index_select(0, rows.places_n)

    def join(self, values_n: Tensor, rows: Rows) -> Tensor:
        """[N] the values of all rows, on every context rank."""
        if self._split.size == 1:
            return values_n
        return join(values_n, rows.which_n, rows.count, parallel_state.get_context_parallel_group())

    def microbatches(self, batch: B) -> list[B]:
        """This data-parallel rank's micro-batches, of segments with something to train on.

        If the attention cannot share prefixes, repeated tokens have a loss weight only in their first copy.
        """
        whole, first = self._whole(batch.segments)
        flat = take(batch, whole)
        flat = replace(flat, loss_weights=np.where(first, flat.loss_weights, np.float32(0)))
        samples = flat.samples if isinstance(flat, PolicyBatch) else None
        parts = self._parts(flat.segments, flat.loss_weights != 0, self._budget.training, samples)
        return [take(flat, part) for part in parts]

    def check(self, segments: Segments) -> None:
        """Raises UserError if the model cannot compute `segments`."""
        spec = self.model.spec
        check_segments(segments, spec.vocab_size, spec.max_positions)
        expected = (len(segments.token_ids), *spec.route_shape)
        if segments.routes is not None and segments.routes.shape != expected:
            raise UserError(
                f"routes of shape {segments.routes.shape}, expected {expected} (tokens, layers, experts of a "
                "token): replicas must serve the trainer's model"
            )

    def _compute(
        self,
        segments: Segments,
        is_asked: Bool,
        head: Callable[[Segments, Int64], H],
        per_token: Callable[[Tensor, H], Tensor],
    ) -> Float32:
        """[T] `per_token` of tokens with `is_asked`; 0 for the others. `head` selects them on the host."""
        self.check(segments)
        whole, first = self._whole(segments)
        is_asked = first & is_asked[whole.source]  # only the first copy of a repeated token
        answers_T = torch.zeros(len(segments.token_ids), device=self.device)

        def prepare(part: Selection) -> tuple[H, Tensor]:
            asked = np.flatnonzero(is_asked[part.source])
            return head(part.segments, asked), torch.from_numpy(whole.source[part.source[asked]])

        def answer(prepared: tuple[H, Tensor], hidden_tH: Tensor) -> Tensor:
            asked, into_N = prepared
            answers_T[into_N] = per_token(hidden_tH, asked).float()
            return answers_T

        with torch.no_grad():
            parts = self._parts(whole.segments, is_asked, self._budget.forward)
            self.run(list(parts), prepare, answer, backward=False)
        # each token is nonzero on one data-parallel rank's last stage only
        reduce_over_replicas(answers_T)
        return answers_T.cpu().numpy()

    def _whole_sequence(self, hidden_T1H: Tensor) -> Tensor:
        """[t, H] of all of this context rank's tokens, if tensor-parallel ranks hold a part each."""
        if self._splits_sequence:  # every rank gets the whole gradient, and takes its own part
            hidden_T1H = gather_from_sequence_parallel_region(hidden_T1H, tensor_parallel_output_grad=False)
        return hidden_T1H.squeeze(1)

    def _whole(self, segments: Segments) -> tuple[Selection, Bool]:
        """The segments in a form that the attention supports, and a flag for each token's first copy."""
        if not self._attention.shares_prefix:
            return flatten_trees(segments)
        num_tokens = len(segments.token_ids)
        return Selection(segments, np.arange(num_tokens)), np.ones(num_tokens, bool)

    def _parts(
        self, segments: Segments, is_asked: Bool, max_tokens: int, samples: Int32 | None = None
    ) -> Iterator[Selection]:
        """The micro-batches of this data-parallel rank; some may be empty if the parallel layout requires
        that."""
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
    """Reduces in place over data-parallel ranks and pipeline stages: only last stages have computed
    values."""
    dist.all_reduce(tensor, op, parallel_state.get_data_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        dist.all_reduce(tensor, op, parallel_state.get_pipeline_model_parallel_group())
