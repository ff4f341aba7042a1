"""Conformance checks for external servers; each reports what it got and what it expected."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeVar, cast

from jsonschema import SchemaError
from jsonschema.validators import validator_for

from atoll.external.base import EnvServer, ExternalClient, RewardServer, ToolServer
from atoll.external.channel import Channel
from atoll.external.http import HttpReward
from atoll.external.nemo_gym import NemoGymReward
from atoll.external.probes import PROBE
from atoll.external.protocols import connect
from atoll.runtime.errors import AtollError, ProtocolError, UserError
from atoll.wire.types import ExternalServer, Graded, GroupId, SampleId, ScoreItem

GARBAGE = '{"prompt": '
TIMED_CALLS = 10
TIME_MARGIN = 0.5  # share of the time limit kept in reserve for load
UNICODE = "Ответ: ４６ 🙂 e\u0301 \u202eright to left \u2028 \x00 \\boxed{46}"
WRONG_RESPONSE = (
    "45",
    "I do not know.",
    "64",
)  # next to a right response: rewards then reveal the order of a batch

T = TypeVar("T")

Attempt = Callable[[], Awaitable[str]]  # returns what it got; raises AtollError if that is wrong


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    said: str  # what was got and, if wrong, what was expected


async def conformance(
    server: ExternalServer, token: str | None, items: Sequence[ScoreItem], deterministic: bool
) -> AsyncIterator[Check]:
    """Stops after the first check if the server does not respond at all. `items` are graded by a reward
    server; default: sums. Raises UserError for invalid options.
    """
    client = connect(server, token)
    try:
        first = await _attempt("answers the probe", client.probe)
        yield first
        if first.passed:
            for name, attempt in _checks(client, token, items or ITEMS, deterministic):
                yield await _attempt(name, attempt)
    finally:
        await client.close()


def _checks(
    client: ExternalClient, token: str | None, items: Sequence[ScoreItem], deterministic: bool
) -> list[tuple[str, Attempt]]:
    checks: list[tuple[str, Attempt]] = []
    match client.server.kind:
        case "reward":
            checks += _RewardChecks(cast(RewardServer, client), items, deterministic).all()
        case "tool":
            checks += _ToolChecks(cast(ToolServer, client)).all()
        case "env":
            checks += _EnvChecks(cast(EnvServer, client)).all()
    if isinstance(client, HttpReward | NemoGymReward):
        channel, path = client.channel, client.path
        checks.append(("rejects a request that is not JSON", lambda: _refuses_garbage(channel, path)))
    if token is not None:
        checks += [
            ("rejects a wrong token", lambda: _refuses(client.server, f"{token}x", items[0])),
            ("rejects a call without token", lambda: _refuses(client.server, None, items[0])),
        ]
    return checks


async def _attempt(name: str, attempt: Attempt) -> Check:
    try:
        return Check(name, True, await attempt())
    except AtollError as error:
        return Check(name, False, str(error))


async def _refuses_garbage(channel: Channel, path: str) -> str:
    status = await channel.status(path, GARBAGE)
    if not 400 <= status < 500:
        raise ProtocolError(f"got status {status} for the body {GARBAGE!r}, expected 400 or 422")
    return f"status {status}"


async def _refuses(server: ExternalServer, token: str | None, item: ScoreItem) -> str:
    """A probe may be public, but calls must not be."""
    client = connect(server, token)
    try:
        said = await client.probe()
        if server.kind == "reward":
            await cast(RewardServer, client).score([item])
    except UserError as refused:
        return str(refused)
    finally:
        await client.close()
    raise ProtocolError(f"got {said!r}, expected status 401 or 403 (gRPC: UNAUTHENTICATED)")


class _RewardChecks:
    def __init__(self, server: RewardServer, items: Sequence[ScoreItem], deterministic: bool) -> None:
        self._server = server
        self._items = items
        self._deterministic = deterministic

    def all(self) -> list[tuple[str, Attempt]]:
        concurrency = self._server.server.concurrency
        item = self._items[0]
        return [
            ("grades one item", lambda: self._grade(item)),
            ("grades the same item consistently", self._same_again),
            ("keeps the order of a batch", self._order),
            ("grades an empty response", lambda: self._grade(item._replace(response=""))),
            ("grades a response in Unicode", lambda: self._grade(item._replace(response=UNICODE))),
            ("grades a response of 100 KB", lambda: self._grade(item._replace(response="46 and " * 14_629))),
            (f"answers {concurrency} calls at once", lambda: self._at_once(concurrency)),
            ("answers in time", self._time),
        ]

    async def _value(self, item: ScoreItem) -> float:
        verdict = (await self._server.score([item]))[0]
        if not isinstance(verdict, Graded):
            raise ProtocolError(f"got the error {verdict.cause!r}, expected a reward")
        return verdict.value

    async def _grade(self, item: ScoreItem) -> str:
        return f"{await self._value(item):g}"

    async def _same_again(self) -> str:
        values = [await self._value(self._items[0]) for _ in range(3)]
        text = ", ".join(f"{value:g}" for value in values)
        if self._deterministic and len(set(values)) > 1:
            raise ProtocolError(f"got {text} for one item, expected one reward; or use --not-deterministic")
        return text

    async def _order(self) -> str:
        alone = [await self._value(item) for item in self._items]
        batch = [
            verdict.value if isinstance(verdict, Graded) else None
            for verdict in await self._server.score(self._items)
        ]
        if not self._deterministic:
            return f"{len(batch)} verdicts; their order cannot be checked, since rewards vary"
        if batch != alone:
            raise ProtocolError(
                f"got {batch} from a batch of {len(batch)}, expected {alone} as for single items"
            )
        if len(set(alone)) == 1:
            return f"{batch}; their order cannot be checked: give --items with different rewards"
        return str(batch)

    async def _at_once(self, calls: int) -> str:
        items = [self._items[number % len(self._items)] for number in range(calls)]
        expected = [await self._value(item) for item in self._items]
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_outcome(self._value(item))) for item in items]
        seconds = time.perf_counter() - began
        for number, task in enumerate(tasks):
            got, alone = task.result(), expected[number % len(expected)]
            if isinstance(got, AtollError):
                raise got
            if self._deterministic and got != alone:
                raise ProtocolError(f"got {got:g} for an item among others, expected {alone:g} as by itself")
        return f"{seconds:.3f} s in all"

    async def _time(self) -> str:
        seconds = []
        for _ in range(TIMED_CALLS):
            began = time.perf_counter()
            await self._value(self._items[0])
            seconds.append(time.perf_counter() - began)
        text = f"median {statistics.median(seconds) * 1e3:.1f} ms, slowest {max(seconds) * 1e3:.1f} ms"
        limit = self._server.server.timeout_s
        if max(seconds) > TIME_MARGIN * limit:
            raise ProtocolError(f"got {text}, expected less than half of the limit of {limit:g} s")
        return text


class _ToolChecks:
    def __init__(self, server: ToolServer) -> None:
        self._server = server

    def all(self) -> list[tuple[str, Attempt]]:
        concurrency = self._server.server.concurrency
        return [
            ("describes its tools", self._describe),
            ("reports an unknown tool", self._unknown),
            (f"answers {concurrency} calls at once", lambda: self._at_once(concurrency)),
        ]

    async def _describe(self) -> str:
        async with self._server.session() as session:
            tools = await session.tools()
        names = [tool.name for tool in tools]
        if not names or len(set(names)) < len(names):
            raise ProtocolError(f"got the tools {names}, expected at least one, each with a name of its own")
        for tool in tools:
            try:
                schema = dict(tool.schema)
                validator_for(schema).check_schema(schema)
            except SchemaError as error:
                raise ProtocolError(f"tool {tool.name}: got a schema with {error.message}") from None
        return ", ".join(names)

    async def _unknown(self) -> str:
        async with self._server.session() as session:
            result = await session.call("no_such_tool", {})
        if not result.is_error:
            raise ProtocolError(f"got {result.text!r} from the tool no_such_tool, expected an error")
        return result.text

    async def _at_once(self, calls: int) -> str:
        """Uses probes, which call the server in every protocol; listing tools may not."""
        for outcome in await asyncio.gather(*(_outcome(self._server.probe()) for _ in range(calls))):
            if isinstance(outcome, AtollError):
                raise outcome
        return f"{calls} probes"


class _EnvChecks:
    def __init__(self, server: EnvServer) -> None:
        self._server = server

    def all(self) -> list[tuple[str, Attempt]]:
        concurrency = self._server.server.concurrency
        return [
            ("restarts an episode", self._again),
            ("rejects an invalid action", self._unknown),
            (f"runs {concurrency} episodes at once", lambda: self._at_once(concurrency)),
        ]

    async def _again(self) -> str:
        async with self._server.episode() as episode:
            await episode.reset({})
            observation = await episode.reset({})
        return f"observation of {', '.join(observation.content) or 'nothing'}"

    async def _unknown(self) -> str:
        async with self._server.episode() as episode:
            await episode.reset({})
            try:
                step = await episode.step({"no_such_field": 1})
            except UserError as refused:
                return str(refused)
        raise ProtocolError(f"got {step} for an action of no_such_field, expected the error VALIDATION_ERROR")

    async def _at_once(self, episodes: int) -> str:
        """Each episode waits until all others have started or failed."""
        all_are_here = asyncio.Barrier(episodes)

        async def run() -> None:
            async with AsyncExitStack() as stack:
                try:
                    episode = await stack.enter_async_context(self._server.episode())
                    await episode.reset({})
                except AtollError:
                    await all_are_here.wait()
                    raise
                await all_are_here.wait()

        for outcome in await asyncio.gather(*(_outcome(run()) for _ in range(episodes))):
            if isinstance(outcome, AtollError):
                raise outcome
        return f"{episodes} episodes"


async def _outcome(call: Awaitable[T]) -> T | AtollError:
    try:
        return await call
    except AtollError as error:
        return error


ITEMS = (
    PROBE,
    *(
        PROBE._replace(id=SampleId(GroupId("probe", 0, 0), number), response=response)
        for number, response in enumerate(WRONG_RESPONSE, start=1)
    ),
)
