"""The experts of a layer as two fused parameters, in a number of launches independent of their number.

Letters in shapes: E experts of this rank; N rows, each a token sent to one of them, sorted by expert;
H hidden size; F width of an expert; G = 2F, gate and up side by side.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import grouped_mm

from atoll.runtime.errors import UserError
from atoll.trainer.megatron.layers import silu_gate

ALIGNMENT = 16  # bytes: rows of grouped_mm's operands start at multiples of it
CHECKPOINT_NAMES = {"gate_up": "linear_fc1.weight", "down": "linear_fc2.weight"}  # Megatron's


class GroupedExperts(torch.nn.Module):
    """This rank's experts. The constructor takes the arguments that Megatron's MoELayer passes."""

    def __init__(
        self, num_local_experts: int, config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self._recomputes = config.recompute_granularity == "selective"
        self._ranks = pg_collection
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        multiple = ALIGNMENT // config.params_dtype.itemsize
        if hidden % multiple or ffn % multiple:
            raise UserError(
                f"this model has experts of hidden_size {hidden} and moe_intermediate_size {ffn}: in "
                f"{config.params_dtype}, both must be multiples of {multiple}"
            )
        self.gate_up = _weight((num_local_experts, 2 * ffn, hidden), config)
        self.down = _weight((num_local_experts, hidden, ffn), config)

    def forward(self, hidden_NH: Tensor, rows_E: Tensor, probs_N: Tensor) -> tuple[Tensor, None]:
        """[N, H] outputs, scaled by the router's probabilities. `rows_E` counts each expert's rows; Megatron
        passes it on the host."""
        ends_E = rows_E.to(hidden_NH.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        gate_up_NG = grouped_mm(hidden_NH, self.gate_up.mT, offs=ends_E)
        if not self._recomputes:
            return grouped_mm(_activate(gate_up_NG, probs_N), self.down.mT, offs=ends_E), None
        product = CheckpointWithoutOutput(fp8=None)
        product_NF = product.checkpoint(_activate, gate_up_NG, probs_N)
        output_NH = grouped_mm(product_NF, self.down.mT, offs=ends_E)
        product.discard_output_and_register_recompute(output_NH)
        return output_NH, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: object = None
    ) -> dict[str, ShardedTensor]:
        """Experts by their numbers in the whole layer, as Megatron's own checkpoints have them, so that they
        can be loaded with any number of expert-parallel ranks."""
        ranks = self._ranks
        place = (len(sharded_offsets), ranks.ep.rank(), ranks.ep.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{CHECKPOINT_NAMES[name]}",
                weight,
                *sharded_offsets,
                place,
                replica_id=(0, 0, ranks.expt_dp.rank()),
                prepend_axis_num=len(sharded_offsets),
            )
            for name, weight in self.named_parameters()
        }


def skip_sorting(layer: MoELayer) -> None:
    """Without expert parallelism, rows arrive sorted by expert. Megatron would still copy them, expert by
    expert, unless a rank has a single one."""
    if layer.ep_group.size() == 1:
        layer.token_dispatcher.num_local_experts = 1


def _weight(shape: tuple[int, int, int], config: TransformerConfig) -> torch.nn.Parameter:
    """Uninitialized, and tagged as Megatron's own experts are.

    Without `allreduce`, gradients are summed only over ranks that have the same experts. Without expert
    parallelism, all tensor-parallel ranks have copies, each of which gets its own tokens: Megatron sums their
    gradients over these ranks if they are tagged like norms.
    """
    weight = torch.nn.Parameter(
        torch.empty(shape, device=torch.cuda.current_device(), dtype=config.params_dtype)
    )
    if config.expert_model_parallel_size > 1:
        weight.allreduce = False  # type: ignore[attr-defined]
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
    else:
        weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def _activate(gate_up_NG: Tensor, probs_N: Tensor) -> Tensor:
    """silu(gate) * up * probability [N, F]."""
    return _Scale.apply(silu_gate(gate_up_NG), probs_N.unsqueeze(1))  # type: ignore[no-any-return, no-untyped-call]


class _Scale(torch.autograd.Function):
    """x * fp32 scale, rounded to x's dtype, without copies of x in fp32."""

    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, scale_N1: Tensor) -> Tensor:
        ctx.save_for_backward(x_NF, scale_N1)
        return torch.mul(x_NF, scale_N1, out=x_NF.new_empty(x_NF.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x_NF, scale_N1 = ctx.saved_tensors
        grad_x_NF = torch.mul(grads[0], scale_N1, out=grads[0].new_empty(x_NF.shape))
        return grad_x_NF, (grads[0] * x_NF).sum(1, keepdim=True, dtype=scale_N1.dtype)
