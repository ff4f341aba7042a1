"""Copies what a micro-batch needs to the device, in at most two copies."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def upload(value: T, device: torch.device) -> T:
    """`value` with its tensors on the device. It is a tensor, or a dataclass or tuple of them, and of others.

    All integers and booleans travel in one int64 tensor, all numbers in one float32 tensor. If the device is
    a GPU, they travel from pinned memory, and the host does not wait.
    """
    return value if device.type == "cpu" else packed(value, device)


def packed(value: T, device: torch.device) -> T:
    """As `upload`, on any device."""
    leaves = list(_leaves(value))
    blobs = {
        dtype: _copy([leaf for leaf in leaves if _carrier(leaf) is dtype], dtype, device)
        for dtype in (torch.int64, torch.float32)
    }
    return cast(T, _replaced(value, iter([next(blobs[_carrier(leaf)]) for leaf in leaves])))


def _carrier(leaf: Tensor) -> torch.dtype:
    return torch.float32 if leaf.is_floating_point() else torch.int64


def _copy(leaves: list[Tensor], carrier: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Each tensor on the device, as a part of one that holds all."""
    if not leaves:
        return
    sizes = [leaf.numel() for leaf in leaves]
    blob = torch.empty(sum(sizes), dtype=carrier, pin_memory=device.type == "cuda")
    torch.cat([leaf.flatten().to(carrier) for leaf in leaves], out=blob)
    parts = torch.split(blob.to(device, non_blocking=True), sizes)
    for part, leaf in zip(parts, leaves, strict=True):
        yield part.view(leaf.shape).to(leaf.dtype)


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for child in _children(value):
        yield from _leaves(child)


def _replaced(value: Any, leaves: Iterator[Tensor]) -> Any:
    """`value` with `leaves` for its tensors, in the order of `_leaves`."""
    if isinstance(value, Tensor):
        return next(leaves)
    children = [_replaced(child, leaves) for child in _children(value)]
    if isinstance(value, tuple):
        return tuple(children)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **dict(zip((field.name for field in fields(value)), children, strict=True)))
    return value


def _children(value: Any) -> tuple[Any, ...]:
    if isinstance(value, tuple):
        return value
    if is_dataclass(value):
        return tuple(getattr(value, field.name) for field in fields(value))
    return ()
