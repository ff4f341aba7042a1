"""Starts SGLang's server with less GPU memory for weights, keys and values than SGLang would take.

    python -m atoll.rollout.engines.sglang.launch RESERVED_MIB ARGUMENTS

SGLang computes that share, mem_fraction_static, from the GPU, the model and other arguments, and leaves
the rest for its activations and CUDA graphs. A hook of SGLang's plugin interface lowers the result, so Atoll
needs no copy of the formula.
"""

import runpy
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
from sglang.srt.utils.common import get_device_memory_capacity

STEP = "handle_gpu_memory_settings"  # of SGLang: it computes mem_fraction_static


def reserve(mib: int) -> None:
    """Lowers the share of the server that this process starts by `mib` MiB per GPU, unless the user has set
    it."""

    def lower(server_args: Any, compute: Callable[[Any], None]) -> None:
        chosen = resolving_view(server_args).mem_fraction_static
        compute(server_args)
        settings = resolving_view(server_args)
        memory = get_device_memory_capacity(settings.device)  # MiB
        if chosen is None and memory is not None:
            lowered = round(settings.mem_fraction_static - mib / memory, 3)
            declare_resolution(server_args, __name__, mem_fraction_static=lowered)

    register_resolution_hook(STEP)(lower)


if __name__ == "__main__":
    _, reserved, *arguments = sys.argv
    reserve(int(reserved))
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
