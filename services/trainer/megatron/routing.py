"""Router replay: a token goes to the experts that rollout chose for it (arXiv:2510.11370). The trainer's
router would choose others wherever two experts are nearly equal.

Only the choice is replayed. Probabilities, and so the router's gradient, come from the trainer's own logits.

Letters in shapes: t tokens of this rank, Y layers of the whole model, C experts of a token, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Replay:
    """Stands in for Megatron's RouterReplay, whose global lists mix the micro-batches of a pipeline."""

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
    """A layer with experts. Its router gets the routes with the layer's other inputs at every call, so a
    recomputed forward pass chooses as the first one did."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        routes_tYC = kwargs["packed_seq_params"].routes_tYC
        self.mlp.router.router_replay = (
            None if routes_tYC is None else Replay(routes_tYC[:, self.layer_number - 1])
        )
        return super().forward(*args, **kwargs)
