"""Reads the records of a dataset: Parquet, JSONL, JSON, a Hugging Face dataset folder, a user's function."""

import json
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from atoll.config.functions import is_users_own, load_user_function
from atoll.runtime.errors import UserError
from atoll.runtime.hub import is_hub_id

KINDS = ".parquet, .jsonl, .json, a folder written by datasets.save_to_disk, or file.py:function"
DATA_SUFFIXES = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True, slots=True)
class Record:
    """One row as the dataset has it."""

    fields: Mapping[str, Any]  # of a Parquet or Arrow file, only those that are asked for
    columns: Sequence[str]  # all columns of the row


def read_records(path: Path, parameters: Mapping[str, Any], columns: Sequence[str]) -> Iterator[Record]:
    """The rows of a dataset, in order. `parameters`: of a function. `columns`: those that are read of files
    with columns.

    Raises UserError that names the file and, if one is at fault, the row.
    """
    if is_users_own(str(path)):
        return _call(path, parameters)
    if not path.exists():
        raise UserError(_missing(path))
    if path.is_dir():
        return _read_arrow_folder(path, columns)
    match path.suffix:
        case ".parquet":
            return _read_parquet(path, columns)
        case ".jsonl":
            return _read_jsonl(path)
        case ".json":
            return _read_json(path)
    raise UserError(f"{path}: unknown kind of dataset: got suffix {path.suffix!r}, expected {KINDS}")


def row_error(path: Path, number: int, problem: object) -> UserError:
    return UserError(f"{path}, row {number} (the first is 0): {problem}")


def excerpt(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _missing(path: Path) -> str:
    if is_hub_id(path):
        folder = Path("data") / path.name
        return (
            f"{path}: no such dataset. Atoll does not download datasets from the Hugging Face Hub: run\n"
            f"  hf download --repo-type dataset {path} --local-dir {folder}\n"
            f'and set path to one of its data files (path = "{folder}" names them)'
        )
    return f"{path}: no such dataset; correct the path, or build example data with `atoll data`"


def _call(path: Path, parameters: Mapping[str, Any]) -> Iterator[Record]:
    """The rows that a user's function returns or yields."""
    rows = load_user_function(str(path))
    number = -1
    try:
        for number, row in enumerate(rows(**parameters)):
            if not isinstance(row, Mapping):
                raise row_error(path, number, f"got {excerpt(row)}, expected a dict")
            yield Record(row, list(row))
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{path} raised {type(error).__name__} after {number + 1} rows: {error} "
            f"({place.filename}, line {place.lineno}); it returns or yields rows as dicts, see docs/data.md"
        ) from error


def _read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for batch in file.iter_batches(columns=[name for name in columns if name in names]):
                yield from (Record(fields, names) for fields in batch.to_pylist())
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from None


def _read_jsonl(path: Path) -> Iterator[Record]:
    number = 0
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                raise row_error(path, number, f"line {line_number} is not valid JSON: {error}") from None
            if not isinstance(row, dict):
                raise row_error(path, number, f"got {excerpt(row)}, expected one JSON object a line")
            yield Record(row, list(row))
            number += 1


def _read_json(path: Path) -> Iterator[Record]:
    expected = "expected one array of rows (a file with one row per line is named .jsonl)"
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}; {expected}") from None
    if not isinstance(rows, list):
        raise UserError(f"{path}: got {excerpt(rows)}, {expected}")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise row_error(path, number, f"got {excerpt(row)}, expected a JSON object")
        yield Record(row, list(row))


def _read_arrow_folder(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """What `datasets.save_to_disk` writes: Arrow streams, listed in state.json."""
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = json.loads(splits.read_text())["splits"]
        raise UserError(f"{path}: holds the splits {names}; name one of them, such as {path / names[0]}")
    state = path / "state.json"
    if not state.exists():
        raise UserError(_no_dataset_folder(path))
    for file in json.loads(state.read_text())["_data_files"]:
        with pa.memory_map(str(path / file["filename"])) as source, pa.ipc.open_stream(source) as reader:
            names = reader.schema.names
            for batch in reader:
                known = batch.select([name for name in columns if name in names])
                yield from (Record(fields, names) for fields in known.to_pylist())


def _no_dataset_folder(path: Path) -> str:
    problem = f"{path}: not a dataset folder: state.json is missing"
    files = sorted(file for file in path.rglob("*") if file.suffix in DATA_SUFFIXES)
    if files:
        return f"{problem}; name one of its {len(files)} data files, such as {files[0]}"
    return f"{problem}; write it with datasets.save_to_disk"
