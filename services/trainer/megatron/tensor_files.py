"""Opens and checks the files of model and adapter folders, without loading torch."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from atoll.config.schema import LoraConfig
from atoll.runtime.errors import UserError
from atoll.runtime.model_spec import ModelSpec
from atoll.trainer.megatron.names import shapes

INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def open_tensors(
    folder: Path, spec: ModelSpec, files: ExitStack, framework: Literal["pt", "numpy"] = "pt"
) -> dict[str, Any]:
    """Tensor name -> safetensors slice, for exactly the tensors of `spec`; `files` keeps the files open."""
    index = folder / INDEX
    names = {"model.safetensors"}
    if index.exists():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError) as error:
            raise UserError(f"{index} has no readable weight_map ({error!r}); copy it again") from error
    slices: dict[str, Any] = {}
    for name in sorted(names):
        try:
            file = files.enter_context(safe_open(folder / name, framework=framework))
        except FileNotFoundError as error:
            raise UserError(
                f"{folder} has no weights: {name} is missing; expected model.safetensors, or {INDEX} and "
                "every file that it names"
            ) from error
        except SafetensorError as error:
            raise UserError(f"{folder / name} is not a safetensors file ({error}); copy it again") from error
        slices |= {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118 (no mapping)
    if spec.tied:
        slices.pop("lm_head.weight", None)  # some tied checkpoints repeat the embedding
    if fused := [name for name in slices if name.endswith(".mlp.experts.gate_up_proj")]:
        raise UserError(
            f"{folder} has all experts of a layer in one tensor, {fused[0]}; expected one for each of them, "
            "as published: load the folder with transformers and save it with save_pretrained"
        )
    _check_tensors(folder, {name: tuple(part.get_shape()) for name, part in slices.items()}, shapes(spec))
    return slices


def _check_tensors(
    folder: Path, got: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    for problem, names in (
        ("lacks", sorted(expected.keys() - got.keys())),
        ("has unknown", sorted(got.keys() - expected.keys())),
    ):
        if names:
            raise UserError(
                f"{folder} {problem} tensor {names[0]} (and {len(names) - 1} more); expected the "
                f"{len(expected)} tensors that its config.json describes: config and weights do not match"
            )
    for name, shape in expected.items():
        if got[name] != shape:
            raise UserError(
                f"{folder}: tensor {name} has shape {got[name]}, expected {shape} from config.json: "
                "config and weights do not match"
            )


def check_adapter(folder: Path, lora: LoraConfig) -> None:
    """Raises UserError if a folder of peft holds no adapter of the form that `lora` asks for."""
    try:
        config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} holds no adapter of peft: {ADAPTER_CONFIG} cannot be read ({error})"
        ) from error
    targets = config.get("target_modules")
    for key, got, ours, setting in (
        ("peft_type", config.get("peft_type"), "LORA", None),
        ("use_rslora", config.get("use_rslora", False), False, None),
        ("use_dora", config.get("use_dora", False), False, None),
        ("bias", config.get("bias", "none"), "none", None),
        ("modules_to_save", config.get("modules_to_save"), None, None),
        ("r", config.get("r"), lora.rank, "rank"),
        ("lora_alpha", config.get("lora_alpha"), lora.alpha, "alpha"),
        (
            "target_modules",
            sorted(targets) if isinstance(targets, list) else targets,
            sorted(lora.targets),
            "targets",
        ),
    ):
        if got != ours:
            remedy = f"set trainer.lora.{setting} to it" if setting else "only plain LoRA is trained"
            raise UserError(f"{folder / ADAPTER_CONFIG}: {key} is {got!r}, expected {ours!r}: {remedy}")
