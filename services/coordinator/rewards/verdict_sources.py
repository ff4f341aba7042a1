"""Sources of verdicts: the run's own reward services, and external servers by name."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Protocol

from atoll.coordinator.rewards.servers import Servers
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.errors import AtollError, OverloadedError, ServiceUnavailableError, StaleFenceError
from atoll.wire.types import Graded, GradingError, ScoreItem, Verdict

log = logging.getLogger(__name__)

SKIP_S = 0.5  # pause of a failed service; doubles each time
MAX_SKIP_S = 30.0
BUSY_S = 0.1  # before an overloaded service is called again; doubles each time
MAX_BUSY_S = 2.0
MIN_CALL = 32  # minimum responses per call to a service
MAX_CALL = 256
MAX_SERVER_CALL = 64  # responses in a call to an external server
MAX_CHARACTERS = 8 << 20  # characters per call, at most 4 bytes each: half of a message's limit
ITEM_CHARACTERS = 256  # characters of a response's other fields, roughly


class NoRewardServiceError(ServiceUnavailableError):
    """None has been registered for too long: no fault of the responses, so it ends the run."""


class VerdictSource(Protocol):
    """A source of partial verdicts."""

    grader: str  # named in errors

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        """Splits items into calls."""
        ...

    def ask(self, items: Sequence[ScoreItem], since: float) -> AsyncGenerator[Sequence[Verdict], None]:
        """Yields verdicts as they arrive, in any order. Waits for a server. Raises an AtollError if a call
        fails, or if none was available for too long, counted from `since` (event-loop time) or from the last
        response.
        """
        ...

    async def wait_until_dispatched(self) -> None:
        """Waits until every earlier call has begun."""
        ...


@dataclass(slots=True, eq=False)
class _ServiceSlots:
    client: RewardClient
    max_queued: int  # responses that it takes at once
    held: int = 0  # of them
    failures: int = 0  # calls in a row
    cause: str = ""  # why it gets no calls for a while

    def has_room(self, count: int) -> bool:
        return self.held + min(count, self.max_queued) <= self.max_queued


class RewardServices:
    """The run's reward services: each call goes to the least busy one."""

    grader = "service"

    def __init__(
        self, wait_timeout_s: float, absence_timeout_s: float, tell: Callable[[str], Awaitable[None]]
    ) -> None:
        """`wait_timeout_s`: how long responses wait while no service makes progress. `absence_timeout_s`: how
        long they wait while none is registered; `tell` is told so then, and "" afterwards.
        """
        self._wait_timeout_s = wait_timeout_s
        self._absence_timeout_s = absence_timeout_s
        self._tell = tell
        self._services: list[_ServiceSlots] = []
        self._line = asyncio.Lock()  # calls wait here for a service, in order
        self._changed = asyncio.Event()  # a service has room or has returned
        self._heard = 0.0  # when a service last had work
        self._left = 0.0  # when the last one left
        self._reviving: set[asyncio.Task[None]] = set()

    def add(self, client: RewardClient, max_queued: int) -> None:
        """`max_queued`: as it announces it; 0: it does not."""
        self._services.append(_ServiceSlots(client, max_queued or MAX_CALL))
        self._changed.set()

    async def drain(self, client: RewardClient) -> None:
        """It gets no new calls; returns once its verdicts have arrived."""
        draining = [service for service in self._services if service.client is client]
        self.remove(client)
        while any(service.held for service in draining):
            self._changed.clear()
            await self._changed.wait()

    def remove(self, client: RewardClient) -> None:
        self._services = [service for service in self._services if service.client is not client]
        self._left = _now()

    async def addresses(self) -> list[str]:
        """Waits until there is one. Raises NoRewardServiceError if there is none for too long."""
        if not self._services:
            await self._wait_for_any(_now())
        return [service.client.address for service in self._services]

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        share = -(-len(items) // max(len(self._services), 1))
        return split_items(items, min(max(share, MIN_CALL), MAX_CALL))

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
            except OverloadedError:  # busy with other calls is not a failure
                if _now() >= self._patient_until(since):
                    raise

    async def wait_until_dispatched(self) -> None:
        async with self._line:
            pass

    async def _with_room(self, count: int, since: float) -> tuple[_ServiceSlots, int]:
        """Reserves room for `count` responses, or for the service's maximum. Waits for a service with room;
        unblocked by verdicts, joins and recoveries.
        """
        while True:
            if not self._services:
                await self._wait_for_any(since)
            free = [s for s in self._services if not s.cause and s.has_room(count)]
            if free:
                service = min(free, key=lambda service: service.held)
                self._services.remove(service)  # round robin among equally busy ones
                self._services.append(service)
                taken = min(count, service.max_queued)
                service.held += taken
                return service, taken
            if _now() >= self._patient_until(since):
                causes = "; ".join(service.cause for service in self._services)
                raise ServiceUnavailableError(
                    f"no reward service took {count} responses or gave a verdict for "
                    f"{self._wait_timeout_s:g} s ({causes}); see the logs of the reward services"
                )
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._patient_until(since)):
                    await self._changed.wait()

    async def _wait_for_any(self, since: float) -> None:
        """Waits until a service joins. Raises NoRewardServiceError if none does in time."""
        log.warning("no reward service is registered: responses wait for one")
        await self._tell("no reward service is registered: finished samples wait for one")
        try:
            async with asyncio.timeout_at(max(since, self._left) + self._absence_timeout_s):
                while not self._services:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NoRewardServiceError(
                f"no reward service has been registered for {self._absence_timeout_s:g} s "
                "(coordinator.start_timeout_s), so samples cannot be graded: start one and continue "
                "with --resume; see the log of the last one"
            ) from None
        self._heard = _now()
        await self._tell("")

    async def _call(
        self, service: _ServiceSlots, items: Sequence[ScoreItem]
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
            raise  # another coordinator has taken over
        except AtollError as error:
            if not isinstance(error, OverloadedError):
                self._heard = _now()  # it was there until now
            self._skip(service, error)
            raise
        finally:
            self._release(service, left)

    def _release(self, service: _ServiceSlots, count: int) -> None:
        service.held -= count
        self._changed.set()

    def _skip(self, service: _ServiceSlots, error: AtollError) -> None:
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

    async def _revive(self, service: _ServiceSlots, first_s: float, most_s: float) -> None:
        """Re-enables a service once it answers; ends if it leaves."""
        while service in self._services:
            await asyncio.sleep(min(first_s * 2 ** min(service.failures - 1, 9), most_s))
            try:
                info = await service.client.describe()
            except AtollError:
                service.failures += 1  # its first failure is in the log
            else:
                service.max_queued = info.max_queued or MAX_CALL
                service.cause = ""
                self._changed.set()
                return

    def _patient_until(self, since: float) -> float:
        return max(since, self._heard) + self._wait_timeout_s


class ServerGrader:
    """The grader server:NAME: the external servers with that name."""

    def __init__(self, servers: Servers, name: str, weight: float, wait_timeout_s: float = 600.0) -> None:
        """`wait_timeout_s`: how long to wait for busy servers."""
        self.grader = f"server:{name}"
        self._servers = servers
        self._name = name
        self._weight = weight
        self._wait_timeout_s = wait_timeout_s

    def split(self, items: Sequence[ScoreItem]) -> list[Sequence[ScoreItem]]:
        """As many calls as the servers accept concurrently, so that all get a share."""
        slots = max(self._servers.slots(self._name), 1)
        return split_items(items, min(-(-len(items) // slots), MAX_SERVER_CALL))

    async def ask(self, items: Sequence[ScoreItem], since: float) -> AsyncGenerator[Sequence[Verdict], None]:
        """Servers answer a call as a whole."""
        pause_s = BUSY_S
        while True:
            try:
                yield [self._part(verdict) for verdict in await self._servers.score(self._name, items)]
                return
            except OverloadedError:
                if _now() >= since + self._wait_timeout_s:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_BUSY_S)

    async def wait_until_dispatched(self) -> None:
        await self._servers.wait_until_dispatched(self._name)

    def _part(self, verdict: Verdict) -> Verdict:
        """Components of the server's own stand beside its value, as server:NAME/COMPONENT."""
        if isinstance(verdict, GradingError):
            return replace(verdict, grader=self.grader)
        own, name = verdict.components, self.grader
        return Graded(
            verdict.id,
            self._weight * verdict.value,
            {name: verdict.value, **{f"{name}/{component}": value for component, value in own.items()}},
            {f"{name}/{of}" if of in own else name: reason for of, reason in verdict.reasons.items()},
        )


def split_items(items: Sequence[ScoreItem], size: int) -> list[Sequence[ScoreItem]]:
    """Parts of at most `size` items, and of MAX_CHARACTERS (more only if one item has more), as if each item
    brought its own copy of the prompt and the ground truth, which to external servers it does."""
    parts: list[Sequence[ScoreItem]] = []
    first = characters = 0
    for number, item in enumerate(items):
        own = sum(map(len, item_texts(item))) + ITEM_CHARACTERS
        if number - first == size or (number > first and characters + own > MAX_CHARACTERS):
            parts.append(items[first:number])
            first, characters = number, 0
        characters += own
    return [*parts, items[first:]] if items else []


def item_texts(item: ScoreItem) -> list[str]:
    return [item.prompt, item.response, item.ground_truth, *item.extra, *item.extra.values()]


def _now() -> float:
    return asyncio.get_running_loop().time()
