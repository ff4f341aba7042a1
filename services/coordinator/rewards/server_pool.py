"""Distributes calls and episodes over servers of the same name, within each server's concurrency."""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from atoll.external.base import ExternalClient
from atoll.runtime.errors import AtollError, OverloadedError, ServiceUnavailableError, UserError
from atoll.wire.types import ExternalServer, ServerAccess, ServerKind

Name = tuple[ServerKind, str]  # servers of one kind and name share its calls

RETRY_S = 1.0  # before an unhealthy server is probed; doubles after each failure


@dataclass(slots=True, eq=False)
class PoolMember:
    server: ExternalServer
    client: ExternalClient
    token: str | None = field(repr=False)
    is_registered: bool  # it was registered, not listed in the config
    cause: str = ""  # why it gets no calls; "" while it is healthy
    in_hand: int = 0  # calls
    last_call: int = 0  # number of the last one
    failures: int = 0  # consecutive, while it is healthy
    pause_s: float = RETRY_S  # before the next probe, once it is unhealthy
    unhealthy_since: float = math.inf
    last_answered: float = -math.inf  # when it last answered
    due: float = 0.0  # to be probed
    has_left: bool = False

    @property
    def name(self) -> Name:
        return self.server.kind, self.server.name

    @property
    def access(self) -> ServerAccess:
        return ServerAccess(self.server, self.token)

    @property
    def key(self) -> str:
        return f"{self.server.kind} {self.server.name} {self.server.url}"

    def public_error(self, error: AtollError) -> str:
        """The error text shown outside of the log: for registered servers only its kind, since an error
        quotes the response, and the caller who registers a server chooses its address.
        """
        if not self.is_registered:
            return cause_of(self.server, error)
        match error:
            case OverloadedError():
                return "it is busy"
            case ServiceUnavailableError():
                return "it does not answer, or not in time"
            case UserError():
                return "it refuses such calls: check the token of `auth`, and the options"
            case _:
                return "it violates its protocol"

    def __str__(self) -> str:
        return str(self.server)


def cause_of(server: ExternalServer, error: Exception) -> str:
    """The error text without the server's name."""
    return str(error).removeprefix(f"{server}: ") or type(error).__name__


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call waiting for a server; those in `tried` have failed."""

    tried: Collection[PoolMember]
    server: asyncio.Future[PoolMember] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class ServerPool:
    """The current servers, and the calls that wait for one."""

    def __init__(self, wait_timeout_s: float) -> None:
        """`wait_timeout_s`: how long a call waits while no server is healthy."""
        self._members: dict[str, PoolMember] = {}  # by key
        self._wait_timeout_s = wait_timeout_s
        self._waiting: dict[Name, deque[_Waiter]] = defaultdict(deque)
        self._calls = count(1)

    def __iter__(self) -> Iterator[PoolMember]:
        return iter(self._members.values())

    def get(self, key: str) -> PoolMember | None:
        return self._members.get(key)

    def put(self, member: PoolMember) -> PoolMember | None:
        """Returns the server that it replaces."""
        old = self._members.get(member.key)
        self._members[member.key] = member
        return old

    def remove(self, member: PoolMember) -> None:
        del self._members[member.key]

    def find(self, name: Name) -> list[PoolMember]:
        return [member for member in self if member.name == name]

    def healthy(self, name: Name) -> list[PoolMember]:
        return [member for member in self.find(name) if not member.cause]

    @asynccontextmanager
    async def acquire(self, name: Name, tried: Collection[PoolMember] = ()) -> AsyncIterator[PoolMember]:
        """Acquires a healthy server with room, preferably not one of `tried`. Waits in line; unblocked by
        responses, joins and recoveries. Raises ServiceUnavailableError if none is healthy after
        wait_timeout_s.
        """
        waiter = _Waiter(tried)
        self._waiting[name].append(waiter)
        self.dispatch(name)
        try:
            while not waiter.server.done():
                await asyncio.wait([waiter.server], timeout=self._wait_timeout_s)
                if not waiter.server.done() and not self.healthy(name):
                    raise ServiceUnavailableError(
                        f"waited {self._wait_timeout_s:g} s: {self._explain_absence(name)}"
                    )
            yield waiter.server.result()
        finally:
            if waiter.server.done():
                await self.release(waiter.server.result())
            else:
                self._waiting[name].remove(waiter)

    def dispatch(self, name: Name) -> None:
        """Assigns servers with room to waiting calls, in order."""
        for waiter in list(self._waiting[name]):
            healthy = self.healthy(name)
            free = [member for member in healthy if member.in_hand < member.server.concurrency]
            if not free:
                return
            others = [member for member in healthy if member not in waiter.tried]
            chosen = [member for member in free if member in others] if others else free
            if chosen:
                member = min(chosen, key=lambda m: (m.in_hand / m.server.concurrency, m.last_call))
                member.in_hand += 1
                member.last_call = next(self._calls)
                self._waiting[name].remove(waiter)
                waiter.server.set_result(member)

    async def release(self, member: PoolMember) -> None:
        member.in_hand -= 1
        self.dispatch(member.name)
        if member.has_left and not member.in_hand:
            await member.client.close()

    def _explain_absence(self, name: Name) -> str:
        causes = "; ".join(f"{member}: {member.cause}" for member in self.find(name))
        return f"no {' server '.join(name)} is healthy ({causes or 'none is registered'})"
