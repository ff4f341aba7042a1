"""Adapters as folders of the peft library: adapter_config.json and adapter_model.safetensors."""

import json
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atoll.runtime.errors import UserError
from atoll.trainer.megatron.adapters.lora import adapters
from atoll.trainer.megatron.model import MegatronModel
from atoll.trainer.megatron.names import shapes
from atoll.trainer.megatron.tensor_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_adapter
from atoll.weights.adapters import adapter_names, is_target


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """As safetensors, with the permissions of any new file: the library's own are for the owner alone."""
    path.touch()
    mode = path.stat().st_mode  # as the umask wants it
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


def load_adapter(model: MegatronModel, folder: Path) -> None:
    """Fills this rank's adapters, reading only its own slices. Raises UserError if its rank, alpha or targets
    differ from the model's, or if files are missing or unreadable."""
    assert model.lora is not None
    check_adapter(folder, model.lora)
    expected = adapter_shapes(model)
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            got = {name: tuple(part.get_shape()) for name, part in slices.items()}
            if got != expected:
                name = min(dict(got.items() ^ expected.items()))
                raise UserError(
                    f"{folder}: tensor {name} has shape {got.get(name, 'none: it is missing')}, expected "
                    f"{expected.get(name, 'no such tensor')}: the adapter is of another model"
                )
            for adapter in adapters(model).values():
                for _, piece, parameter in adapter.parts:
                    rows = slice(piece.row, piece.row + piece.rows)
                    columns = slice(piece.column, piece.column + piece.columns)
                    parameter.detach().copy_(slices[piece.tensor][rows, columns])
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(
            f"{folder / ADAPTER_WEIGHTS} cannot be read ({error}): copy the adapter again"
        ) from error


def write_adapter(model: MegatronModel, folder: Path) -> None:
    """Writes `folder` such that peft's `PeftModel.from_pretrained(base, folder)` is the policy. Every rank
    calls it; rank 0 writes."""
    assert model.lora is not None
    tensors = _whole_adapters(model)
    if dist.get_rank() > 0:
        return
    folder.mkdir(parents=True)
    save_tensors(tensors, folder / ADAPTER_WEIGHTS)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.folder.resolve()),
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(model.lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2))


def adapter_shapes(model: MegatronModel) -> dict[str, tuple[int, ...]]:
    """PEFT's tensor name -> shape, for all adapters of the whole model."""
    assert model.lora is not None
    found: dict[str, tuple[int, ...]] = {}
    for tensor, shape in shapes(model.spec).items():
        if is_target(tensor, model.lora.targets):
            a, b = adapter_names(tensor)
            found |= {a: (model.lora.rank, shape[1]), b: (shape[0], model.lora.rank)}
    return found


def _whole_adapters(model: MegatronModel) -> dict[str, Tensor]:
    """All adapters, on each rank of one copy of the model. Since they are small, one all-reduce collects
    them: each part is contributed by the only rank, or the first rank, that has it."""
    whole = adapter_shapes(model)
    like = next(model.parameters)
    sizes = [prod(shape) for shape in whole.values()]
    flat = like.new_zeros(sum(sizes))
    parts = torch.split(flat, sizes)
    tensors = {name: part.view(shape) for (name, shape), part in zip(whole.items(), parts, strict=True)}
    is_first = parallel_state.get_tensor_model_parallel_rank() == 0
    for adapter in adapters(model).values():
        for kind, piece, parameter in adapter.parts:
            if is_first or adapter.is_split(kind):
                rows = slice(piece.row, piece.row + piece.rows)
                columns = slice(piece.column, piece.column + piece.columns)
                tensors[piece.tensor][rows, columns] = parameter.detach()
    dist.all_reduce(flat, group=parallel_state.get_model_parallel_group())
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}
