"""Services that leave the run: by a signal of their own, or because an operator wants it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection

from atoll.runtime.errors import UserError
from atoll.wire.types import ServiceEntry

log = logging.getLogger(__name__)

LetGo = Callable[[ServiceEntry], Awaitable[None]]


class Departures:
    """A service that drains gets no new work, and may leave once none is in progress there.

    None of this survives the coordinator: its successor learns it from the service's next call.
    """

    def __init__(self) -> None:
        self._let_go: LetGo | None = None
        self._draining: dict[ServiceEntry, asyncio.Task[None]] = {}
        self._told: dict[str, str] = {}  # name -> the incarnation that an operator wants to leave

    def serve(self, let_go: LetGo) -> None:
        """`let_go` returns once nothing is in progress at a service, which gets no new work."""
        self._let_go = let_go

    async def drain(self, entry: ServiceEntry) -> None:
        """Returns once the service may leave. Repeated calls wait for the same, as does one after a caller
        has given up."""
        if self._let_go is None:
            return  # no work has been sent to anyone yet
        if entry not in self._draining:
            log.info("%s drains: it gets no new work", entry.name)
            self._draining[entry] = asyncio.create_task(self._finish(entry, self._let_go))
        await asyncio.shield(self._draining[entry])

    async def _finish(self, entry: ServiceEntry, let_go: LetGo) -> None:
        await let_go(entry)
        log.info("%s has drained: nothing is in progress there", entry.name)

    def tell(self, name: str, services: Collection[ServiceEntry]) -> tuple[ServiceEntry, str]:
        """Has the service of that name drain, by the reply to its next heartbeat. Returns its entry, and what
        the run waits for without it, if anything. Raises UserError if none of `services` has that name."""
        by_name = {entry.name: entry for entry in services}
        if name not in by_name:
            there = ", ".join(by_name) or "none"
            raise UserError(f"no service is called {name!r}; registered services: {there}")
        entry = by_name[name]
        self._told[name] = entry.incarnation
        others = [other for other in services if other.role == entry.role and not self.is_told(other)]
        if others:
            return entry, ""
        return entry, f"{name} is the run's only {entry.role}: the run waits until another one joins"

    def is_told(self, entry: ServiceEntry) -> bool:
        return self._told.get(entry.name) == entry.incarnation

    @property
    def told(self) -> tuple[str, ...]:
        """The names of all that operators have drained, also those that have left. A launcher does not
        restart them."""
        return tuple(self._told)

    def take_back(self, names: Collection[str]) -> None:
        """A launcher may start these again."""
        for name in names:
            self._told.pop(name, None)
