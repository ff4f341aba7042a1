"""Planned attention calls against attention with one dense mask over all tokens."""

import pytest
import torch

from atoll.runtime.errors import UserError
from atoll.trainer.megatron import attention
from atoll.trainer.megatron.attention import backend, plan_rows
from atoll.trainer.megatron.context import ContextSplit
from atoll.wire.types import Segments
from tests import flash_attn_stand_in
from tests.tree_layouts import CASES, check_dense, forest

CPU = torch.device("cpu")
WHOLE = ContextSplit()


@pytest.fixture
def flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_attn_stand_in.stand_in(monkeypatch)


LIMITS = {"default": (64, 1 << 24), "small": (8, 200), "tiny": (1, 1)}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
def test_rows_equal_dense_attention(
    segments: Segments, limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "ROW_TOKENS", limits[0])
    monkeypatch.setattr(attention, "MASK_LIMIT", limits[1])
    check_dense("shared_prefix", 1, segments, CPU, torch.float64, 1e-12)


@pytest.mark.parametrize("name", ["shared_prefix", "flash"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("flash_on_cpu")
def test_ranks_together_equal_dense_attention(segments: Segments, num_ranks: int, name: str) -> None:
    """This works with unequal chunks, so the cases are not padded."""
    check_dense(name, num_ranks, segments, CPU, torch.float64, 1e-12)


def test_short_segments_share_a_call_and_long_roots_need_no_mask() -> None:
    plan = plan_rows(forest([6, *[4] * 8] * 10 + [500], ([-1] + [-1] * 8) * 10 + [-1]), CPU, WHOLE)
    assert len(plan.buckets) == 2
    assert [bucket.mask_N1QK is None for bucket in plan.buckets] == [True, False]
    assert plan.buckets[0].queries_NQ.shape == (1, 500)


def test_masks_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 1,000 and four answers of 900: a dense mask would have 21 million elements."""
    monkeypatch.setattr(attention, "MASK_LIMIT", 1 << 16)
    plan = plan_rows(forest([1000, 900, 900, 900, 900], [-1, 0, 0, 0, 0]), CPU, WHOLE)
    masks = [bucket.mask_N1QK for bucket in plan.buckets if bucket.mask_N1QK is not None]
    assert masks
    assert max(mask.numel() for mask in masks) <= 1 << 16


def test_chunks_are_dealt_from_both_ends() -> None:
    """Twelve tokens over three ranks: chunks of two, 0 and 5, 1 and 4, 2 and 3; the last two are adjacent."""
    splits = [ContextSplit(rank, 3) for rank in range(3)]
    assert [split.spans(12) for split in splits] == [[(0, 2), (10, 12)], [(2, 4), (8, 10)], [(4, 8)]]
    assert splits[1].local_index(12).tolist() == [-1, -1, 0, 1, -1, -1, -1, -1, 2, 3, -1, -1]
    assert splits[0].gathered_index(12).tolist() == [0, 1, 4, 5, 8, 9, 10, 11, 6, 7, 2, 3]


def test_every_rank_can_split_its_tokens_again() -> None:
    assert [WHOLE.multiple(1), WHOLE.multiple(4)] == [1, 4]
    two = ContextSplit(0, 2)
    assert two.multiple(1) == 4  # 2 x 2 chunks
    assert two.multiple(2) == 4  # two tokens a rank, one for each of its two tensor ranks
    assert two.multiple(3) == 12  # six tokens a rank: two chunks of three, three parts of two
    assert two.multiple(4) == 8


def test_flash_is_refused_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(UserError, match="there is no CUDA device here"):
        backend("flash")
