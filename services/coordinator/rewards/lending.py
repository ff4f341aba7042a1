"""Which server gets the next call: those of one name share the load, none has more calls than it takes."""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from atoll.external.base import ExternalClient
from atoll.runtime.errors import AtollError, OverloadedError, ServiceUnavailableError, UserError
from atoll.wire.types import ExternalServer

RETRY_S = 1.0  # before an unwell server is probed; twice as long each time that it has not helped


@dataclass(slots=True, eq=False)
class Member:
    server: ExternalServer
    client: ExternalClient
    has_lease: bool  # it was registered: it does not stand in the config
    cause: str = ""  # why it gets no calls; "": it is well
    in_hand: int = 0  # calls
    turn: int = 0  # number of the last one
    failures: int = 0  # in a row, while it is well
    pause_s: float = RETRY_S  # before the next probe, once it is unwell
    unwell_since: float = math.inf
    heard: float = -math.inf  # when it last answered
    due: float = 0.0  # to be probed
    has_left: bool = False

    @property
    def key(self) -> str:
        return f"{self.server.kind} {self.server.name} {self.server.url}"

    def shown(self, error: AtollError) -> str:
        """What others than the log's readers learn of an error: of a registered server only its kind, since
        an error quotes what was answered, and whoever registers a server says where to ask."""
        if not self.has_lease:
            return cause_of(self.server, error)
        match error:
            case OverloadedError():
                return "it is busy"
            case ServiceUnavailableError():
                return "it does not answer, or not in time"
            case UserError():
                return "it refuses such calls: check the token of `auth`, and the options"
            case _:
                return "it does not answer as its protocol says"

    def __str__(self) -> str:
        return str(self.server)


def cause_of(server: ExternalServer, error: Exception) -> str:
    """Without the server's name, which errors of its client begin with."""
    return str(error).removeprefix(f"{server}: ") or type(error).__name__


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call that waits for a server; those in `tried` have failed it."""

    tried: Collection[Member]
    server: asyncio.Future[Member] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Lender:
    """The servers that are there, and the calls that wait for one."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long a call waits while no server is well."""
        self._members: dict[str, Member] = {}  # by key
        self._patience_s = patience_s
        self._waiting: dict[str, deque[_Waiter]] = defaultdict(deque)  # by name of reward servers
        self._turns = count(1)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, key: str) -> Member | None:
        return self._members.get(key)

    def put(self, member: Member) -> Member | None:
        """Returns the one whose place it takes."""
        old = self._members.get(member.key)
        self._members[member.key] = member
        return old

    def remove(self, member: Member) -> None:
        del self._members[member.key]

    def named(self, kind: str, name: str) -> list[Member]:
        return [member for member in self if (member.server.kind, member.server.name) == (kind, name)]

    def well(self, name: str) -> list[Member]:
        return [member for member in self.named("reward", name) if not member.cause]

    @asynccontextmanager
    async def borrowed(self, name: str, tried: Collection[Member]) -> AsyncIterator[Member]:
        """A server that is well and has room; none of those tried, if there are others. Waits in line for
        it; unblocked by answers, joins and recoveries. Raises ServiceUnavailableError where none is well
        after patience_s."""
        waiter = _Waiter(tried)
        self._waiting[name].append(waiter)
        self.hand_out(name)
        try:
            while not waiter.server.done():
                await asyncio.wait([waiter.server], timeout=self._patience_s)
                if not waiter.server.done() and not self.well(name):
                    raise ServiceUnavailableError(f"waited {self._patience_s:g} s: {self._absence(name)}")
            yield waiter.server.result()
        finally:
            if waiter.server.done():
                await self.release(waiter.server.result())
            else:
                self._waiting[name].remove(waiter)

    def hand_out(self, name: str) -> None:
        """Servers with room to those who wait, in their order."""
        for waiter in list(self._waiting[name]):
            well = self.well(name)
            free = [member for member in well if member.in_hand < member.server.concurrency]
            if not free:
                return
            others = [member for member in well if member not in waiter.tried]
            chosen = [member for member in free if member in others] if others else free
            if chosen:
                member = min(chosen, key=lambda m: (m.in_hand / m.server.concurrency, m.turn))
                member.in_hand += 1
                member.turn = next(self._turns)
                self._waiting[name].remove(waiter)
                waiter.server.set_result(member)

    async def release(self, member: Member) -> None:
        member.in_hand -= 1
        self.hand_out(member.server.name)
        if member.has_left and not member.in_hand:
            await member.client.close()

    def _absence(self, name: str) -> str:
        causes = "; ".join(f"{member}: {member.cause}" for member in self.named("reward", name))
        return f"no reward server {name} is well ({causes or 'none is registered'})"
