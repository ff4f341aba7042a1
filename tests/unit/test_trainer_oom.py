"""What an allocation that fails is told as; the failing ones are real."""

import pytest
import torch

from atoll.config.schema import OptimizerConfig, ParallelConfig, ReferenceSection, TrainerSection
from atoll.runtime.errors import AtollError, MemoryExhaustedError
from atoll.trainer.oom import explain_oom

TRAINER = TrainerSection(max_tokens_per_microbatch=4096, parallel=ParallelConfig(data=2))


def exhausted(phase: str, section: TrainerSection | ReferenceSection = TRAINER, num_tokens: int = 0) -> str:
    """The message where more than any address space is asked for."""
    with (
        pytest.raises(MemoryExhaustedError) as caught,
        explain_oom("actor rank 1", phase, "trainer", section, lambda: num_tokens),
    ):
        torch.empty(1 << 50, dtype=torch.uint8)
    return str(caught.value)


def test_it_names_rank_phase_sizes_and_settings() -> None:
    message = exhausted("ForwardBackward", num_tokens=3000)
    assert message.startswith(
        "actor rank 1 is out of memory in ForwardBackward: asked for 1125899906842624 bytes"
    )
    assert "GiB are free" in message
    assert "a micro-batch of 3,000 tokens" in message
    assert "lower trainer.max_tokens_per_microbatch = 4096" in message
    assert 'set trainer.recompute = "full"' in message
    assert "set trainer.optimizer.distributed = true" in message
    assert "raise trainer.parallel.tensor = 1" in message


def test_it_advises_nothing_that_is_done_already() -> None:
    done = TRAINER.model_copy(
        update={
            "recompute": "full",
            "offload": True,
            "dtype": "bfloat16",
            "optimizer": OptimizerConfig(distributed=True),
        }
    )
    message = exhausted("ForwardBackward", done)
    for setting in ("recompute", "distributed", "offload", "bfloat16"):
        assert setting not in message


def test_a_tree_above_the_budget_is_not_made_smaller_by_the_budget() -> None:
    message = exhausted("ForwardBackward", num_tokens=5000)
    assert "one prompt with its samples is more than trainer.max_tokens_per_microbatch = 4096" in message
    assert "lower trainer.max" not in message


def test_a_forward_pass_has_its_own_budget() -> None:
    message = exhausted("ComputeLogprobs", ReferenceSection(max_tokens_per_forward=9000))
    assert "lower trainer.max_tokens_per_forward = 9000" in message
    assert "recompute" not in message


def test_the_gpus_message_is_read_alike() -> None:
    text = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB"
    with (
        pytest.raises(MemoryExhaustedError, match=r"asked for 2\.50 GiB"),
        explain_oom("critic rank 0", "OptimStep", "critic", TRAINER, lambda: 0),
    ):
        raise torch.OutOfMemoryError(text)


@pytest.mark.parametrize(
    "error",
    [
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.29.7\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
            "Cuda failure 2 'out of memory'"
        ),
        RuntimeError("CUDA error: out of memory"),
    ],
    ids=["NCCL", "CUDA"],
)
def test_memory_outside_of_torchs_allocator_runs_out_too(error: RuntimeError) -> None:
    with (
        pytest.raises(MemoryExhaustedError, match="actor rank 1 is out of memory in OptimStep"),
        explain_oom("actor rank 1", "OptimStep", "trainer", TRAINER, lambda: 0),
    ):
        raise error


def test_other_errors_pass_and_the_process_ends_after_this_one() -> None:
    with (
        pytest.raises(RuntimeError, match="shape"),
        explain_oom("actor rank 0", "OptimStep", "trainer", TRAINER, lambda: 0),
    ):
        raise RuntimeError("shape mismatch")
    assert not issubclass(MemoryExhaustedError, AtollError)  # after which a service would go on
