"""The machine, and the tests of tests/gpu: parts 1 to 5."""

import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from benchmarks.gpu.report import Row

GPU_TESTS = Path(__file__).parents[2] / "tests" / "gpu"
CHOICES = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}  # torch.nn.attention.SDPBackend


def facts() -> Iterator[Row]:
    """Memory, CuPy's NCCL, and the attention kernels that PyTorch chooses."""
    free, total = torch.cuda.mem_get_info()
    yield Row("memory, free of total", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB")
    try:
        from cupy.cuda import nccl

        yield Row("CuPy's NCCL", str(nccl.get_version()))
    except ImportError as error:
        yield Row("CuPy's NCCL", f"none: {error}")
    for dtype, masked in product((torch.float32, torch.bfloat16), (True, False)):
        yield Row(
            f"attention of {dtype}, {'a mask' if masked else 'causal'}", chosen_attention(dtype, masked)
        )


def chosen_attention(dtype: torch.dtype, masked: bool, device: str = "cuda") -> str:
    """For grouped queries, as `shared_prefix` calls it."""
    query = torch.randn(2, 8, 64, 64, device=device, dtype=dtype)
    key = torch.randn(2, 2, 64, 64, device=device, dtype=dtype)
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool, device=device) if masked else None
    return CHOICES[
        torch._fused_sdp_choice(query, key, key, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    ]


def forks() -> Iterator[Row]:
    """Ranks forked from a server use CUDA: off-loading, recomputation, updates."""
    return run_tests("test_memory.py", "test_updates.py")


def attention() -> Iterator[Row]:
    """All backends against dense attention."""
    return run_tests("test_attention.py")


def transports() -> Iterator[Row]:
    """Pushes through device memory and NCCL, checksums, deltas."""
    return run_tests("test_transports.py", "-k", "not merged")


def merged_adapters() -> Iterator[Row]:
    """A push of weights of which some are on the host."""
    return run_tests("test_transports.py", "-k", "merged")


def run_tests(*arguments: str, folder: Path = GPU_TESTS) -> Iterator[Row]:
    """How the tests of some files end, with reasons of those that are skipped. Raises RuntimeError if one
    fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--durations=5", *arguments]
    ended = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    print(ended.stdout, flush=True)
    yield Row(" ".join(arguments), ended.stdout.strip().splitlines()[-1])
    for reason in re.findall(r"^SKIPPED (.*)$", ended.stdout, re.MULTILINE):
        yield Row("skipped", reason)
    if ended.returncode:
        raise RuntimeError(f"pytest ended with {ended.returncode}; see the output above")
