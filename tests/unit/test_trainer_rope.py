"""The rotation against complex multiplication."""

import torch

from atoll.trainer.megatron.rope import compute_rotation, rotate


def test_rotates_pairs_by_position() -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 7, 300])
    x = torch.randn(4, 3, 8, dtype=torch.float64, requires_grad=True)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = positions[:, None] * torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat([turned.real, turned.imag], -1)

    got = rotate(x, compute_rotation(positions, 100 ** -torch.tensor([0, 0.25, 0.5, 0.75]), torch.float64))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)  # angles are fp32, as in transformers
    upstream = torch.randn_like(expected)
    (grad,), (expected_grad,) = (torch.autograd.grad(y, x, upstream) for y in (got, expected))
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-4)


def test_gradient_is_exact() -> None:
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)
    rotation = compute_rotation(torch.tensor([3, 0, 11]), torch.tensor([1.0, 0.3, 0.05]), torch.float64)
    assert torch.autograd.gradcheck(lambda values: rotate(values, rotation), (x,))
