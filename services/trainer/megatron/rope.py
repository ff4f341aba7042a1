"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split order of Qwen and Llama.

The rotation is computed from positions once per micro-batch and used by every layer.

Letters in shapes: T tokens, H heads, D size of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    cos_T1D: Tensor
    sin_T1D: Tensor  # negative in the first half, which gets minus the second half


def compute_rotation(positions_T: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Rotation:
    """Pair (i, i + D/2) of a token at position p rotates by p * frequencies[i] radians; [D/2] in fp32."""
    half_TD = torch.outer(positions_T.float(), frequencies)
    cos, sin = half_TD.cos(), half_TD.sin()
    return Rotation(
        torch.cat([cos, cos], -1).unsqueeze(1).to(dtype), torch.cat([-sin, sin], -1).unsqueeze(1).to(dtype)
    )


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """Rotates each token's heads by its own angles. [T, H, D]"""
    return _Rotate.apply(x_THD, *rotation)  # type: ignore[no-any-return, no-untyped-call]


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the inverse rotation, so the input need not be saved."""

    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1D, sin_T1D)
        return _rotate_halves(x_THD, cos_T1D, sin_T1D)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_T1D, sin_T1D = ctx.saved_tensors
        return _rotate_halves(grads[0], cos_T1D, -sin_T1D), None, None


def _rotate_halves(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    return torch.addcmul(x_THD * cos_T1D, x_THD.roll(x_THD.shape[-1] // 2, -1), sin_T1D)
