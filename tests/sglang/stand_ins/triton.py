"""In place of triton: decorators leave functions as they are, and no kernel is ever launched on a CPU."""

from importlib import import_module
from typing import Any, NoReturn

from importable import Inert, stand_in

__version__ = "3.8.0"
__path__: list[str] = []


class _Driver:
    @property
    def active(self) -> NoReturn:
        raise RuntimeError("0 active drivers")  # as triton itself says where there is no GPU


stand_in("triton", driver=_Driver())
import_module("triton.runtime")


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def jit(function: Any = None, **settings: object) -> Any:
    return function if function is not None else lambda function: function


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Inert()


def autotune(*arguments: object, **settings: object) -> Any:
    return lambda function: function


heuristics = autotune
