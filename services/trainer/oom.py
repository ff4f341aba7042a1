"""Out-of-memory errors with advice."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from atoll.config.schema import RoleSection, TrainerSection
from atoll.runtime.errors import MemoryExhaustedError

GIB = 1 << 30


@contextmanager
def explain_oom(
    who: str, phase: str, table: str, section: RoleSection, tokens: Callable[[], int]
) -> Iterator[None]:
    """Translates PyTorch's allocation errors to MemoryExhaustedError.

    `phase` is the command; `table` is the role's in the config; `tokens` returns the number of tokens of the
    current micro-batch, or 0.
    """
    try:
        yield
    except RuntimeError as error:  # the CPU's allocator, CUDA and NCCL have no class of their own for it
        text = str(error)
        if "out of memory" not in text and "DefaultCPUAllocator" not in text:
            raise
        asked = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", text)
        sizes = [f"asked for {asked[1]}"] if asked else []
        sizes.append(f"{_free() / GIB:.1f} GiB are free")
        num_tokens = tokens()
        if num_tokens:
            sizes.append(f"a micro-batch of {num_tokens:,} tokens")
        raise MemoryExhaustedError(
            f"{who} is out of memory in {phase}: {', '.join(sizes)}; "
            f"{_advice(phase, table, section, num_tokens)}; see `atoll plan --memory` for a breakdown"
        ) from error


def _free() -> int:
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return int(psutil.virtual_memory().available)


def _advice(phase: str, table: str, section: RoleSection, num_tokens: int) -> str:
    """What to change, the cheapest first."""
    parallel, changes = section.parallel, []
    is_forward = phase in ("ComputeLogprobs", "ComputeValues")
    name = "max_tokens_per_forward" if is_forward else "max_tokens_per_microbatch"
    budget = section.max_tokens_per_forward if is_forward else section.max_tokens_per_microbatch
    if num_tokens > budget:
        changes.append(f"one prompt with its samples is more than {table}.{name} = {budget}: make it shorter")
    elif is_forward or phase == "ForwardBackward":
        changes.append(f"lower {table}.{name} = {budget}")
    if phase == "ForwardBackward" and section.recompute != "full":
        changes.append(f'set {table}.recompute = "full"')
    if isinstance(section, TrainerSection) and not section.optimizer.distributed and parallel.data > 1:
        changes.append(f"set {table}.optimizer.distributed = true")
    if not section.offload:
        changes.append("set offload = true in the tables of roles that share the device")
    if section.dtype == "float32":
        changes.append(f'set {table}.dtype = "bfloat16"')
    changes.append(f"raise {table}.parallel.tensor = {parallel.tensor} or pipeline = {parallel.pipeline}")
    return "; or ".join(changes)
