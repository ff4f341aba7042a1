"""Weights of a Hugging Face folder into this rank's parameters and back, box by box."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.runtime.errors import UserError
from services.runtime.model_spec import ARCHITECTURES, ModelSpec, read_spec, with_value_head
from services.trainer.names import pieces, shapes
from services.trainer.shards import boxes_of

INDEX = "model.safetensors.index.json"
FILE_BYTES = 4 << 30  # of one exported file: what the writing rank holds at once
COPIED = {".json", ".txt", ".jinja", ".model"}  # tokenizer and generation settings


def load_weights(model: torch.nn.Module, spec: ModelSpec, folder: Path) -> None:
    """Fills every parameter of this rank, reading only its own slices.

    A value model takes a policy's folder, too: its head stays as it is. Raises UserError where a file or
    tensor is missing, unknown, or of a wrong shape, and where the folder holds another model than `spec`.
    """
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
        for name, box, memory in boxes_of(model, spec):
            if name not in slices:  # the value head
                continue
            rows = slice(int(box["row"]), int(box["row"] + box["rows"]))
            columns = slice(int(box["column"]), int(box["column"] + box["columns"]))
            is_vector = len(slices[name].get_shape()) == 1
            memory.copy_(slices[name][rows].unsqueeze(1) if is_vector else slices[name][rows, columns])


def open_tensors(folder: Path, spec: ModelSpec, files: ExitStack) -> dict[str, Any]:
    """Tensor name -> safetensors slice, for exactly the tensors of `spec`; `files` keeps them open."""
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
            file = files.enter_context(safe_open(folder / name, framework="pt"))
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


def export_hf(model: torch.nn.Module, spec: ModelSpec, source: Path, target: Path) -> int:
    """Writes a folder that transformers loads with bit-equal weights, in the parameters' dtype.

    Every rank calls it; rank 0 writes, and tensor-parallel peers of rank 0 send their shards tensor by
    tensor. config.json is written last: an interrupted export is no model folder. Returns bytes written
    (0 on the other ranks). Raises UserError where `target` holds something already.
    """
    if parallel_state.get_data_parallel_rank() > 0:
        return 0
    if target.exists() and (not target.is_dir() or any(target.iterdir())):  # on all ranks that gather
        raise UserError(f"{target} is not empty: choose a new folder for the exported model")
    writes = parallel_state.get_tensor_model_parallel_rank() == 0
    dtype = next(model.parameters()).dtype
    files = _files(spec, dtype.itemsize)
    gathered = _gather(model, spec)
    if writes:
        target.mkdir(parents=True, exist_ok=True)
    for file, names in files.items():
        tensors = {name: tensor for name, tensor in (next(gathered) for _ in names) if tensor is not None}
        if writes:
            save_file(tensors, target / file, metadata={"format": "pt"})
    if not writes:
        return 0
    num_bytes = sum((target / file).stat().st_size for file in files)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2))
    for path in source.iterdir():
        if path.is_file() and path.suffix in COPIED and path.name not in ("config.json", INDEX):
            shutil.copyfile(path, target / path.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)  # what transformers 4 called dtype
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


def _gather(model: torch.nn.Module, spec: ModelSpec) -> Iterator[tuple[str, Tensor | None]]:
    """Canonical name and whole tensor on tensor-parallel rank 0, None on the others; one at a time."""
    group = parallel_state.get_tensor_model_parallel_group()
    size, rank = group.size(), group.rank()
    held = [[piece for held in pieces(spec, r, size).values() for piece in held] for r in range(size)]
    mine: dict[str, list[Tensor]] = {}
    for name, _, memory in boxes_of(model, spec):
        mine.setdefault(name, []).append(memory)
    for name, shape in shapes(spec).items():
        flat = torch.cat([memory.flatten() for memory in mine[name]])
        parts = [torch.empty_like(flat) for _ in range(size)] if rank == 0 else None
        dist.gather(flat, parts, group=group, group_dst=0)
        if parts is None:
            yield name, None
            continue
        whole = torch.empty(shape, dtype=flat.dtype)
        matrix = whole.unsqueeze(1) if len(shape) == 1 else whole
        for r, part in enumerate(parts):
            theirs = [piece for piece in held[r] if piece.tensor == name]
            sizes = [piece.rows * piece.columns for piece in theirs]
            for piece, values in zip(theirs, torch.split(part, sizes), strict=True):
                rows = slice(piece.row, piece.row + piece.rows)
                columns = slice(piece.column, piece.column + piece.columns)
                matrix[rows, columns] = values.view(piece.rows, piece.columns)
        yield name, whole
