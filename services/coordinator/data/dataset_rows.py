"""Turns the records of a dataset into prompts with what graders read, or conversations with their answers.

    {"prompt": "12+34=", "answer": 46}
    {"data_source": "arithmetic", "prompt": [{"role": "user", "content": "12+34="}], "ability": "math",
     "reward_model": {"style": "rule", "ground_truth": "46"}, "extra_info": {"split": "train", "index": 7}}

docs/data.md shows all forms.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from atoll.coordinator.data.dataset_files import excerpt, read_records, row_error
from atoll.coordinator.data.row_fields import (
    FieldError,
    Fields,
    as_text,
    is_empty,
    json_field,
    optional_field,
    refuse,
    text_field,
)
from atoll.coordinator.data.row_messages import read_messages, read_prompt, read_schemas, read_tools
from atoll.runtime.errors import UserError
from atoll.runtime.rendering import Tools
from atoll.wire.types import Message

AGENT_FIELDS = ("tools", "environment", "agent_name", "tools_kwargs", "interaction_kwargs")
_MEDIA = dict.fromkeys(
    ("images", "image", "videos", "video", "audios", "audio"),
    "models read text only: remove the field, or leave such rows out",
)
_OF_AGENTS = dict.fromkeys(
    AGENT_FIELDS,
    "only an agent can use it: set data.train.agent to the name of one of [[agents]] (docs/agents.md), or "
    "remove the field",
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

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where rows come from, and what they must have."""

    path: Path  # a file, a folder or file.py:function
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the function
    agent: str = ""  # that gets the rows
    required: Mapping[str, str] = field(default_factory=dict)  # ground_truth, data_source -> who reads it
    max_rows: int | None = None  # to read; None: all
    learn: Collection[str] = ("assistant",)  # roles whose messages are learned, of rows with answers


@dataclass(frozen=True, slots=True)
class DatasetRow:
    messages: Sequence[Message]
    ground_truth: str  # "": none
    data_source: str  # "": none
    extra: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """A conversation, and which of its messages are learned."""

    messages: Sequence[Message]
    learned: Sequence[bool]  # of each message
    tools: Tools = ()


def read_rows(dataset: Dataset) -> list[DatasetRow]:
    """All rows as prompts. Raises UserError that names file, row (from 0) and field."""
    return _read_validated(dataset, lambda fields: _row(fields, dataset), _PROMPT_FORMS)


def read_graded_rows(dataset: Dataset) -> list[tuple[DatasetRow, str]]:
    """All rows as prompts, with the responses to grade; also the lines of `atoll samples --jsonl`. Raises
    UserError that names file, row (from 0) and field."""
    return _read_validated(dataset, lambda fields: _graded_row(fields, dataset), _GRADED_FORMS)


def read_supervised_rows(dataset: Dataset) -> list[SupervisedRow]:
    """All rows with what is learned of them. Raises UserError that names file, row (from 0) and field."""
    return _read_validated(dataset, lambda fields: _supervised_row(fields, dataset.learn), _ANSWER_FORMS)


def _read_validated(dataset: Dataset, convert: Callable[[Fields], T], forms: str) -> list[T]:
    rows: list[T] = []
    records = read_records(dataset.path, dataset.parameters, COLUMNS)
    for number, record in enumerate(islice(records, dataset.max_rows)):
        try:
            rows.append(convert(record.fields))
        except FieldError as error:
            problem = f"{error}; the row has {sorted(record.columns)}, {forms}"
            raise row_error(dataset.path, number, problem) from None
    if not rows:
        raise UserError(f"{dataset.path}: the dataset is empty: got 0 rows, expected at least 1")
    return rows


def _row(record: Fields, dataset: Dataset) -> DatasetRow:
    extra = optional_field(record, "extra_info", dict)
    for name, advice in (_MEDIA | ({} if dataset.agent else _OF_AGENTS)).items():
        refuse(record, name, advice)
        refuse(extra, name, advice, "extra_info.")
    source = record.get("data_source")
    if source is None and "data_source" in dataset.required:
        raise FieldError(f"field data_source: missing, and {dataset.required['data_source']} reads it")
    return DatasetRow(
        messages=read_prompt(record),
        ground_truth=_ground_truth(record, dataset.required.get("ground_truth")),
        data_source="" if source is None else text_field(record, "data_source"),
        extra={
            **{key: as_text(value) for key, value in extra.items() if value is not None},
            **(_for_agent(record, extra) if dataset.agent else {}),
        },
    )


def _for_agent(record: Fields, extra: Fields) -> dict[str, str]:
    """What only an agent reads, as columns or in extra_info."""
    fields: dict[str, str] = {}
    for name in AGENT_FIELDS:
        places = {name: record.get(name), f"extra_info.{name}": extra.get(name)}
        texts = {_agent_text(name, place, value) for place, value in places.items() if not is_empty(value)}
        if len(texts) > 1:
            raise FieldError(f"field {name}: got another value than extra_info.{name}; remove one of them")
        if texts:
            fields[name] = texts.pop()
    return fields


def _agent_text(name: str, place: str, value: object) -> str:
    match name:
        case "agent_name":
            return text_field({place: value}, place)
        case "tools":
            return as_text(read_tools(value, place))
        case _:
            return as_text(json_field(value, dict, place))


def _ground_truth(record: Fields, reader: str | None) -> str:
    """Graders read text: numbers are written out, lists of answers and test cases are passed as JSON.

    `reader`: who needs it, if somebody does.
    """
    name = "reward_model.ground_truth"
    truth = optional_field(record, "reward_model", dict).get("ground_truth")
    if truth is None:
        name, truth = "answer", record.get("answer")
    if truth is None and reader is not None:
        raise FieldError(f"field answer or reward_model.ground_truth: missing, and {reader} reads it")
    if truth is None or (truth == "" and reader is None):
        return ""
    if is_empty(truth) or (isinstance(truth, float) and not math.isfinite(truth)):
        raise FieldError(f"field {name}: got {excerpt(truth)}, expected text, a number or a list of answers")
    return as_text(truth)


def _supervised_row(record: Fields, roles: Collection[str]) -> SupervisedRow:
    for name in (*_MEDIA, *_OF_AGENTS):
        if name != "tools":
            refuse(record, name, "nothing learns from it: remove the field, or leave such rows out")
    context: list[Message] = []  # that is not learned
    if record.get("messages") is not None:
        name, answers = "messages", read_messages(record, "messages")
    else:
        name, context = _answer_name(record), read_prompt(record)
        is_list = isinstance(record.get(name), list)
        answers = read_messages(record, name) if is_list else [Message("assistant", text_field(record, name))]
    trees = record[name] if isinstance(record[name], list) else [{}]
    learned = [
        _is_learned(tree, message, roles, f"{name}[{i}].")
        for i, (tree, message) in enumerate(zip(trees, answers, strict=True))
    ]
    if not context and answers[0].role == "assistant":
        learned[0] = False  # nothing is before it
    if not any(learned):
        raise FieldError(
            f"field {name}: got no message to learn: after the first, none has weight 1 or a role in learn = "
            f"{list(roles)}"
        )
    return SupervisedRow([*context, *answers], [*[False] * len(context), *learned], read_schemas(record))


def _is_learned(tree: Fields, message: Message, roles: Collection[str], parent: str) -> bool:
    """By the message's own `weight`, as OpenAI has it, or by its role."""
    weight = tree.get("weight")
    if weight is None:
        weight = message.role in roles
    elif weight not in (0, 1):
        raise FieldError(f"field {parent}weight: got {excerpt(weight)}, expected 0 or 1")
    return bool(weight) and bool(message.content or message.tool_calls)


def _graded_row(record: Fields, dataset: Dataset) -> tuple[DatasetRow, str]:
    if "ground_truth" in record:  # of a sample
        record = {"answer": record["ground_truth"], **record}
    response = "" if record.get("response") == "" else _answer(record)  # a policy may say nothing
    return _row(record, dataset), response


def _answer(record: Fields) -> str:
    """Text, or one message of the assistant with text alone."""
    name = _answer_name(record)
    if not isinstance(record.get(name), list):
        return text_field(record, name)
    messages = read_messages(record, name)
    if [message.role for message in messages] != ["assistant"] or messages[0].tool_calls:
        raise FieldError(
            f"field {name}: got {len(messages)} messages, expected one of the assistant without tool_calls"
        )
    return messages[0].content


def _answer_name(record: Fields) -> str:
    """`response` as verl has it, or `completion` as TRL has it."""
    return "completion" if record.get("response") is None and "completion" in record else "response"
