"""Time of work on a device."""

import time
from collections.abc import Callable
from statistics import median

import torch


def finish(device: torch.device) -> None:
    """Waits for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Wall time of one call, up to the end of its kernels."""
    finish(device)
    started = time.perf_counter()
    function()
    finish(device)
    return 1e3 * (time.perf_counter() - started)


def median_milliseconds(function: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    """After one call that chooses and compiles kernels."""
    function()
    return median(milliseconds(function, device) for _ in range(rounds))
