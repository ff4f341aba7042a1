"""The plan's padded calls against attention with one dense mask over all tokens."""

import math

import numpy as np
import pytest
import torch

from services.trainer import attention
from services.trainer.attention import AttentionInputs, TreeAttention, plan_attention
from services.trainer.rope import rotation
from services.wire.types import Segments

CPU = torch.device("cpu")


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


def dense_mask(segments: Segments) -> torch.Tensor:
    """[T, T], from the definition: what came before, in the own segment or an ancestor."""
    owner = np.repeat(np.arange(len(segments.parents)), np.diff(segments.offsets))
    mask = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for q, segment in enumerate(owner):
        sees = {int(segment)}
        while (segment := segments.parents[segment]) >= 0:
            sees.add(int(segment))
        mask[q, : q + 1] = torch.from_numpy(np.isin(owner[: q + 1], list(sees)))
    return mask


def run(segments: Segments, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    core = TreeAttention()
    still = rotation(torch.zeros(len(q)), q.shape[-1], 10000.0, q.dtype)  # position 0 turns nothing
    return core(q, k, v, None, packed_seq_params=AttentionInputs(plan_attention(segments, CPU), still))


CASES = {
    "one root": forest([5], [-1]),
    "group of three": forest([6, 4, 2, 5], [-1, 0, 0, 0]),
    "turns that branch": forest([3, 4, 2, 5, 1, 3], [-1, 0, 1, 1, 0, 3]),
    "roots only": forest([9, 1, 30, 4, 17], [-1] * 5),
    "random 0": random_forest(0, 12, 9),
    "random 1": random_forest(1, 25, 40),
    "random 2": random_forest(2, 6, 150),
}


@pytest.mark.parametrize("limits", [(64, 1 << 24), (8, 200), (1, 1)], ids=["default", "small", "tiny"])
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
def test_equals_dense_attention(
    segments: Segments, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ROW_TOKENS", limits[0])
    monkeypatch.setattr(attention, "MASK_LIMIT", limits[1])
    torch.manual_seed(0)
    num_tokens, heads, groups, size = len(segments.token_ids), 4, 2, 8
    q, k, v = (
        torch.randn(num_tokens, n, size, dtype=torch.float64, requires_grad=True)
        for n in (heads, groups, groups)
    )
    upstream = torch.randn(num_tokens, heads * size, dtype=torch.float64)

    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(heads // groups, 1)) / math.sqrt(size)
    weights = scores.masked_fill(~dense_mask(segments), -math.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(heads // groups, 1)).flatten(1)
    expected_grads = torch.autograd.grad(expected, (q, k, v), upstream)

    got = run(segments, q, k, v)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    for grad, expected_grad in zip(
        torch.autograd.grad(got, (q, k, v), upstream), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


def test_short_segments_share_a_call_and_long_roots_need_no_mask() -> None:
    plan = plan_attention(forest([6, *[4] * 8] * 10 + [500], ([-1] + [-1] * 8) * 10 + [-1]), CPU)
    assert len(plan.buckets) == 2
    assert [bucket.mask_N1QK is None for bucket in plan.buckets] == [True, False]
    assert plan.buckets[0].queries_NQ.shape == (1, 500)


def test_masks_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 1,000 and four answers of 900: a dense mask would have 21 million elements."""
    monkeypatch.setattr(attention, "MASK_LIMIT", 1 << 16)
    plan = plan_attention(forest([1000, 900, 900, 900, 900], [-1, 0, 0, 0, 0]), CPU)
    masks = [bucket.mask_N1QK for bucket in plan.buckets if bucket.mask_N1QK is not None]
    assert masks
    assert max(mask.numel() for mask in masks) <= 1 << 16
