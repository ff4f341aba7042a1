"""Canaries: each symbol that the shim replaces still exists and takes the arguments that the shim expects.

Signatures are those of torch 2.13.0 and megatron-core 0.16.1. The shim itself runs in another process, since
its patches would persist.
"""

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher as megatron_dispatcher

from atoll.trainer.megatron import cpu_compat
from tests.torch_ranks import run_ranks


@pytest.mark.parametrize("name", cpu_compat.TORCH_CUDA)
def test_torch_cuda_takes_what_its_replacement_takes(name: str) -> None:
    original, replacement = getattr(torch.cuda, name), cpu_compat.TORCH_CUDA[name]
    assert callable(replacement)
    if not isinstance(original, type):
        assert _names(original) == _names(replacement)[: len(_names(original))]


@pytest.mark.parametrize("name", cpu_compat.MEGATRON_RANDOM)
def test_megatron_random_takes_what_its_replacement_takes(name: str) -> None:
    replacement = cpu_compat.MEGATRON_RANDOM[name]
    assert callable(replacement)
    assert _names(getattr(megatron_random, name)) == _names(replacement)


@pytest.mark.parametrize("name", cpu_compat.MEGATRON_LAYERS)
def test_megatron_layers_take_what_their_replacement_takes(name: str) -> None:
    replacement = cpu_compat.MEGATRON_LAYERS[name]
    assert callable(replacement)
    assert _names(getattr(megatron_layers, name)) == _names(replacement)


@pytest.mark.parametrize("name", cpu_compat.MEGATRON_DISPATCHER)
def test_megatron_dispatcher_takes_what_its_replacement_takes(name: str) -> None:
    replacement = cpu_compat.MEGATRON_DISPATCHER[name]
    assert callable(replacement)
    assert _names(getattr(megatron_dispatcher, name)) == _names(replacement)


def test_a_trainer_starts_without_the_compiler() -> None:
    """It is never called on a CPU, and would take a third of the start-up time."""
    loaded = "import sys, atoll.trainer.__main__; print('torch._dynamo' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, timeout=120)
    assert answer.stdout == "False\n"


def _names(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def under_the_shim() -> None:
    mode = cpu_compat.apply()
    assert torch.cuda.current_device() == torch.device("cpu")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        torch.cuda.Event().record()
        torch.cuda.current_stream().record_event().synchronize()

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    megatron_random._set_cuda_rng_state(megatron_random._get_cuda_rng_state())

    with mode:
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.zeros(2).to(device="cuda").device.type == "cpu"
        assert torch.zeros(2).cuda().device.type == "cpu"
        assert not torch.zeros(2, pin_memory=True).is_pinned()
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(2).type(torch.float64).dtype == torch.float64
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_what_the_shim_answers() -> None:
    assert len(run_ranks(under_the_shim, 1)) == 1
