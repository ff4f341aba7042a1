"""The launcher itself: results in rank order, and failures that say what happened."""

import os
import time
from collections.abc import Callable

import pytest
import torch

from tests.torch_ranks import forbid_cuda, run_ranks


def multiply(factor: int) -> tuple[int, str]:
    return int(os.environ["RANK"]) * factor, os.environ["WORLD_SIZE"]


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("the seventh box is wrong")
    hang()  # as if it waited for rank 1 in a collective


def hang() -> None:
    time.sleep(600)


def vanish() -> None:
    os._exit(3)


def visible_devices() -> str:
    return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.parametrize("initialize", [torch.cuda.is_available, torch.cuda.init])
def test_a_server_that_initializes_cuda_before_it_forks_is_told(initialize: Callable[[], object]) -> None:
    """Every test with ranks shows that the server does not."""
    with pytest.raises(AssertionError, match="before a fork"), forbid_cuda():
        initialize()


def test_ranks_see_no_gpu_outside_tests_gpu() -> None:
    assert run_ranks(visible_devices, 1) == [""]


def test_results_come_in_rank_order() -> None:
    assert run_ranks(multiply, 2, 21) == [(0, "2"), (21, "2")]


def test_a_failing_rank_ends_the_others_and_shows_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed:[\s\S]*the seventh box is wrong"):
        run_ranks(fail_on_rank_1, 2)  # or the deadline would end it, and say so


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\]"):
        run_ranks(hang, 1, timeout_s=3)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 0 died without a word"):
        run_ranks(vanish, 1)
