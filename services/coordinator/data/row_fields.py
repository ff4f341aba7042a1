"""Fields of a dataset row, checked by type."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from atoll.coordinator.data.dataset_files import excerpt

Fields = Mapping[str, Any]
_KINDS: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object"}


class FieldError(ValueError):
    """A field of one row is missing, empty or of the wrong type."""


def text_field(record: Fields, key: str, parent: str = "") -> str:
    """Raises FieldError if it is missing or empty."""
    text: str = typed_field(record, key, str, parent)
    if not text:
        raise FieldError(f"field {parent}{key}: got an empty string, expected text")
    return text


def optional_field(record: Fields, key: str, kind: type, parent: str = "") -> Any:
    """An empty one if it is missing."""
    return kind() if record.get(key) is None else typed_field(record, key, kind, parent)


def typed_field(record: Fields, key: str, kind: type, parent: str = "") -> Any:
    value = record.get(key)
    if value is None:  # Parquet fills a column's missing values with None
        raise FieldError(f"field {parent}{key}: missing")
    if not isinstance(value, kind):
        raise FieldError(f"field {parent}{key}: got {excerpt(value)}, expected {_KINDS[kind]}")
    return value


def json_field(value: object, kind: type, place: str) -> Any:
    """A list or an object, or the JSON text of one. Objects lose keys without a value, with which Parquet
    fills columns whose rows have different keys."""
    tree = value
    if isinstance(value, str):
        try:
            tree = json.loads(value)
        except ValueError:
            tree = None
    if not isinstance(tree, kind):
        raise FieldError(f"field {place}: got {excerpt(value)}, expected {_KINDS[kind]}, or its JSON text")
    return without_nulls(tree)


def without_nulls(tree: object) -> object:
    if isinstance(tree, dict):
        return {key: without_nulls(value) for key, value in tree.items() if value is not None}
    return [without_nulls(item) for item in tree] if isinstance(tree, list) else tree


def refuse(record: Fields, name: str, advice: str, parent: str = "") -> None:
    """Raises FieldError unless the field is missing or empty."""
    if not is_empty(record.get(name)):
        raise FieldError(f"field {parent}{name} is not supported: {advice}")


def is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str | list | dict) and len(value) == 0)


def as_text(value: object) -> str:
    """Text as it is, 46.0 as "46", other values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():  # a column of integers with gaps is of floats
        value = int(value)
    return json.dumps(value, ensure_ascii=False, default=_as_json)


def _as_json(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
