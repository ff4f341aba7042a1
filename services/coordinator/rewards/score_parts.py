"""Who gives a part of each verdict: the run's own reward services, and the external servers of one name."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from atoll.coordinator.rewards.servers import Servers
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import AtollError, OverloadedError, ServiceUnavailableError, StaleFenceError
from atoll.wire.types import Graded, GradingError, ScoreItem, Verdict

log = logging.getLogger(__name__)

SKIP_S = 0.5  # for which a service that failed gets no calls; twice as long each time
MAX_SKIP_S = 30.0
BUSY_S = 0.1  # before someone who had too much to do is asked again; twice as long each time
MAX_BUSY_S = 2.0
MIN_CALL = 32  # responses in a call to a service: fewer than these are not spread over several
MAX_CALL = 256
MAX_SERVER_CALL = 64  # responses in a call to an external server
MAX_CHARACTERS = 8 << 20  # of a call's texts, 4 bytes each at most: a message may have twice as many
ITEM_CHARACTERS = 256  # of a response's other fields, roughly


class Part(Protocol):
    """Who gives a part of each verdict."""

    grader: str  # to name in errors

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        """What is asked in one call each."""
        ...

    def ask(self, items: Sequence[ScoreItem], since: float) -> AsyncGenerator[Sequence[Verdict], None]:
        """Verdicts as they come, in any order. Waits for someone to ask. Raises an AtollError if a call
        fails, or if there has been nobody to ask for the part's patience, counted from `since` (the event
        loop's time) or from the last answer."""
        ...

    async def wait_for_turn(self) -> None:
        """Returns once every call that waited before this one has begun."""
        ...


@dataclass(slots=True, eq=False)
class _Service:
    client: RewardClient
    max_queued: int  # responses that it takes at once
    held: int = 0  # of them
    failures: int = 0  # calls in a row
    cause: str = ""  # why it gets no calls for a while

    def has_room(self, count: int) -> bool:
        return self.held + min(count, self.max_queued) <= self.max_queued


class OwnServices:
    """The run's reward services: each call goes to the one with the least to do."""

    grader = "service"

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long responses wait for a service while none takes or answers any."""
        self._patience_s = patience_s
        self._services: list[_Service] = []
        self._line = asyncio.Lock()  # calls wait in it for a service, in their order
        self._changed = asyncio.Event()  # a service has room, or is there again
        self._heard = 0.0  # when a service was last seen to have work in hand
        self._reviving: set[asyncio.Task[None]] = set()

    def add(self, client: RewardClient, max_queued: int) -> None:
        """`max_queued`: as it announces it; 0: it does not."""
        self._services.append(_Service(client, max_queued or MAX_CALL))
        self._changed.set()

    def remove(self, client: RewardClient) -> None:
        self._services = [service for service in self._services if service.client is not client]

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        share = -(-len(items) // max(len(self._services), 1))
        return cut(items, min(max(share, MIN_CALL), MAX_CALL))

    async def ask(self, items: Sequence[ScoreItem], since: float) -> AsyncGenerator[Sequence[Verdict], None]:
        left = items
        while left:
            async with self._line:
                service, count = await self._with_room(len(left), since)
            try:
                async with aclosing(self._call(service, left[:count])) as answers:
                    async for verdicts in answers:
                        yield verdicts
                left = left[count:]
            except OverloadedError:  # others call it, too: that is no failure
                if _now() >= self._patient_until(since):
                    raise

    async def wait_for_turn(self) -> None:
        async with self._line:
            pass

    async def _with_room(self, count: int, since: float) -> tuple[_Service, int]:
        """Takes places for `count` responses, or for as many as the service takes at all. Waits for a service
        that has them; unblocked by verdicts, joins and recoveries."""
        while True:
            free = [s for s in self._services if not s.cause and s.has_room(count)]
            if free:
                service = min(free, key=lambda service: service.held)
                self._services.remove(service)  # so that those with equally little to do take turns
                self._services.append(service)
                taken = min(count, service.max_queued)
                service.held += taken
                return service, taken
            if _now() >= self._patient_until(since):
                causes = "; ".join(service.cause for service in self._services) or "none is registered"
                raise ServiceUnavailableError(
                    f"no reward service took {count} responses or gave a verdict for {self._patience_s:g} s "
                    f"({causes}); see logs/reward-*.log"
                )
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._patient_until(since)):
                    await self._changed.wait()

    async def _call(
        self, service: _Service, items: Sequence[ScoreItem]
    ) -> AsyncGenerator[Sequence[Verdict], None]:
        left = len(items)
        try:
            async with aclosing(service.client.verdicts(items)) as answers:
                async for verdicts in answers:
                    self._heard = _now()
                    left -= len(verdicts)
                    self._release(service, len(verdicts))
                    yield verdicts
            service.failures = 0
        except StaleFenceError:
            raise  # another coordinator has the run
        except AtollError as error:
            if not isinstance(error, OverloadedError):
                self._heard = _now()  # it was there until now
            self._skip(service, error)
            raise
        finally:
            self._release(service, left)

    def _release(self, service: _Service, count: int) -> None:
        service.held -= count
        self._changed.set()

    def _skip(self, service: _Service, error: AtollError) -> None:
        if service.cause or service not in self._services:
            return
        service.cause = str(error)
        service.failures += 1
        is_busy = isinstance(error, OverloadedError)
        log.log(logging.INFO if is_busy else logging.WARNING, "gets no calls for a while: %s", error)
        first_s, most_s = (BUSY_S, MAX_BUSY_S) if is_busy else (SKIP_S, MAX_SKIP_S)
        revival = asyncio.create_task(self._revive(service, first_s, most_s))
        self._reviving.add(revival)
        revival.add_done_callback(self._reviving.discard)

    async def _revive(self, service: _Service, first_s: float, most_s: float) -> None:
        """Gives a service calls again once it answers; ends if it leaves."""
        while service in self._services:
            await asyncio.sleep(min(first_s * 2 ** min(service.failures - 1, 9), most_s))
            try:
                info = await service.client.describe()
            except AtollError:
                service.failures += 1  # why is in the log, from its first failure
            else:
                service.max_queued = info.max_queued or MAX_CALL
                service.cause = ""
                self._changed.set()
                return

    def _patient_until(self, since: float) -> float:
        return max(since, self._heard) + self._patience_s


class ServerGrader:
    """The grader server:NAME: those external servers that have the name at the moment."""

    def __init__(self, servers: Servers, name: str, weight: float, patience_s: float = 600.0) -> None:
        """`patience_s`: for servers that have too much to do."""
        self.grader = f"server:{name}"
        self._servers = servers
        self._name = name
        self._weight = weight
        self._patience_s = patience_s

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        """As many calls as the servers take at once, so that all of them have a part."""
        slots = max(self._servers.slots(self._name), 1)
        return cut(items, min(-(-len(items) // slots), MAX_SERVER_CALL))

    async def ask(self, items: Sequence[ScoreItem], since: float) -> AsyncGenerator[Sequence[Verdict], None]:
        """Servers answer a call as a whole."""
        pause_s = BUSY_S
        while True:
            try:
                yield [self._part(verdict) for verdict in await self._servers.score(self._name, items)]
                return
            except OverloadedError:
                if _now() >= since + self._patience_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BUSY_S)

    async def wait_for_turn(self) -> None:
        await self._servers.wait_for_turn(self._name)

    def _part(self, verdict: Verdict) -> Verdict:
        """Components of the server's own stand beside its value, as server:NAME/COMPONENT."""
        if isinstance(verdict, GradingError):
            return GradingError(verdict.id, self.grader, verdict.cause, verdict.retryable)
        own, name = verdict.components, self.grader
        return Graded(
            verdict.id,
            self._weight * verdict.value,
            {name: verdict.value, **{f"{name}/{component}": value for component, value in own.items()}},
            {f"{name}/{of}" if of in own else name: reason for of, reason in verdict.reasons.items()},
        )


def cut(items: Sequence[ScoreItem], size: int) -> list[Sequence[ScoreItem]]:
    """Parts of at most `size` items, and of MAX_CHARACTERS (more only if one item has more), as if each item
    brought its own copy of the prompt and the ground truth, which to external servers it does."""
    parts: list[Sequence[ScoreItem]] = []
    first = characters = 0
    for number, item in enumerate(items):
        own = sum(map(len, texts(item))) + ITEM_CHARACTERS
        if number - first == size or (number > first and characters + own > MAX_CHARACTERS):
            parts.append(items[first:number])
            first, characters = number, 0
        characters += own
    return [*parts, items[first:]] if items else []


def texts(item: ScoreItem) -> list[str]:
    return [item.prompt, item.response, item.ground_truth, *item.extra, *item.extra.values()]


def _now() -> float:
    return asyncio.get_running_loop().time()
