"""A model's forward passes over whole batches, on this rank: log-probabilities and values.

Letters in shapes: T tokens, N of them that the caller asks for, H hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from services.runtime.errors import UserError
from services.trainer.attention import plan_attention
from services.trainer.batch import (
    Selection,
    check_segments,
    flatten_trees,
    plan_microbatches,
    select,
    take,
)
from services.trainer.logprobs import token_logprobs
from services.trainer.model import Model, output_weight
from services.wire.types import Batch, Bool, Float32, Int32, Int64, PolicyBatch, Segments

B = TypeVar("B", bound=Batch)


class Forward:
    """Runs one model. Every rank makes the same calls in the same order.

    `temperature` is that of the policy's distribution; `shares_prefix`: the attention computes a shared
    prompt once, else each sample gets its own copy.
    """

    def __init__(self, model: Model, max_tokens: int, shares_prefix: bool, temperature: float) -> None:
        self.model = model
        self.temperature = temperature
        self.device = next(model.network.parameters()).device
        self._max_tokens = max_tokens
        self._shares_prefix = shares_prefix

    def compute_logprobs(self, segments: Segments) -> Float32:
        """[T] log-probability of each token; 0 for the first token of a root. The same on every rank."""
        self.check_temperature()
        if self.model.spec.head != "language":
            raise UserError("a value model has no log-probabilities: ask the actor or the reference")

        def logprobs(part: Segments, targets: Int64) -> Tensor:
            return self.logprobs(part, targets, self.temperature)[0]

        return self._compute(segments, segments.predecessors >= 0, logprobs)

    def compute_values(self, segments: Segments) -> Float32:
        """[T] what the value head says after each token. The same on every rank."""
        if self.model.spec.head != "value":
            raise UserError("a policy has no value head: ask a critic, a reward model or a cost model")
        return self._compute(segments, np.ones(len(segments.token_ids), bool), self.values)

    def check_temperature(self) -> None:
        if self.temperature <= 0:
            raise UserError(
                f"temperature {self.temperature:g} has no log-probabilities to train on: "
                "set rollout.sampling.temperature above 0"
            )

    def hidden(self, segments: Segments) -> Tensor:
        """[T, H] after the final norm; carries gradients."""
        return self.model.network(  # type: ignore[no-any-return]
            self.tensor(segments.token_ids).long(),
            self.tensor(segments.positions),
            plan_attention(segments, self.device),
        )

    def hidden_before(self, segments: Segments, targets: Int64) -> Tensor:
        """[N, H] the hidden states that predict the target tokens."""
        return self.hidden(segments).index_select(0, self.tensor(segments.predecessors[targets]))

    def logprobs(self, segments: Segments, targets: Int64, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [N] of the distributions that the target tokens came from."""
        hidden_NH = self.hidden_before(segments, targets)
        return self.logprobs_from(hidden_NH, segments, targets, temperature)

    def logprobs_from(
        self, hidden_NH: Tensor, segments: Segments, targets: Int64, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """The same, where `hidden_before` is at hand."""
        return token_logprobs(
            hidden_NH,
            output_weight(self.model.network),
            self.tensor(segments.token_ids[targets]).long(),
            temperature,
            parallel_state.get_tensor_model_parallel_group(),
        )

    def values(self, segments: Segments, after: Int64) -> Tensor:
        """[N] what the value head says after the tokens `after`; carries gradients."""
        hidden_NH = self.hidden(segments).index_select(0, self.tensor(after))
        return self.model.network.output_layer(hidden_NH)  # type: ignore[no-any-return]

    def microbatches(self, batch: B) -> Iterator[tuple[B, Int64]]:
        """Those of this data-parallel rank, and where their tokens lie in `batch`.

        A token that is repeated because the attention cannot share it has a loss weight in its first copy.
        """
        whole, first = self._whole(batch.segments)
        flat = take(batch, whole)
        flat = replace(flat, loss_weights=np.where(first, flat.loss_weights, np.float32(0)))
        samples = flat.samples if isinstance(flat, PolicyBatch) else None
        for part in self._parts(flat.segments, samples):
            yield take(flat, part), whole.source[part.source]

    def tensor(self, array: Float32 | Int32 | Int64 | Bool) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def check(self, segments: Segments) -> None:
        """Raises UserError where the model cannot compute `segments`."""
        check_segments(segments, self.model.spec.vocab_size, self.model.spec.max_positions)

    def _compute(
        self, segments: Segments, is_asked: Bool, per_token: Callable[[Segments, Int64], Tensor]
    ) -> Float32:
        """[T] `per_token` where `is_asked`, else 0."""
        self.check(segments)
        whole, first = self._whole(segments)
        is_asked = first & is_asked[whole.source]  # of a repeated token, the first copy
        answers_T = torch.zeros(len(segments.token_ids), device=self.device)
        with torch.no_grad():
            for part in self._parts(whole.segments):
                targets = np.flatnonzero(is_asked[part.source])
                if len(targets):
                    answers_N = per_token(part.segments, targets)
                    answers_T[whole.source[part.source[targets]]] = answers_N.float()
        # each token is on one data-parallel rank, 0 on the others
        dist.all_reduce(answers_T, group=parallel_state.get_data_parallel_group())
        return answers_T.cpu().numpy()

    def _whole(self, segments: Segments) -> tuple[Selection, Bool]:
        """The segments as the attention takes them, and a flag for each token's first copy."""
        if not self._shares_prefix:
            return flatten_trees(segments)
        num_tokens = len(segments.token_ids)
        return Selection(segments, np.arange(num_tokens)), np.ones(num_tokens, bool)

    def _parts(self, segments: Segments, samples: Int32 | None = None) -> Iterator[Selection]:
        ranks = parallel_state.get_data_parallel_world_size()
        plan = plan_microbatches(segments, self._max_tokens, ranks, samples)
        for chosen in plan[parallel_state.get_data_parallel_rank()]:
            yield select(segments, chosen)
