"""Runs unmodified megatron-core on a CPU, by patching its calls of torch.cuda.

The patches affect the whole process. `device="cuda"` arguments are rewritten by a PyTorch function mode,
which belongs to one thread and slows down every call: enter it only while Megatron's objects are built. Calls
in training steps name no device.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def _import_without_compiler() -> None:
    """Megatron calls torch.compile during its import, which loads the compiler: half of the start-up time of
    a CPU process, which never calls the compiled functions. Import this module first."""
    compiler = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler


# Some modules of Megatron warn during their import; neither package is needed.
warnings.filterwarnings("ignore", r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning)
if not torch.cuda.is_available():
    _import_without_compiler()


class _NullObject:
    """Stands in for a stream or an event: every method does nothing and returns another null object."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> "Callable[..., _NullObject]":
        if name.startswith("__"):
            raise AttributeError(name)
        return _NullObject

    def __enter__(self) -> "_NullObject":
        return self

    def __exit__(self, *_: object) -> None: ...


def _get_rng_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _flat_rows(
    grad_output: torch.Tensor, all_gathered_input: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Omits Megatron's copy to contiguous rows: layers.py already uses the best layout for the matrix
    product."""
    return grad_output.flatten(0, -2), all_gathered_input.flatten(0, -2)


def _splits(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """There is nothing to move to the CPU, but Megatron expects a NumPy array, since its collective takes no
    tensor."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


TORCH_CUDA: Mapping[str, object] = {
    "current_device": lambda: CPU,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "current_stream": lambda device=None: _NullObject(),
    "default_stream": lambda device=None: _NullObject(),
    "stream": lambda stream: nullcontext(),
    "Stream": _NullObject,
    "Event": _NullObject,
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "manual_seed": _manual_seed,
}
MEGATRON_RANDOM: Mapping[str, object] = {
    "_get_cuda_rng_state": _get_rng_state,
    "_set_cuda_rng_state": _set_rng_state,
}
MEGATRON_LAYERS: Mapping[str, object] = {"prepare_input_tensors_for_wgrad_compute": _flat_rows}
MEGATRON_DISPATCHER: Mapping[str, object] = {"maybe_move_tensor_to_cpu": _splits}

# Megatron's optimizers compare these names.
_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


class _CpuDeviceMode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _TYPE_NAMES[args[0].dtype]
        if kwargs and ("device" in kwargs or "pin_memory" in kwargs):
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = CPU
        return func(*args, **(kwargs or {}))


def _patch(module: ModuleType, replacements: Mapping[str, object]) -> None:
    for name, replacement in replacements.items():
        setattr(module, name, replacement)


def apply() -> AbstractContextManager[object]:
    """Call before any Megatron object is built, and build them inside the result.

    Patching twice changes nothing. If CUDA is available, nothing is patched.
    """
    if torch.cuda.is_available():
        return nullcontext()
    from megatron.core.tensor_parallel import layers, random
    from megatron.core.transformer.moe import token_dispatcher

    _patch(torch.cuda, TORCH_CUDA)
    _patch(random, MEGATRON_RANDOM)
    _patch(layers, MEGATRON_LAYERS)
    _patch(token_dispatcher, MEGATRON_DISPATCHER)
    return _CpuDeviceMode()
