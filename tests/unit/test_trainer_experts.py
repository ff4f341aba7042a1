"""Fused experts against each expert's formula, and the number of their launches."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.runtime.errors import UserError
from atoll.trainer.megatron.experts import GroupedExperts

H, F = 16, 8


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def experts(
    num: int, *, ranks: int = 1, rank: int = 0, ffn: int = F, dtype: torch.dtype = torch.float32
) -> GroupedExperts:
    config = SimpleNamespace(
        hidden_size=H,
        moe_ffn_hidden_size=ffn,
        params_dtype=dtype,
        recompute_granularity=None,
        expert_model_parallel_size=ranks,
        sequence_parallel=True,
    )
    group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks)
    groups = SimpleNamespace(ep=group, expt_dp=SimpleNamespace(rank=lambda: 3))
    module = GroupedExperts(num, config, groups)  # type: ignore[arg-type]
    torch.manual_seed(0)
    for weight in module.parameters():
        torch.nn.init.normal_(weight)
    return module


def one_by_one(module: GroupedExperts, x_NH: Tensor, rows: list[int], probs_N: Tensor) -> Tensor:
    outputs = []
    for expert, (x, probs) in enumerate(zip(x_NH.split(rows), probs_N.split(rows), strict=True)):
        gate, up = module.gate_up[expert, :F], module.gate_up[expert, F:]
        product = silu(x @ gate.T) * (x @ up.T) * probs[:, None]
        outputs.append(product @ module.down[expert].T)
    return torch.cat(outputs)


@pytest.mark.parametrize("rows", [[3, 0, 5, 1], [0, 9, 0, 0], [0, 0, 0, 0]])
def test_experts_equal_their_formula(rows: list[int]) -> None:
    """With experts, and whole ranks, that get no token: their gradient is 0, not missing."""
    module = experts(4)
    x_NH, probs_N = torch.randn(sum(rows), H, requires_grad=True), torch.rand(sum(rows), requires_grad=True)
    upstream = torch.randn(sum(rows), H)
    got, bias = module(x_NH, torch.tensor(rows), probs_N)
    expected = one_by_one(module, x_NH, rows, probs_N)
    assert bias is None
    torch.testing.assert_close(got, expected)
    inputs = (x_NH, probs_N, module.gate_up, module.down)
    for grad, expected_grad in zip(
        torch.autograd.grad(got, inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(grad, expected_grad)


def test_probabilities_stay_in_float32() -> None:
    """bfloat16 outputs are those of float32 weights, to within the rounding of each product's terms."""
    module, rows = experts(2, dtype=torch.bfloat16), [5, 3]
    x_NH, probs_N = torch.randn(8, H, dtype=torch.bfloat16), torch.rand(8, requires_grad=True)
    got, _ = module(x_NH, torch.tensor(rows), probs_N)
    exact = one_by_one(module.float(), x_NH.float(), rows, probs_N)
    torch.testing.assert_close(got.float(), exact, rtol=0.02, atol=0.1)
    (grad,) = torch.autograd.grad(got, probs_N, torch.ones_like(got))
    assert grad.dtype is torch.float32


class Launches(TorchDispatchMode):
    """Counts operations, forward and backward, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def launches(num: int) -> Counter[str]:
    """Of a pass over 128 rows."""
    module = experts(num)
    x_NH, probs_N = torch.randn(128, H, requires_grad=True), torch.rand(128, requires_grad=True)
    with Launches() as launches:
        output_NH, _ = module(x_NH, torch.full((num,), 128 // num), probs_N)
        output_NH.backward(torch.ones(128, H))
    return launches.count


def test_launches_do_not_depend_on_the_number_of_experts() -> None:
    """grouped_mm is a single launch on a GPU too, in bfloat16 on compute capability 9.0 or 10.0."""
    assert launches(64) == launches(8)
    assert launches(8)["aten._grouped_mm.default"] == 6  # of two matrices: outputs, gradients of both factors


def test_megatron_sums_gradients_over_the_right_ranks() -> None:
    """Copies on tensor-parallel ranks like norms; experts that are on one rank only over its own copies."""
    for weight in experts(4).parameters():
        assert weight.sequence_parallel
        assert not hasattr(weight, "tensor_model_parallel")
    for weight in experts(4, ranks=2).parameters():
        assert (weight.allreduce, weight.tensor_model_parallel) == (False, True)


def test_checkpoints_number_experts_over_all_ranks() -> None:
    """The second of two ranks has experts 4 to 7 of 8, in layer 2 of 3, under Megatron's names."""
    state = experts(4, ranks=2, rank=1).sharded_state_dict("mlp.experts.", ((0, 2, 3),))
    found = {name: (s.key, s.global_shape, s.global_offset, s.replica_id) for name, s in state.items()}
    assert found == {
        "mlp.experts.gate_up": (
            "mlp.experts.experts.linear_fc1.weight",
            (3, 8, 2 * F, H),
            (2, 4, 0, 0),
            (0, 0, 3),
        ),
        "mlp.experts.down": ("mlp.experts.experts.linear_fc2.weight", (3, 8, H, F), (2, 4, 0, 0), (0, 0, 3)),
    }


def test_sizes_that_the_kernel_refuses_are_named() -> None:
    expected = r"moe_intermediate_size 4: in torch.bfloat16, both must be multiples of 8"
    with pytest.raises(UserError, match=expected):
        experts(2, ffn=4, dtype=torch.bfloat16)
