"""Runs micro-batches through a model: one after another, or in Megatron's 1F1B order over pipeline stages."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from atoll.trainer.megatron import cpu_compat
from atoll.trainer.megatron.attention import AttentionPlan
from atoll.trainer.megatron.model import MegatronModel, Network

P = TypeVar("P")
S = TypeVar("S")
Inputs = tuple[Tensor, Tensor, AttentionPlan, Tensor | None]  # arguments of Network.forward


def run(
    model: MegatronModel,
    parts: Sequence[P],
    inputs: Callable[[P], tuple[Inputs, S]],
    last: Callable[[S, Tensor], Tensor],
    backward: bool,
    num_tokens: int,
) -> None:
    """Every rank of a pipeline calls it with the same parts. With virtual stages, the number of parts must be
    a multiple of the number of stages, and `inputs` must pad each part to `num_tokens` tokens.

    `inputs(part)` returns what the network takes, and what `last` needs besides the hidden states.
    `last(needed, hidden_T1H)` runs on the last stage for each part; with `backward`, the scalar that it
    returns is differentiated and gradients are accumulated.
    """
    if not parts:
        return
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        for part in parts:
            network_inputs, needed = inputs(part)
            result = last(needed, model.chunks[0](*network_inputs))
            if backward:
                result.backward()  # type: ignore[no-untyped-call]
        return

    def forward_step(queue: Iterator[P], network: Network) -> tuple[Tensor, Callable[..., Any]]:
        network_inputs, needed = inputs(next(queue))
        return network(*network_inputs), partial(loss, needed)

    def loss(needed: S, hidden_T1H: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # given three results, Megatron does not rescale the loss: loss weights contain the denominator
        return last(needed, hidden_T1H), torch.zeros((), dtype=torch.int), {}

    with cpu_compat.apply():
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(parts) for _ in model.chunks],
            model=list(model.chunks),
            num_microbatches=len(parts),
            seq_length=num_tokens,  # otherwise the stages announce the actual length
            micro_batch_size=1,
            forward_only=not backward,
        )
