"""What a request demands of the reply's form: how the prompt says it, and what a reply did not keep to."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
from referencing import Registry
from referencing.exceptions import Unresolvable

from atoll.gateway.conversation import Demands
from atoll.wire.types import Message


def with_demands(messages: Sequence[Message], demands: Demands) -> Sequence[Message]:
    """The demands follow the text of the last message that is not the assistant's, so that what stands
    before it stays as it was."""
    sentences = " ".join(_sentences(demands))
    places = [place for place, message in enumerate(messages) if message.role != "assistant"]
    if not sentences or not places:
        return messages
    last = messages[places[-1]]
    said = last._replace(content=f"{last.content}\n\n{sentences}" if last.content else sentences)
    return [*messages[: places[-1]], said, *messages[places[-1] + 1 :]]


def _sentences(demands: Demands) -> Iterator[str]:
    if demands.tool_choice == "none":
        yield "Do not call a tool in this reply."
    elif demands.tool_choice == "required":
        yield f"Call the tool {demands.tool_name or 'that fits best'} in this reply."
    if demands.single_call:
        yield "Call at most one tool in this reply."
    if demands.json_schema == "":
        yield "Reply with a single JSON object and nothing else."
    elif demands.json_schema is not None:
        yield f"Reply with a single JSON value of this schema and nothing else: {demands.json_schema}"


def unmet(demands: Demands, reply: Message) -> str:
    """What `reply` did not keep to; "" if it kept to everything.

    Regular expressions of a schema are not checked: a client could write one that takes hours.
    """
    names = [call.name for call in reply.tool_calls]
    if demands.tool_choice == "none" and names:
        return f"no call was wanted, got a call of {names[0]}"
    if demands.tool_choice == "required" and not names:
        return "a tool call was wanted, got none"
    if demands.tool_name and set(names) != {demands.tool_name}:
        return f"a call of {demands.tool_name} was wanted, got {', '.join(names)}"
    if demands.single_call and len(names) > 1:
        return f"one call was wanted, got {len(names)}"
    if demands.json_schema is not None and not names:
        return _no_json(reply.content, demands.json_schema)
    return ""


def _no_json(text: str, schema_text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"JSON was wanted: {error}"
    if not schema_text:
        return "" if isinstance(value, dict) else f"a JSON object was wanted, got {type(value).__name__}"
    try:
        schema = json.loads(schema_text)
        validator = _without_patterns(jsonschema.validators.validator_for(schema, _DEFAULT))
        validator.check_schema(schema)
        # the empty registry looks up no reference outside the schema
        violation = next(validator(schema, registry=Registry()).iter_errors(value), None)
    except (ValueError, jsonschema.SchemaError, Unresolvable, RecursionError) as wrong:
        return f"the schema cannot be checked: {str(wrong).partition(chr(10))[0]}"
    if violation is None:
        return ""
    return f"JSON of the schema was wanted: {violation.json_path}: {violation.message}"


_DEFAULT = jsonschema.Draft202012Validator


def _without_patterns(validator: Any) -> Any:
    additional = validator.VALIDATORS["additionalProperties"]

    def skip(*_: object) -> None:
        return None

    def unless_patterns(
        checker: object, value: object, instance: object, schema: dict[str, object]
    ) -> Iterator[object]:
        if "patternProperties" not in schema:
            yield from additional(checker, value, instance, schema) or ()

    return jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        validator,
        {"pattern": skip, "patternProperties": skip, "additionalProperties": unless_patterns},
    )
