"""Turns the records of a dataset into prompts with what graders read, or conversations with their answers.

    {"prompt": "12+34=", "answer": 46}
    {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "12+34="}], "ability": "math",
     "reward_model": {"style": "rule", "ground_truth": "46"}, "extra_info": {"split": "train", "index": 7}}

docs/data.md shows all forms.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from atoll.coordinator.data.dataset_files import excerpt, read_records, row_error
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Messages

_MEDIA = dict.fromkeys(
    ("images", "image", "videos", "video", "audios", "audio"),
    "models read text only: remove the field, or leave such rows out",
)
_OF_AGENTS = dict.fromkeys(
    ("agent_name", "tools_kwargs", "interaction_kwargs", "tools"),
    "only an agent can use it: set data.train.agent to the name of one of [[agents]] (docs/agents.md), or "
    "remove the field",
)
_OF_MESSAGES = dict.fromkeys(
    ("tool_calls", "reasoning_content"), "expected role and content: put it into the content as text"
)
COLUMNS = (
    *("prompt", "messages", "answer", "response", "completion"),
    *("reward_model", "data_source", "extra_info"),
    *_MEDIA,
    *_OF_AGENTS,
)
_PROMPT_FORMS = 'expected {"prompt": TEXT or MESSAGES, "answer": TEXT} or a row of verl, see docs/data.md'
_ANSWER_FORMS = (
    'expected {"prompt": TEXT or MESSAGES, "response": TEXT} or {"messages": MESSAGES}, see docs/data.md'
)

_GRADED_FORMS = 'expected a row of a dataset with "response": TEXT beside its prompt, see docs/rewards.md'

Fields = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where rows come from, and what they must have."""

    path: Path  # a file, a folder or file.py:function
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the function
    agent: str = ""  # that gets the rows
    required: Mapping[str, str] = field(default_factory=dict)  # ground_truth, data_source -> who reads it
    max_rows: int | None = None  # to read; None: all


@dataclass(frozen=True, slots=True)
class DatasetRow:
    messages: Messages
    ground_truth: str  # "": none
    data_source: str  # "": none
    extra: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    messages: Messages
    response: str
    number: int  # of the dataset's row, from 0; a row of several answers gives several of these


class FieldError(ValueError):
    """A field of one row is missing, empty or of the wrong type."""


def read_rows(dataset: Dataset) -> list[DatasetRow]:
    """All rows as prompts. Raises UserError that names file, row (from 0) and field."""
    return _read_validated(dataset, lambda _, fields: [_row(fields, dataset)], _PROMPT_FORMS)


def read_graded_rows(dataset: Dataset) -> list[tuple[DatasetRow, str]]:
    """All rows as prompts, with the responses to grade; also the lines of `atoll samples --jsonl`. Raises
    UserError that names file, row (from 0) and field."""
    return _read_validated(dataset, lambda _, fields: [_graded_row(fields, dataset)], _GRADED_FORMS)


def read_supervised_rows(dataset: Dataset) -> list[SupervisedRow]:
    """All answers with what comes before them. Raises UserError that names file, row (from 0) and field."""
    return _read_validated(dataset, _supervised_rows, _ANSWER_FORMS)


def _read_validated(dataset: Dataset, convert: Callable[[int, Fields], Iterable[T]], forms: str) -> list[T]:
    rows: list[T] = []
    records = read_records(dataset.path, dataset.parameters, COLUMNS)
    for number, record in enumerate(islice(records, dataset.max_rows)):
        try:
            rows += convert(number, record.fields)
        except FieldError as error:
            problem = f"{error}; the row has {sorted(record.columns)}, {forms}"
            raise row_error(dataset.path, number, problem) from None
    if not rows:
        raise UserError(f"{dataset.path}: the dataset is empty: got 0 rows, expected at least 1")
    return rows


def _row(record: Fields, dataset: Dataset) -> DatasetRow:
    extra = _optional(record, "extra_info", dict)
    for name, advice in (_MEDIA | ({} if dataset.agent else _OF_AGENTS)).items():
        _refuse(record, name, advice)
        _refuse(extra, name, advice, "extra_info.")
    source = record.get("data_source")
    if source is None and "data_source" in dataset.required:
        raise FieldError(f"field data_source: missing, and {dataset.required['data_source']} reads it")
    return DatasetRow(
        messages=_prompt(record),
        ground_truth=_ground_truth(record, dataset.required.get("ground_truth")),
        data_source="" if source is None else _text(record, "data_source"),
        extra={key: _as_text(value) for key, value in extra.items() if value is not None},
    )


def _ground_truth(record: Fields, reader: str | None) -> str:
    """Graders read text: numbers are written out, lists of answers and test cases are passed as JSON.

    `reader`: who needs it, if somebody does.
    """
    name, truth = "reward_model.ground_truth", _optional(record, "reward_model", dict).get("ground_truth")
    if truth is None:
        name, truth = "answer", record.get("answer")
    if truth is None and reader is not None:
        raise FieldError(f"field answer or reward_model.ground_truth: missing, and {reader} reads it")
    if truth is None or (truth == "" and reader is None):
        return ""
    is_empty = isinstance(truth, str | list | dict) and not truth
    if is_empty or (isinstance(truth, float) and not math.isfinite(truth)):
        raise FieldError(f"field {name}: got {excerpt(truth)}, expected text, a number or a list of answers")
    return _as_text(truth)


def _as_text(value: object) -> str:
    """Text as it is, 46.0 as "46", other values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():  # a column of integers with gaps is of floats
        value = int(value)
    return json.dumps(value, ensure_ascii=False, default=_as_json)


def _as_json(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _supervised_rows(number: int, record: Fields) -> Iterator[SupervisedRow]:
    for name in (*_MEDIA, *_OF_AGENTS):
        _refuse(record, name, "rows with answers contain only text: remove the field, or leave such rows out")
    if record.get("messages") is None:
        yield SupervisedRow(_prompt(record), _answer(record), number)
        return
    messages = _messages(_field(record, "messages", list), "messages")
    answers = [i for i, message in enumerate(messages) if i and message["role"] == "assistant"]
    if not answers:
        raise FieldError("field messages: got no assistant message after another one, nothing to learn")
    for i in answers:
        yield SupervisedRow(messages[:i], messages[i]["content"], number)


def _graded_row(record: Fields, dataset: Dataset) -> tuple[DatasetRow, str]:
    if "ground_truth" in record:  # of a sample
        record = {"answer": record["ground_truth"], **record}
    response = "" if record.get("response") == "" else _answer(record)  # a policy may say nothing
    return _row(record, dataset), response


def _answer(record: Fields) -> str:
    """`response` as verl has it, or `completion` as TRL has it: text, or one message of the assistant."""
    name = "completion" if record.get("response") is None and "completion" in record else "response"
    value = record.get(name)
    if not isinstance(value, list):
        return _text(record, name)
    messages = _messages(value, name)
    if [message["role"] for message in messages] != ["assistant"]:
        raise FieldError(f"field {name}: got {len(messages)} messages, expected one of the assistant")
    return messages[0]["content"]


def _prompt(record: Fields) -> Messages:
    if isinstance(record.get("prompt"), str):
        return [{"role": "user", "content": _text(record, "prompt")}]
    return _messages(_field(record, "prompt", list), "prompt")


def _messages(messages: list[Any], name: str) -> list[dict[str, str]]:
    if not messages:
        raise FieldError(f"field {name}: got an empty list, expected messages with role and content")
    return [_message(message, f"{name}[{i}]") for i, message in enumerate(messages)]


def _message(message: object, place: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise FieldError(f"field {place}: got {excerpt(message)}, expected an object with role and content")
    for name, advice in _OF_MESSAGES.items():
        _refuse(message, name, advice, f"{place}.")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    role = _text(message, "role", f"{place}.")
    return {"role": role, "content": _text({**message, "content": content}, "content", f"{place}.")}


def _part(part: object, place: str) -> str:
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        raise FieldError(f'field {place}: got {excerpt(part)}, expected {{"type": "text", "text": TEXT}}')
    return _text(part, "text", f"{place}.")


def _refuse(record: Fields, name: str, advice: str, parent: str = "") -> None:
    value = record.get(name)
    if value is not None and not (isinstance(value, str | list | dict) and len(value) == 0):
        raise FieldError(f"field {parent}{name} is not supported: {advice}")


def _text(record: Fields, key: str, parent: str = "") -> str:
    text: str = _field(record, key, str, parent)
    if not text:
        raise FieldError(f"field {parent}{key}: got an empty string, expected text")
    return text


def _optional(record: Fields, key: str, kind: type) -> Any:
    """An empty one if it is missing."""
    return kind() if record.get(key) is None else _field(record, key, kind)


def _field(record: Fields, key: str, kind: type, parent: str = "") -> Any:
    value = record.get(key)
    if value is None:  # Parquet fills a column's missing values with None
        raise FieldError(f"field {parent}{key}: missing")
    if not isinstance(value, kind):
        raise FieldError(f"field {parent}{key}: got {excerpt(value)}, expected {_KINDS[kind]}")
    return value


_KINDS: Mapping[type, str] = {str: "a string", list: "a list of messages", dict: "an object"}
