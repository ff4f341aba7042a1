"""Loads and exports this rank's weights from and to Hugging Face folders, box by box."""

import json
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from atoll.runtime.errors import CheckpointError, UserError
from atoll.runtime.model_spec import ARCHITECTURES, ModelSpec, read_spec, with_value_head
from atoll.trainer import progress
from atoll.trainer.megatron.adapters.lora import adapters, attach_adapters, check_targets, merge_adapter
from atoll.trainer.megatron.adapters.peft import load_adapter, save_tensors, write_adapter
from atoll.trainer.megatron.model import MegatronModel, ModelSettings, build
from atoll.trainer.megatron.names import shapes
from atoll.trainer.megatron.shards import boxes_of
from atoll.trainer.megatron.tensor_files import INDEX, open_tensors

FILE_BYTES = 4 << 30  # of one exported file: the writing rank holds one in memory
ADAPTER = "adapter"
COPIED = {".json", ".txt", ".jinja", ".model"}  # tokenizer and generation settings


def load_model(folder: Path, spec: ModelSpec, settings: ModelSettings) -> MegatronModel:
    """Loads this rank's part of the folder's model. Call it inside `cpu_compat.apply()`, after
    `initialize_parallel`. Raises UserError if the folder does not contain a model of `spec`."""
    if settings.lora is not None:
        check_targets(spec, settings.lora)
    model = build(folder, spec, settings)
    load_weights(model, folder)
    if settings.lora is not None:
        attach_adapters(model, settings.lora, settings.seed)
        if settings.lora.path is not None:
            load_adapter(model, settings.lora.path)
    return model


def load_weights(model: MegatronModel, folder: Path) -> None:
    """Fills every parameter of this rank, reading only its own slices.

    A value model can also be loaded from a policy's folder: its head is left unchanged. Raises UserError if a
    file or tensor is missing, unknown, or of a wrong shape, and if the folder contains a different model than
    `spec`.
    """
    spec = model.spec
    theirs = read_spec(folder, ("language", "value") if spec.head == "value" else ("language",))
    got = with_value_head(theirs) if spec.head == "value" else theirs
    if got != spec:
        differing = [f.name for f in fields(ModelSpec) if getattr(got, f.name) != getattr(spec, f.name)]
        raise UserError(
            f"{folder} holds another model than the one that it is loaded into: its {differing[0]} is "
            f"{getattr(got, differing[0])}, expected {getattr(spec, differing[0])}"
        )
    with ExitStack() as files:
        slices = open_tensors(folder, theirs, files)
        for name, box, memory in boxes_of(model):
            progress.advance()
            if name not in slices:  # the value head
                continue
            rows = slice(int(box["row"]), int(box["row"] + box["rows"]))
            columns = slice(int(box["column"]), int(box["column"] + box["columns"]))
            is_vector = len(slices[name].get_shape()) == 1
            memory.copy_(slices[name][rows].unsqueeze(1) if is_vector else slices[name][rows, columns])


def export_hf(model: MegatronModel, target: Path) -> int:
    """Writes a folder that transformers loads with bit-identical weights, in the parameters' dtype. Adapters
    are merged, and also written to the subfolder `adapter`, which peft loads on top of the base model's
    folder.

    Every rank calls it; rank 0 writes, and the others send it what it lacks, tensor by tensor, so rank 0
    holds one file in memory and the others nothing but their parameters. config.json is written last, so an
    interrupted export is not a model folder. Returns bytes written (0 on the other ranks). Raises UserError
    on every rank if `target` is not empty, CheckpointError on rank 0 if writing fails.
    """
    writes = dist.get_rank() == 0
    first = next(model.parameters)
    refused = torch.tensor([writes and target.exists() and not _is_empty(target)], device=first.device).int()
    dist.broadcast(refused, 0)  # each machine would see its own disk
    if refused.item():
        raise UserError(f"{target} is not empty: choose a new folder for the exported model")
    gathered = _gather(model)
    num_bytes = 0
    try:
        if model.lora is not None:
            write_adapter(model, target / ADAPTER)
        if writes:
            num_bytes = _write(model, target, gathered, first.dtype)
    except (OSError, SafetensorError) as error:
        deque(gathered, maxlen=0)  # the other ranks still have to send
        shutil.rmtree(target, ignore_errors=True)
        raise CheckpointError(
            f"{target} was not written: {error}. Free some space or choose another folder"
        ) from error
    deque(gathered, maxlen=0)
    return num_bytes


def _write(
    model: MegatronModel, target: Path, gathered: Iterator[tuple[str, Tensor | None]], dtype: torch.dtype
) -> int:
    spec, source = model.spec, model.folder
    files = _files(spec, dtype.itemsize)
    target.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        tensors = {name: tensor for name, tensor in (next(gathered) for _ in names) if tensor is not None}
        save_tensors(tensors, target / file)
    num_bytes = sum((target / file).stat().st_size for file in files)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2))
    for path in source.iterdir():
        if path.is_file() and path.suffix in COPIED and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # dtype's name in transformers 4
    config["dtype"] = str(dtype).removeprefix("torch.")
    if spec.head == "value":
        family, _ = ARCHITECTURES[config["architectures"][0]]
        config["architectures"] = [name for name, kind in ARCHITECTURES.items() if kind == (family, "value")]
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # one label
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return num_bytes


def _files(spec: ModelSpec, itemsize: int) -> dict[str, list[str]]:
    """File name -> the tensors in it, at most FILE_BYTES each."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, shape in shapes(spec).items():
        num_bytes = torch.Size(shape).numel() * itemsize
        if groups[-1] and filled + num_bytes > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": names for i, names in enumerate(groups, 1)}


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _gather(model: MegatronModel) -> Iterator[tuple[str, Tensor | None]]:
    """Canonical name and whole tensor on rank 0, None on the others; one at a time.

    The first of the ranks that hold a box sends it.
    """
    rank = dist.get_rank()
    mine = {(name, int(box["row"]), int(box["column"])): memory for name, box, memory in boxes_of(model)}
    first = next(model.parameters)
    owned, own = _owned_boxes(model), adapters(model)

    def held(name: str, row: int, column: int) -> Tensor:
        return merge_adapter(own.get(name), row, column, mine[name, row, column])

    for name, shape in shapes(model.spec).items():
        progress.advance()
        whole = torch.empty(shape, dtype=first.dtype) if rank == 0 else None
        for owner, row, rows, column, columns in owned[name]:
            if whole is None:
                if owner == rank:
                    dist.send(held(name, row, column).contiguous(), 0)
                continue
            if owner == 0:
                part = held(name, row, column)
            else:
                part = torch.empty(rows, columns, dtype=first.dtype, device=first.device)
                dist.recv(part, owner)
            matrix = whole.unsqueeze(1) if len(shape) == 1 else whole
            matrix[row : row + rows, column : column + columns] = part
        yield name, whole


def _owned_boxes(model: MegatronModel) -> dict[str, list[tuple[int, ...]]]:
    """The distinct boxes of each tensor (first rank that holds it, row, rows, column, columns). All ranks
    call it and get the same result."""
    numbers = {name: i for i, name in enumerate(shapes(model.spec))}
    boxes = torch.tensor(
        [
            [numbers[name], *(int(box[key]) for key in ("row", "rows", "column", "columns"))]
            for name, box, _ in boxes_of(model)
        ],
        device=next(model.parameters).device,
    )
    most = torch.tensor(len(boxes), device=boxes.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    padded = torch.nn.functional.pad(boxes, (0, 0, 0, int(most) - len(boxes)), value=-1)
    ranks = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, padded)
    owners: dict[tuple[int, ...], int] = {}
    for rank, held in enumerate(ranks):
        for box in held.tolist():
            owners.setdefault(tuple(box), rank)
    names = list(numbers)
    owned: dict[str, list[tuple[int, ...]]] = {name: [] for name in names}
    for (number, *box), owner in owners.items():
        if number >= 0:
            owned[names[number]].append((owner, *box))
    return owned
