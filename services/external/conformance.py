"""Whether someone's server keeps its protocol: checks that each say what was got and what was expected."""

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
from atoll.runtime.errors import AtollError, BadAnswerError, UserError
from atoll.wire.types import ExternalServer, Graded, GroupId, SampleId, ScoreItem

GARBAGE = '{"prompt": '
TIMED_CALLS = 10
SPARE = 0.5  # of the time limit, that the slowest of unhurried calls leaves to a busy hour
UNICODE = "Ответ: ４６ 🙂 e\u0301 \u202eright to left \u2028 \x00 \\boxed{46}"
WRONG = ("45", "I do not know.", "64")  # beside a right response: a batch whose rewards tell its order

T = TypeVar("T")

Attempt = Callable[
    [], Awaitable[str]
]  # says what it got; raises AtollError where that is not as it should be


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    passed: bool
    said: str  # what was got, and where that is wrong, what was expected


async def conformance(
    server: ExternalServer, token: str | None, items: Sequence[ScoreItem], deterministic: bool
) -> AsyncIterator[Check]:
    """Ends after the first check where the server does not answer at all. `items` are what a reward server is
    asked about; with none, sums. Raises UserError where the options are not the protocol's."""
    client = connect(server, token)
    try:
        first = await _made("answers the probe", client.probe)
        yield first
        if first.passed:
            for name, attempt in _checks(client, token, items or ITEMS, deterministic):
                yield await _made(name, attempt)
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
        checks.append(("refuses a request that is not JSON", lambda: _refuses_garbage(channel, path)))
    if token is not None:
        checks += [
            ("refuses another token", lambda: _refuses(client.server, f"{token}x", items[0])),
            ("refuses a call without token", lambda: _refuses(client.server, None, items[0])),
        ]
    return checks


async def _made(name: str, attempt: Attempt) -> Check:
    try:
        return Check(name, True, await attempt())
    except AtollError as error:
        return Check(name, False, str(error))


async def _refuses_garbage(channel: Channel, path: str) -> str:
    status = await channel.status(path, GARBAGE)
    if not 400 <= status < 500:
        raise BadAnswerError(f"got status {status} for the body {GARBAGE!r}, expected 400 or 422")
    return f"status {status}"


async def _refuses(server: ExternalServer, token: str | None, item: ScoreItem) -> str:
    """What a probe asks may be open to all; what it is there for may not."""
    client = connect(server, token)
    try:
        said = await client.probe()
        if server.kind == "reward":
            await cast(RewardServer, client).score([item])
    except UserError as refused:
        return str(refused)
    finally:
        await client.close()
    raise BadAnswerError(f"got {said!r}, expected status 401 or 403 (gRPC: UNAUTHENTICATED)")


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
            ("grades the same item alike", self._same_again),
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
            raise BadAnswerError(f"got the error {verdict.cause!r}, expected a reward")
        return verdict.value

    async def _grade(self, item: ScoreItem) -> str:
        return f"{await self._value(item):g}"

    async def _same_again(self) -> str:
        values = [await self._value(self._items[0]) for _ in range(3)]
        text = ", ".join(f"{value:g}" for value in values)
        if self._deterministic and len(set(values)) > 1:
            raise BadAnswerError(f"got {text} for one item, expected one reward; or say --not-deterministic")
        return text

    async def _order(self) -> str:
        alone = [await self._value(item) for item in self._items]
        batch = [
            verdict.value if isinstance(verdict, Graded) else None
            for verdict in await self._server.score(self._items)
        ]
        if not self._deterministic:
            return f"{len(batch)} verdicts; their order cannot be told, since rewards differ by themselves"
        if batch != alone:
            raise BadAnswerError(f"got {batch} from a batch of {len(batch)}, expected {alone} as one by one")
        if len(set(alone)) == 1:
            return f"{batch}; their order cannot be told: name --items that are not all graded alike"
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
                raise BadAnswerError(f"got {got:g} for an item among others, expected {alone:g} as by itself")
        return f"{seconds:.3f} s in all"

    async def _time(self) -> str:
        seconds = []
        for _ in range(TIMED_CALLS):
            began = time.perf_counter()
            await self._value(self._items[0])
            seconds.append(time.perf_counter() - began)
        text = f"median {statistics.median(seconds) * 1e3:.1f} ms, slowest {max(seconds) * 1e3:.1f} ms"
        limit = self._server.server.timeout_s
        if max(seconds) > SPARE * limit:
            raise BadAnswerError(f"got {text}, expected less than half of the limit of {limit:g} s")
        return text


class _ToolChecks:
    def __init__(self, server: ToolServer) -> None:
        self._server = server

    def all(self) -> list[tuple[str, Attempt]]:
        concurrency = self._server.server.concurrency
        return [
            ("describes its tools", self._describe),
            ("says that it has no such tool", self._unknown),
            (f"answers {concurrency} calls at once", lambda: self._at_once(concurrency)),
        ]

    async def _describe(self) -> str:
        tools = await self._server.tools()
        names = [tool.name for tool in tools]
        if not names or len(set(names)) < len(names):
            raise BadAnswerError(f"got the tools {names}, expected at least one, each with a name of its own")
        for tool in tools:
            try:
                schema = dict(tool.schema)
                validator_for(schema).check_schema(schema)
            except SchemaError as error:
                raise BadAnswerError(f"tool {tool.name}: got a schema with {error.message}") from None
        return ", ".join(names)

    async def _unknown(self) -> str:
        result = await self._server.call("no_such_tool", {})
        if not result.is_error:
            raise BadAnswerError(f"got {result.text!r} from the tool no_such_tool, expected an error")
        return result.text

    async def _at_once(self, calls: int) -> str:
        """Probes, which ask the server in every protocol: in some a client knows the tools by itself."""
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
            ("starts an episode anew", self._again),
            ("refuses an action that it does not have", self._unknown),
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
        raise BadAnswerError(
            f"got {step} for an action of no_such_field, expected the error VALIDATION_ERROR"
        )

    async def _at_once(self, episodes: int) -> str:
        """Each waits in its episode for all others to have begun theirs, or to have failed to."""
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
        for number, response in enumerate(WRONG, start=1)
    ),
)
