"""What other people's servers answer, and the options that they are registered with: validated here."""

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

from atoll.runtime.errors import AtollError, BadAnswerError, ServiceUnavailableError, UserError
from atoll.wire.types import ExternalServer, GradingError, ScoreItem, Verdict

SHOWN_CHARACTERS = 200  # of an answer, in an error
TOLD_CHARACTERS = 1000  # of a cause or a reason

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # neither a string nor true or false

T = TypeVar("T")


class Answer(BaseModel):
    """Further fields of an answer are none of ours."""

    model_config = ConfigDict(frozen=True)


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RefusedError(BadAnswerError):
    """The server understood the call, and does not take what it carried."""


def read_options(server: ExternalServer, options: TypeAdapter[T], **defaults: str) -> T:
    """Raises UserError that names the first option that the protocol does not have, or not so."""
    try:
        return options.validate_python(defaults | dict(server.options))
    except ValidationError as error:
        raise UserError(
            f"{server}: options of protocol {server.protocol}: {_first(error, None)}; see docs/rewards.md"
        ) from None


def read_answer(where: str, content: bytes | str, answer: TypeAdapter[T], token: str | None) -> T:
    """Raises BadAnswerError where `content` is not JSON of that form."""
    try:
        return answer.validate_json(content)
    except ValidationError as error:
        raise BadAnswerError(
            f"{where}: {_first(error, token)}; the answer was {shown(content, token)}"
        ) from None


def number_under(*keys: str) -> TypeAdapter[float]:
    """Of a number, or of an object that holds one under the first of `keys` that it has."""

    def number(answer: object) -> object:
        if not isinstance(answer, dict):
            return answer
        for key in keys:
            if key in answer:
                return answer[key]
        raise ValueError(f"expected a number, or one under {' or '.join(keys)}")

    return TypeAdapter(Annotated[Number, BeforeValidator(number)])


def shown(content: bytes | str, token: str | None) -> str:
    """The beginning of what a server sent, fit for a log."""
    return repr(_short(content if isinstance(content, str) else content.decode(errors="replace"), token))


def told(text: str, token: str | None) -> str:
    """What a server says in a verdict, fit for a log and a message: a terminal obeys control codes."""
    text = hidden(text, token)[:TOLD_CHARACTERS]
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def hidden(text: str, token: str | None) -> str:
    """A server may echo the token that it was sent."""
    return text.replace(token, "***") if token else text


async def each(
    server: ExternalServer, items: Sequence[ScoreItem], grade: Callable[[ScoreItem], Awaitable[Verdict]]
) -> list[Verdict]:
    """Asks for every item by itself, all at once. A failure costs its own verdict; where no item was graded
    it is the server's, and raised."""

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
    return _short(f"{place + ': ' if place else ''}{problem['msg']}{got}", token)


def _short(text: str, token: str | None) -> str:
    text = hidden(text, token)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
