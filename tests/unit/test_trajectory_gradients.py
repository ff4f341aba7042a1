"""Gradients of random trajectories as the trainer computes them, against each leaf as its own sequence."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from atoll.coordinator.algorithm.experience import lay_out, loss_weights
from atoll.trainer.batch import check_batch, check_segments, flatten_trees, plan_microbatches, select, take
from atoll.trainer.losses.loss import PolicyTokens, ppo_clip
from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.context import ContextSplit
from atoll.wire.types import Float32, Group, PolicyBatch
from tests.trajectories import batches, path, read


class Transformer(torch.nn.Module):
    """Two layers of attention in float64: over the trainer's plan of a micro-batch, or over one sequence."""

    HEADS, SIZE, WIDTH, LAYERS = 2, 3, 6, 2

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.5)

        self.tokens, self.positions = weight(6, self.WIDTH), weight(64, self.WIDTH)
        self.layers = torch.nn.ParameterList([weight(4, self.WIDTH, self.WIDTH) for _ in range(self.LAYERS)])
        self.head = weight(self.WIDTH, 6)

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """[T, vocabulary] logits after each token."""
        hidden_TH = self.tokens[ids_T] + self.positions[positions_T]
        for layer in self.layers:
            q, k, v = ((hidden_TH @ w).unflatten(1, (self.HEADS, self.SIZE)) for w in layer[:3])
            hidden_TH = hidden_TH + (attend(q, k, v) @ layer[3]).tanh()
        return hidden_TH @ self.head


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(0, 1) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)


def loss_of(logits: Tensor, ids: Tensor, *per_token: Float32) -> Tensor:
    """Sum of weight * token loss. After the logits before each token: weights, advantages, old logprobs."""
    logprobs = logits.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    weights, advantages, old = (torch.from_numpy(array).double() for array in per_token)
    none = torch.zeros(len(ids), dtype=torch.int64)
    return (weights * ppo_clip(PolicyTokens(logprobs, old, advantages, none, none.bool()))[0]).sum()


def gradient_of_microbatches(batch: PolicyBatch, shares_prefix: bool, max_tokens: int) -> list[Tensor]:
    """As forward.py cuts a batch, with the attention that the trainer plans."""
    model = Transformer()
    whole = batch
    if not shares_prefix:
        selection, first = flatten_trees(batch.segments)
        whole = take(batch, selection)
        whole.loss_weights[~first] = 0
    (plan,) = plan_microbatches(whole.segments, whole.loss_weights != 0, max_tokens, 1, whole.samples)
    for chosen in plan:
        part = take(whole, select(whole.segments, chosen))
        ids = torch.from_numpy(part.segments.token_ids).long()
        attention = BACKENDS["shared_prefix"].plan(part.segments, torch.device("cpu"), ContextSplit())
        logits = model(ids, torch.from_numpy(part.segments.positions).long(), attention.attend)
        trained = np.flatnonzero(part.loss_weights)
        before = torch.from_numpy(part.segments.predecessors[trained])
        per_token = (part.loss_weights, part.advantages, part.rollout_logprobs)
        loss_of(logits[before], ids[trained], *(array[trained] for array in per_token)).backward()
    return gradients(model)


def gradient_of_leaves(groups: Sequence[Group], numbers: Sequence[tuple[Float32, ...]]) -> list[Tensor]:
    """Each path of each sample as a sequence of its own; a token counts in the first of its node's."""
    model = Transformer()
    rest = iter(zip(*numbers, strict=True))  # weight, advantage, old logprob: by sample and time
    for reading in (r for each in read(groups) for r in each):
        nodes = reading.sample.nodes
        of_node: dict[int, list[tuple[float, ...]]] = {}
        for token in reading.tokens:
            of_node.setdefault(token.node, []).append(next(rest))
        inner = {node.parent for node in nodes}
        for leaf in (i for i in range(len(nodes)) if i not in inner):
            ids = torch.tensor(path(nodes, leaf))
            logits = model(ids, torch.arange(len(ids)), causal)
            chain = [leaf]
            while nodes[chain[-1]].parent >= 0:
                chain.append(nodes[chain[-1]].parent)
            losses = [logits.sum() * 0]
            for node in chain:
                if own := of_node.pop(node, None):
                    start = len(path(nodes, nodes[node].parent))
                    arrays = np.array(own, np.float32).T
                    after = slice(start - 1, start + len(own) - 1)
                    losses.append(loss_of(logits[after], ids[start : start + len(own)], *arrays))
            torch.stack(losses).sum().backward()
        assert not of_node
    return gradients(model)


def gradients(model: Transformer) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def policy_batch(groups: Sequence[Group]) -> PolicyBatch:
    """Any advantages and old logprobs: some tokens are clipped, some are not."""
    layout, rng = lay_out(groups), np.random.default_rng(0)
    num_tokens = len(layout.loss_mask_T)
    weights = loss_weights(
        layout.loss_mask_T, layout.sample_T, np.ones(layout.num_samples), "seq_mean_token_mean", 1
    )
    return PolicyBatch(
        layout.segments,
        samples=layout.sample_T,
        loss_weights=weights,
        advantages=rng.normal(size=num_tokens).astype(np.float32),
        rollout_logprobs=rng.uniform(-3, -0.5, num_tokens).astype(np.float32),
        old_logprobs=None,
        ref_logprobs=None,
    )


@pytest.mark.parametrize("shares_prefix", [True, False])
@given(groups=batches(samples=3), max_tokens=st.sampled_from([1, 12, 1000]))
@settings(max_examples=40)
def test_gradients_are_those_of_the_leaves_apart(
    shares_prefix: bool, groups: list[Group], max_tokens: int
) -> None:
    batch, trained = policy_batch(groups), lay_out(groups).trained
    numbers = [array[trained] for array in (batch.loss_weights, batch.advantages, batch.rollout_logprobs)]
    check_segments(batch.segments, vocab_size=6, max_length=64)
    check_batch(batch)
    expected = gradient_of_leaves(groups, numbers)
    for got, want in zip(gradient_of_microbatches(batch, shares_prefix, max_tokens), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
