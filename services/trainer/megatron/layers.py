"""The norm and the MLP with hand-written gradients, which need fewer passes over memory than autograd's; and
routers, which may replay the experts that rollout chose.

Letters in shapes: N rows (tokens, or tokens x heads), H size of a row, F width of the MLP on this rank;
t tokens of this rank, Y layers of the whole model, C experts of a token, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019, arXiv:1910.07467), computed in fp32.

    The constructor takes the arguments that Megatron passes. The tag `sequence_parallel` makes Megatron sum
    this weight's gradient over tensor-parallel ranks if each normalizes its own part of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, device=torch.cuda.current_device(), dtype=config.params_dtype)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":  # one kernel forward and one backward, on GPUs only
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _RMSNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-any-return, no-untyped-call]


class _RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        x_NH = x.float().reshape(-1, x.shape[-1])
        length_N1 = torch.linalg.vector_norm(x_NH, dim=-1, keepdim=True)
        scale_N1 = (length_N1.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight_H, scale_N1)
        unit_NH: Tensor = (x_NH * scale_N1).to(x.dtype)
        return unit_NH.mul_(weight_H).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """With u = x * scale: d weight = sum of grad * u; d x = scale * (grad w - u * mean(grad w u))."""
        x, weight_H, scale_N1 = ctx.saved_tensors
        grad_NH = grads[0].float().reshape(-1, x.shape[-1])
        unit_NH = x.float().reshape(-1, x.shape[-1]) * scale_N1
        product_NH = grad_NH * unit_NH
        mean_N1 = (product_NH @ weight_H.float() / x.shape[-1]).unsqueeze(1)
        grad_x_NH = torch.addcmul(grad_NH * weight_H, unit_NH, mean_N1, value=-1).mul_(scale_N1)
        return grad_x_NH.view(x.shape).to(x.dtype), product_NH.sum(0).to(weight_H.dtype), None


class ValueHead(torch.nn.Module):
    """One number per row of hidden states, without bias; 0 until it is loaded or trained.

    Every tensor-parallel rank holds it whole and computes the same values and gradients.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, hidden_size, device=torch.cuda.current_device(), dtype=dtype)
        )

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """[N], at least fp32."""
        values_N = (hidden_NH @ self.weight.T).squeeze(-1)
        return values_N.to(torch.promote_types(values_N.dtype, torch.float32))


class GatedMLP(MLP):  # type: ignore[misc]
    """Megatron's MLP with silu(gate) * up in one autograd function.

    With selective recomputation, the product is freed after its use, and recomputed for the backward pass.
    """

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        gate_up, _ = self.linear_fc1(hidden_states)
        if self.config.recompute_granularity != "selective":
            output, _ = self.linear_fc2(silu_gate(gate_up))
            return output, None
        product = CheckpointWithoutOutput(fp8=None)
        output, _ = self.linear_fc2(product.checkpoint(silu_gate, gate_up))
        product.discard_output_and_register_recompute(output)
        return output, None


class ExpertRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with its own matrix product: Megatron's requires TransformerEngine.

    It computes in the model's dtype, as transformers, SGLang and the local engine do: in a higher precision,
    more tokens would get other experts than in rollout.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config, pg_collection)
        self.weight.data = self.weight.data.to(torch.cuda.current_device())  # Megatron creates it on the host

    def gating(self, input: Tensor) -> Tensor:
        """fp32 logits of hidden states [..., H]."""
        return linear(input, self.weight).float()


@dataclass(frozen=True, slots=True)
class Replay:
    """Router replay: tokens go to the experts that rollout chose for them (arXiv:2510.11370). Otherwise, the
    trainer's router may choose others wherever two experts are nearly equal.

    Only the choice is replayed: probabilities, and so the router's gradient, come from the trainer's logits.
    Stands in for Megatron's RouterReplay, whose global lists mix the micro-batches of a pipeline.
    """

    routes_tC: Tensor

    def get_replay_topk(
        self,
        scores_tE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [t, C] of each token's experts: the router's own if no C different ones are
        recorded."""
        _, own_tC = choose(scores_tE, topk, num_groups=num_groups, group_topk=group_topk)
        routes_tC = self.routes_tC.long()
        sorted_tC = routes_tC.sort(1).values
        is_recorded_t = (sorted_tC[:, 0] >= 0) & (sorted_tC[:, -1] < scores_tE.shape[1])
        is_recorded_t &= (sorted_tC.diff(dim=1) > 0).all(1)
        chosen_tC = torch.where(is_recorded_t.unsqueeze(1), routes_tC, own_tC)
        return scores_tE.gather(1, chosen_tC), chosen_tC


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A layer whose router, if there is one, gets the routes with the layer's other inputs at every call:
    a recomputed forward pass then chooses as the first one did."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_moe_layer:
            routes_tYC = kwargs["packed_seq_params"].routes_tYC
            self.mlp.router.router_replay = (
                None if routes_tYC is None else Replay(routes_tYC[:, self.layer_number - 1])
            )
        return super().forward(*args, **kwargs)


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [..., F] of [gate; up] side by side in the last dimension."""
    return _SiluGate.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_NF, up_NF = gate_up.chunk(2, -1)
        open_NF = silu(gate_NF)
        ctx.save_for_backward(gate_up, open_NF)
        return torch.mul(open_NF, up_NF, out=_empty_rows(open_NF))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, open_NF = ctx.saved_tensors
        gate_NF, up_NF = gate_up.chunk(2, -1)
        grad = _empty_rows(gate_up)
        grad_gate_NF, grad_up_NF = grad.chunk(2, -1)
        torch.mul(grads[0], open_NF, out=grad_up_NF)
        torch.ops.aten.silu_backward(grads[0] * up_NF, gate_NF, grad_input=grad_gate_NF)
        return grad


def _empty_rows(like: Tensor) -> Tensor:
    """Empty tensor of `like`'s shape. On a CPU, row strides avoid powers of two, with which rows compete for
    the same cache lines: a matrix product that sums over rows (a weight's gradient) would take up to 1.7
    times as long."""
    size = like.shape[-1]
    padding = 16 if like.device.type == "cpu" else 0
    return like.new_empty(*like.shape[:-1], size + padding)[..., :size]
