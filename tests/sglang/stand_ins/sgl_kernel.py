"""In place of sglang's kernels, which have no build for a CPU without AMX: enough to import and run sglang's
own torch code. What the CPU engine calls is here; anything else raises when it is called."""

from typing import Any, NoReturn

import torch

__version__ = "0.4.10"


class _HostMemory:
    @staticmethod
    def cudaHostRegister(*arguments: int) -> int:  # noqa: N802
        return 0


# sglang page-locks what it records of experts for copies from a GPU, and asks for one even on a CPU
torch.cuda.cudart = lambda: _HostMemory  # type: ignore[assignment]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*arguments: object, **settings: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for this machine")

    return kernel


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    stride: int,
) -> None:
    """Request r, tokens start to end: their places in the KV pool, which lie one after another."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[offset : offset + last - first]
        offset += last - first
