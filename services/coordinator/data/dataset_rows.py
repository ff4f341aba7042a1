"""Reads and validates dataset rows: Parquet and JSONL in verl's schema, Hugging Face dataset folders.

    {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "12+34="}], "ability": "math",
     "reward_model": {"style": "rule", "ground_truth": "46"}, "extra_info": {"split": "train", "index": 7}}

Rows for supervised warm-up need `prompt` and `response` only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Messages

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info", "response")

RawRow = Mapping[str, Any]  # one row as the file has it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DatasetRow:
    messages: Messages
    ground_truth: str
    data_source: str
    extra: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    messages: Messages
    response: str


class FieldError(ValueError):
    """A field of one row is missing, empty or of the wrong type."""


def read_rows(path: Path) -> list[DatasetRow]:
    """All rows of a dataset. Raises UserError that names file, row (from 0) and field."""
    return _read_validated(path, _row)


def read_supervised_rows(path: Path) -> list[SupervisedRow]:
    """All rows of a warm-up dataset. Raises UserError that names file, row (from 0) and field."""
    return _read_validated(path, _supervised_row)


def row_error(path: Path, number: int, problem: object) -> UserError:
    return UserError(f"{path}, row {number} (the first is 0): {problem}")


def _read_validated(path: Path, convert: Callable[[RawRow], T]) -> list[T]:
    rows = []
    records = _read_records(path)
    for number, record in enumerate(records):
        try:
            rows.append(convert(record))
        except FieldError as error:
            raise row_error(path, number, error) from None
    if not rows:
        raise UserError(f"{path}: the dataset is empty: got 0 rows, expected at least 1")
    return rows


def _row(record: RawRow) -> DatasetRow:
    reward_model = _field(record, "reward_model", dict)
    return DatasetRow(
        messages=_messages(record),
        ground_truth=_ground_truth(reward_model),
        data_source=_text(record, "data_source"),
        extra=_extra(record),
    )


def _ground_truth(reward_model: RawRow) -> str:
    """Graders read text: lists of answers or test cases are passed as JSON."""
    truth = reward_model.get("ground_truth")
    if truth and isinstance(truth, dict | list):
        return json.dumps(truth, ensure_ascii=False, default=str)
    return _text(reward_model, "ground_truth", "reward_model.")


def _supervised_row(record: RawRow) -> SupervisedRow:
    return SupervisedRow(messages=_messages(record), response=_text(record, "response"))


def _messages(record: RawRow) -> Messages:
    messages = _field(record, "prompt", list)
    if not messages:
        raise FieldError("field prompt: got an empty list, expected messages with role and content")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise FieldError(
                f"field prompt[{i}]: got {_excerpt(message)}, expected an object with role and content"
            )
    return [
        {key: _text(message, key, f"prompt[{i}].") for key in ("role", "content")}
        for i, message in enumerate(messages)
    ]


def _text(record: RawRow, key: str, parent: str = "") -> str:
    text: str = _field(record, key, str, parent)
    if not text:
        raise FieldError(f"field {parent}{key}: got an empty string, expected text")
    return text


def _field(record: RawRow, key: str, kind: type, parent: str = "") -> Any:
    value = record.get(key)
    if value is None:  # Parquet fills a column's missing values with None
        raise FieldError(f"field {parent}{key}: missing; the row has {sorted(record)}")
    if not isinstance(value, kind):
        raise FieldError(f"field {parent}{key}: got {_excerpt(value)}, expected {_KINDS[kind]}")
    return value


_KINDS: Mapping[type, str] = {str: "a string", list: "a list of messages", dict: "an object"}


def _excerpt(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _extra(record: RawRow) -> dict[str, str]:
    """Graders read text: other values are passed as JSON."""
    info = record.get("extra_info")
    if info is None:
        return {}
    if not isinstance(info, dict):
        raise FieldError(f"field extra_info: got {_excerpt(info)}, expected an object")
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in info.items()
        if value is not None
    }


def _read_records(path: Path) -> Sequence[RawRow]:
    if not path.exists():
        raise UserError(f"{path}: no such dataset; correct the path, or build example data with `atoll data`")
    if path.is_dir():
        return _read_arrow_folder(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    raise UserError(
        f"{path}: unknown kind of dataset: got suffix {path.suffix!r}, expected .parquet, .jsonl "
        "or a folder written by datasets.save_to_disk"
    )


def _read_parquet(path: Path) -> list[RawRow]:
    try:
        with pq.ParquetFile(path) as file:
            present = [name for name in COLUMNS if name in file.schema_arrow.names]
            records: list[RawRow] = file.read(columns=present).to_pylist()
    except pa.ArrowException as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from None
    return records


def _read_jsonl(path: Path) -> list[RawRow]:
    records: list[RawRow] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            try:
                record = json.loads(line)
            except ValueError as error:  # no JSON, or no UTF-8
                raise row_error(path, number, f"line {number + 1} is not valid JSON: {error}") from None
            if not isinstance(record, dict):
                raise row_error(path, number, f"got {_excerpt(record)}, expected one JSON object a line")
            records.append(record)
    return records


def _read_arrow_folder(path: Path) -> list[RawRow]:
    """What `datasets.save_to_disk` writes: Arrow streams, listed in state.json."""
    splits = path / "dataset_dict.json"
    if splits.exists():
        names = json.loads(splits.read_text())["splits"]
        raise UserError(f"{path}: holds the splits {names}; name one of them, such as {path / names[0]}")
    state = path / "state.json"
    if not state.exists():
        raise UserError(
            f"{path}: not a dataset folder: state.json is missing; write it with datasets.save_to_disk"
        )
    records: list[RawRow] = []
    for file in json.loads(state.read_text())["_data_files"]:
        with pa.memory_map(str(path / file["filename"])) as source, pa.ipc.open_stream(source) as reader:
            table = reader.read_all()
            records += table.select([name for name in COLUMNS if name in table.column_names]).to_pylist()
    return records
