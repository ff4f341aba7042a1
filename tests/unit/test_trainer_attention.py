"""Planned attention calls against attention with one dense mask over all tokens."""

import sys
from types import ModuleType

import pytest
import torch

from atoll.runtime.errors import UserError
from atoll.trainer.megatron import attention
from atoll.trainer.megatron.attention import BACKENDS, backend, plan_rows
from atoll.trainer.megatron.context import ContextSplit
from atoll.wire.types import Segments
from tests import flash_attn_stand_in, torch_varlen_stand_in  # noqa: F401
from tests.tree_layouts import CASES, check_dense, forest

CPU, META = torch.device("cpu"), torch.device("meta")  # the latter: another device, without memory
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


@pytest.mark.parametrize("name", ["shared_prefix", "varlen", "flash"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
@pytest.mark.usefixtures("flash_on_cpu")
def test_ranks_together_equal_dense_attention(segments: Segments, num_ranks: int, name: str) -> None:
    """This works with unequal chunks, so the cases are not padded."""
    check_dense(name, num_ranks, segments, CPU, torch.float64, 1e-12)


def test_short_segments_share_a_call_and_long_roots_need_no_mask() -> None:
    plan = plan_rows(forest([6, *[4] * 8] * 10 + [500], ([-1] + [-1] * 8) * 10 + [-1]), CPU, WHOLE)
    assert len(plan.buckets) == 2
    assert [bucket.mask is None for bucket in plan.buckets] == [True, False]
    assert plan.buckets[0].queries_NQ.shape == (1, 500)


def test_masks_stay_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 1,000 and four answers of 900: a dense mask would have 21 million elements."""
    monkeypatch.setattr(attention, "MASK_LIMIT", 1 << 16)
    plan = plan_rows(forest([1000, 900, 900, 900, 900], [-1, 0, 0, 0, 0]), CPU, WHOLE)
    masks = [bucket.mask for bucket in plan.buckets if bucket.mask is not None]
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


@pytest.mark.parametrize("segments", CASES.values(), ids=CASES.keys())
def test_sizes_padded_for_a_gpu_change_nothing(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_padded", lambda lengths, device: -(-max(lengths) // 16) * 16)
    check_dense("shared_prefix", 2, segments, CPU, torch.float64, 1e-12)


def test_sizes_are_multiples_of_16_on_a_gpu_only() -> None:
    segments = forest([21, 5, 40], [-1, 0, 0])
    for device, sizes in ((CPU, [(26, 26), (40, 61)]), (META, [(32, 32), (48, 80)])):
        plan = plan_rows(segments, device, WHOLE)
        shapes = [(bucket.queries_NQ.shape[1], bucket.keys_NK.shape[1]) for bucket in plan.buckets]
        assert shapes == sizes


@pytest.mark.parametrize(
    ("has_gpu", "dtype", "name"),
    [
        (True, torch.bfloat16, "varlen"),
        (True, torch.float32, "shared_prefix"),
        (False, torch.bfloat16, "shared_prefix"),
        (False, torch.float32, "shared_prefix"),
    ],
)
def test_auto_is_varlen_on_a_gpu_in_half_precision(
    has_gpu: bool, dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert backend("auto", dtype) is BACKENDS[name]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", ["varlen", "flash"])
def test_kernels_are_refused_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f'"{name}" needs a GPU, but there is no CUDA device here'):
        backend(name, torch.bfloat16)


def test_flash_attn_4_is_not_taken_for_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package has the same name, but not the function."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    with pytest.raises(UserError, match="got cannot import name 'flash_attn_varlen_func'"):
        backend("flash", torch.bfloat16)
    flash_attn_stand_in.stand_in(monkeypatch)
    assert backend("flash", torch.bfloat16) is BACKENDS["flash"]
