"""Token trees without tokens, and reference attention with one dense mask."""

import math

import numpy as np
import torch
from torch import Tensor

from atoll.trainer.megatron.attention import BACKENDS
from atoll.trainer.megatron.context import ContextSplit
from atoll.trainer.megatron.upload import upload
from atoll.wire.types import Segments


def forest(lengths: list[int], parents: list[int]) -> Segments:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Segments(
        token_ids=np.zeros(offsets[-1], np.int32),
        offsets=offsets,
        parents=np.array(parents, np.int32),
        groups=np.zeros(len(parents), np.int32),
    )


def random_forest(seed: int, num_segments: int, longest: int) -> Segments:
    random = np.random.default_rng(seed)
    parents = [int(random.integers(-1, s)) if s else -1 for s in range(num_segments)]
    return forest(random.integers(1, longest + 1, num_segments).tolist(), parents)


def dense_mask(segments: Segments) -> Tensor:
    """[T, T] by definition: earlier tokens of the own segment or an ancestor."""
    owner = np.repeat(np.arange(len(segments.parents)), np.diff(segments.offsets))
    mask = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for q, segment in enumerate(owner):
        sees = {int(segment)}
        while (segment := segments.parents[segment]) >= 0:
            sees.add(int(segment))
        mask[q, : q + 1] = torch.from_numpy(np.isin(owner[: q + 1], list(sees)))
    return mask


CASES = {
    "one root": forest([5], [-1]),
    "group of three": forest([6, 4, 2, 5], [-1, 0, 0, 0]),
    "turns that branch": forest([3, 4, 2, 5, 1, 3], [-1, 0, 1, 1, 0, 3]),
    "empty segments": forest([3, 2, 0, 4, 0, 2, 5, 0], [-1, 0, 0, 2, -1, 4, 2, 6]),
    "roots only": forest([9, 1, 30, 4, 17], [-1] * 5),
    "random 0": random_forest(0, 12, 9),
    "random 1": random_forest(1, 25, 40),
    "random 2": random_forest(2, 6, 150),
    "segments longer than a chunk": forest([70, 90, 20], [-1, 0, 0]),
    "short ones and padding": forest([3, 2, 2, 4, 1, 3, 5, 2, 10], [-1, 0, 0, -1, 3, 3, -1, 6, -1]),
}


def check_dense(
    name: str, num_ranks: int, segments: Segments, device: torch.device, dtype: torch.dtype, share: float
) -> None:
    """Outputs and gradients of a backend equal those of a dense mask in float64, to `share` of the
    largest."""
    torch.manual_seed(0)
    num_tokens, heads, groups, size = len(segments.token_ids), 4, 2, 8
    q, k, v = (
        torch.randn(num_tokens, n, size, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, groups, groups)
    )
    upstream = torch.randn(num_tokens, heads * size, device=device, dtype=dtype)
    exact = [each.detach().double().requires_grad_() for each in (q, k, v)]
    expected = dense_attention(segments, *exact)
    got = all_ranks(name, num_ranks, segments, q, k, v)
    assert got.device.type == device.type
    for each, reference in (
        (got, expected),
        *zip(
            torch.autograd.grad(got, (q, k, v), upstream),
            torch.autograd.grad(expected, exact, upstream.double()),
            strict=True,
        ),
    ):
        tolerance = share * float(reference.abs().max())
        torch.testing.assert_close(each.double(), reference, rtol=0, atol=tolerance)


def dense_attention(segments: Segments, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~dense_mask(segments).to(q.device), -math.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(repeats, 1)).flatten(1)


def all_ranks(name: str, num_ranks: int, segments: Segments, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of all context ranks together, each with the keys and values of all."""
    splits = [ContextSplit(rank, num_ranks) for rank in range(num_ranks)]
    held = [torch.from_numpy(split.local_tokens(len(q))).to(q.device) for split in splits]
    order = torch.cat(held)  # of the gathered tokens
    outputs = [
        upload(BACKENDS[name].plan(segments, q.device, split), q.device).attend(q[own], k[order], v[order])
        for split, own in zip(splits, held, strict=True)
    ]
    return torch.cat(outputs)[order.argsort()]
