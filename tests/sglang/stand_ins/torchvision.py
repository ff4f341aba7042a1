"""In place of torchvision, whose build belongs to another torch: sglang imports it for images."""

from enum import Enum
from typing import Any

from importable import Inert, stand_in

__version__ = "0.28.0"
__path__: list[str] = []


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


stand_in("torchvision", InterpolationMode=InterpolationMode)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Inert()
