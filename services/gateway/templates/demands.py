"""Format demands of requests: states them in the prompt, and checks replies."""

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jsonschema
from referencing import Registry

from atoll.gateway.conversation import Demands
from atoll.wire.types import Message

MAX_SCHEMA: Final = 1 << 16  # characters of a schema that is checked
MAX_STEPS: Final = 10_000  # of checking a reply


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

    Regular expressions of a schema are not checked, nor is what would take more than MAX_STEPS steps: a
    client could write a schema that takes hours.
    """
    names = [call.name for call in reply.tool_calls]
    if demands.tool_choice == "none" and names:
        return f"expected no call, got a call of {names[0]}"
    if demands.tool_choice == "required" and not names:
        return "expected a tool call, got none"
    if demands.tool_name and set(names) != {demands.tool_name}:
        return f"expected a call of {demands.tool_name}, got {', '.join(names)}"
    if demands.single_call and len(names) > 1:
        return f"expected one call, got {len(names)}"
    if demands.json_schema is not None and not names:
        return _no_json(reply.content, demands.json_schema)
    return ""


def _no_json(text: str, schema_text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"expected JSON: {error}"
    if not schema_text:
        return "" if isinstance(value, dict) else f"expected a JSON object, got {type(value).__name__}"
    if len(schema_text) > MAX_SCHEMA:
        return f"the schema cannot be checked: it has more than {MAX_SCHEMA} characters"
    try:
        schema = json.loads(schema_text)
        validator = _bounded(jsonschema.validators.validator_for(schema, _DEFAULT))
        validator.check_schema(schema)
        # the empty registry looks up no reference outside the schema
        violation = next(validator(schema, registry=Registry()).iter_errors(value), None)
    except Exception as wrong:  # the turn is drawn: no schema, however odd, may lose it
        return f"the schema cannot be checked: {str(wrong).partition(chr(10))[0]}"
    if violation is None:
        return ""
    return f"expected JSON of the schema: {violation.json_path}: {violation.message}"


_DEFAULT = jsonschema.Draft202012Validator
_UNBOUNDED: Final = (
    "pattern",
    "patternProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
)


def _bounded(validator: Any) -> Any:
    """A validator without the keywords whose time is not bounded by their number. Raises ValueError after
    MAX_STEPS keywords."""
    additional = validator.VALIDATORS["additionalProperties"]
    steps = itertools.count()

    def skip(*_: object) -> None:
        return None

    def counted(check: Any) -> Any:
        def step(*args: object) -> Any:
            if next(steps) == MAX_STEPS:
                raise ValueError(f"it takes more than {MAX_STEPS} steps")
            return check(*args)

        return step

    def unless_patterns(
        checker: object, value: object, instance: object, schema: dict[str, object]
    ) -> Iterator[object]:
        if "patternProperties" not in schema:
            yield from additional(checker, value, instance, schema) or ()

    checks = {keyword: counted(check) for keyword, check in validator.VALIDATORS.items()}
    checks |= dict.fromkeys(_UNBOUNDED, skip) | {"additionalProperties": counted(unless_patterns)}
    return jsonschema.validators.extend(validator, checks)  # type: ignore[no-untyped-call]
