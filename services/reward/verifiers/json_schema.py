"""Structured output: the response's JSON validates against a schema."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.protocols import Validator
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry

from atoll.wire.types import Grade, ScoreItem

MAX_BROKEN = 1000  # values in one response: each costs time linear in the text before it


def json_schema(item: ScoreItem, *, schema: str | Mapping[str, Any] | None = None) -> float | Grade:
    """1 if the response's JSON conforms to the schema (jsonschema.org, draft 2020-12 if it names none).

    The JSON is the whole response, otherwise its last block fenced as ```json, otherwise its last complete
    object or array. `schema` is a file's path or a table; without it, each row's `extra_info.schema`. A
    pattern in a schema may take time exponential in the response, so this runs in a process that can be
    killed.

    Raises ValueError if the schema is missing or invalid, OSError if its file cannot be read.
    """
    if schema is None and "schema" not in item.extra:
        raise ValueError(
            "the row has no extra_info.schema: add it, or set the parameter schema of json_schema"
        )
    match schema:
        case None:
            text = item.extra["schema"]
        case str():
            text = Path(schema).read_text(encoding="utf-8")
        case _:
            text = json.dumps(schema)
    validator = _validator(text)
    try:
        error = next(validator.iter_errors(last_json(item.response)), None)
    except ValueError as problem:
        return Grade(0.0, f"no json: {problem}")
    except RecursionError:
        return Grade(0.0, "too deep")
    except OverflowError:  # of the response: 1e400 against multipleOf
        return Grade(0.0, "invalid: a number is too large")
    return 1.0 if error is None else Grade(0.0, f"invalid: {error.json_path}: {error.validator}")


def last_json(text: str) -> Any:
    """Raises ValueError if `text` has none, RecursionError if it is nested too deeply."""
    try:
        return _DECODER.decode(text.strip())
    except json.JSONDecodeError as error:
        problem = error
    _, fence, block = text.rpartition("```json")
    if fence:
        text = block.partition("```")[0].strip()
        try:
            return _DECODER.decode(text)
        except json.JSONDecodeError as error:
            problem = error
    values = []
    place = broken = 0
    while (opening := _OPENING.search(text, place)) and broken < MAX_BROKEN:
        try:
            value, place = _DECODER.raw_decode(text, opening.start())
            values.append(value)
        except json.JSONDecodeError as error:
            # the inside of a broken value is skipped, so that nothing is read twice
            place = max(error.pos, opening.start() + 1)
            broken += 1
    if not values:
        raise problem
    return values[-1]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@lru_cache
def _validator(schema: str) -> Validator:
    tree = json.loads(schema)
    kind = validator_for(tree, default=Draft202012Validator)
    try:
        kind.check_schema(tree)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.json_path}: {error.message}") from None
    return kind(tree, registry=Registry())  # empty: nothing is fetched from the network


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_OPENING = re.compile(r'\{\s*["}]|\[\s*[\[{"\]tfn\d-]')  # not a LaTeX brace, nor "[see below]"
