"""Low-rank adapters in a replica's memory, if the trainer pushes only adapters."""

import numpy as np
import torch

from atoll.weights.adapters import adapter_names, is_target
from atoll.wire.types import BOX, LoraSpec, ShardLayout


class AdapterBuffer:
    """Layout of the full A [rank, inputs] and B [outputs, rank] of each target in a flat buffer."""

    def __init__(self, weights: ShardLayout, lora: LoraSpec) -> None:
        """`weights` are the model's, each in one box."""
        self.scale = lora.alpha / lora.rank
        self.targets: list[str] = []
        names: list[str] = []
        boxes, self._size = [], 0
        for t, _, outputs, _, inputs, *_ in weights.boxes.tolist():
            if not is_target(weights.tensors[t], lora.targets):
                continue
            self.targets.append(weights.tensors[t])
            a, b = adapter_names(weights.tensors[t])
            for name, rows, columns in ((a, lora.rank, inputs), (b, outputs, lora.rank)):
                boxes.append((len(names), 0, rows, 0, columns, 0, self._size, columns))
                names.append(name)
                self._size += rows * columns
        self.shard_layout = ShardLayout(tuple(names), np.array(boxes, BOX))

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """A buffer of its dtype and on its device, whose adapters add nothing."""
        return torch.zeros(self._size, dtype=like.dtype, device=like.device)

    def of(self, buffer: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Views of A and B, by the tensor that they are added to."""
        views = [
            buffer[start : start + rows * columns].view(rows, columns)
            for _, _, rows, _, columns, _, start, _ in self.shard_layout.boxes.tolist()
        ]
        return dict(zip(self.targets, zip(views[::2], views[1::2], strict=True), strict=True))
