"""Validates responses of external servers, and the options that they are registered with."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from atoll.runtime.errors import AtollError, ProtocolError, ServiceUnavailableError, UserError
from atoll.wire.types import ExternalServer, GradingError, ScoreItem, Verdict

MAX_EXCERPT_CHARACTERS = 200  # of an answer, in an error
MAX_TEXT_CHARACTERS = 1000  # of a cause or a reason

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # not a string or boolean

T = TypeVar("T")


class ResponseModel(BaseModel):
    """Base of response models; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True)


class OptionsModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RefusedError(ProtocolError):
    """The server understood the call and rejected its content."""


def parse_options(server: ExternalServer, options: TypeAdapter[T], **defaults: str) -> T:
    """Raises UserError naming the first unknown or invalid option."""
    try:
        return options.validate_python(defaults | dict(server.options))
    except ValidationError as error:
        raise UserError(
            f"{server}: options of protocol {server.protocol}: {_first(error, None)}; see docs/rewards.md"
        ) from None


def parse_response(where: str, content: bytes | str, answer: TypeAdapter[T], token: str | None) -> T:
    """Raises ProtocolError if `content` is not JSON of that form."""
    try:
        return answer.validate_json(content)
    except ValidationError as error:
        raise ProtocolError(
            f"{where}: {_first(error, token)}; the response was {excerpt(content, token)}"
        ) from None


def number_field(*keys: str) -> TypeAdapter[float]:
    """Accepts a number, or an object with a number under the first of `keys` that it has."""

    def number(answer: object) -> object:
        if not isinstance(answer, dict):
            return answer
        for key in keys:
            if key in answer:
                return answer[key]
        raise ValueError(f"expected a number, or one under {' or '.join(keys)}")

    return TypeAdapter(Annotated[Number, BeforeValidator(number)])


def excerpt(content: bytes | str, token: str | None) -> str:
    """The beginning of a response, safe for logs."""
    return repr(_shorten(content if isinstance(content, str) else content.decode(errors="replace"), token))


def sanitize(text: str, token: str | None) -> str:
    """Text from a server's verdict, without control codes, which terminals would obey."""
    text = redact(text, token)[:MAX_TEXT_CHARACTERS]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def redact(text: str, token: str | None) -> str:
    """Replaces the token, which a server may echo."""
    return text.replace(token, "***") if token else text


async def grade_each(
    server: ExternalServer, items: Sequence[ScoreItem], grade: Callable[[ScoreItem], Awaitable[Verdict]]
) -> list[Verdict]:
    """Grades every item in its own concurrent call. A failure affects only its own verdict, unless no item
    was graded: then it is raised.
    """

    async def attempt(item: ScoreItem) -> Verdict | AtollError:
        try:
            return await grade(item)
        except AtollError as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(attempt(item)) for item in items]
    outcomes = [task.result() for task in tasks]
    failures = [outcome for outcome in outcomes if isinstance(outcome, AtollError)]
    if failures and len(failures) == len(outcomes):
        raise failures[0]
    return [
        GradingError(item.id, server.name, str(outcome), isinstance(outcome, ServiceUnavailableError))
        if isinstance(outcome, AtollError)
        else outcome
        for item, outcome in zip(items, outcomes, strict=True)
    ]


def _first(error: ValidationError, token: str | None) -> str:
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    got = "" if problem["type"] in ("missing", "json_invalid") else f", got {problem['input']!r}"
    return _shorten(f"{place + ': ' if place else ''}{problem['msg']}{got}", token)


def _shorten(text: str, token: str | None) -> str:
    text = redact(text, token)
    return text if len(text) <= MAX_EXCERPT_CHARACTERS else text[:MAX_EXCERPT_CHARACTERS] + " ..."
