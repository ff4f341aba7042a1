"""External servers that stand in a dict, by URL, and do as they are told; for a virtual clock."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from atoll.coordinator.rewards.registration import RegistrationRules
from atoll.coordinator.rewards.servers import Servers
from atoll.external.addresses import AddressPolicy
from atoll.runtime.errors import AtollError
from atoll.wire.types import (
    ExternalServer,
    FinishReason,
    Graded,
    GroupId,
    SampleId,
    ScoreItem,
    Verdict,
)

ADDRESS = "192.0.32.8"


def now() -> float:
    return asyncio.get_running_loop().time()


def item(number: int) -> ScoreItem:
    return ScoreItem(SampleId(GroupId("toy", 0, number), 0), "1+1=", "2", "2", "toy", FinishReason.STOP, 1)


def reward_server(url: str, concurrency: int = 4, name: str = "judge", **settings: Any) -> ExternalServer:
    return ExternalServer("reward", name, url, "http", concurrency=concurrency, **settings)


@dataclass(eq=False)
class Fake:
    """What one URL does. `fails` is what its calls raise, `probe_fails` what its probes raise."""

    seconds: float = 1.0  # of a call
    value: float = 1.0
    fails: Exception | None = None
    probe_fails: AtollError | None = None
    calls: list[float] = field(default_factory=list)  # when each began
    probes: list[float] = field(default_factory=list)
    in_hand: int = 0
    peak: int = 0
    num_clients: int = 0  # that are not closed
    token: str | None = None


@dataclass(eq=False)
class FakeClient:
    server: ExternalServer
    fake: Fake
    is_closed: bool = False

    async def probe(self) -> str:
        self.fake.probes.append(now())
        await asyncio.sleep(0.01)
        if self.fake.probe_fails:
            raise self.fake.probe_fails
        return "a fake"

    async def score(self, items: Sequence[ScoreItem]) -> list[Verdict]:
        assert not self.is_closed
        fake = self.fake
        fake.calls.append(now())
        fake.in_hand += 1
        fake.peak = max(fake.peak, fake.in_hand)
        try:
            await asyncio.sleep(0.0 if fake.fails else fake.seconds)
            if fake.fails:
                raise fake.fails
            return [Graded(item.id, fake.value, {"tone": 0.5}, {"tone": "flat: no joke"}) for item in items]
        finally:
            fake.in_hand -= 1

    async def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.fake.num_clients -= 1
        await asyncio.sleep(0.01)


class FakeStore:
    """The one hash that servers are kept in."""

    def __init__(self) -> None:
        self.servers: dict[str, bytes] = {}
        self.seconds = 0.0  # of a write

    async def write(self, script: Any, keys: Sequence[str], *args: Any) -> None:
        assert list(keys) == ["servers"]
        await asyncio.sleep(self.seconds)
        if "HSET" in script.body:
            self.servers[args[0]] = args[1]
        elif "HDEL" in script.body:
            self.servers.pop(args[0], None)
        else:
            self.servers.clear()

    async def read(self, command: str, key: str) -> list[bytes]:
        assert (command, key) == ("HVALS", "servers")
        return list(self.servers.values())


class Everywhere(AddressPolicy):
    """Each server has an address that may be called; nothing is looked up."""

    async def locate(self, server: ExternalServer) -> str:
        return ADDRESS


class World:
    """A run with the graders server:judge and server:style, and all servers that there are."""

    def __init__(self, **fakes: Fake) -> None:
        self.fakes = fakes
        self.store = FakeStore()
        self.changes = 0
        self.servers = Servers(
            self.store,  # type: ignore[arg-type]
            RegistrationRules(("judge", "style"), Everywhere(), secrets=("JUDGE_*",)),
            wait_timeout_s=100.0,
            changed=self._changed,
            connect=self.connect,
        )

    async def _changed(self) -> None:
        self.changes += 1

    def connect(self, server: ExternalServer, token: str | None) -> FakeClient:
        fake = self.fakes[server.url]
        fake.token = token
        fake.num_clients += 1
        return FakeClient(server, fake)

    def unhealthy(self) -> dict[str, str]:
        """Causes by URL."""
        return {health.server.url: health.cause for health in self.servers.health() if not health.healthy}


@asynccontextmanager
async def watched(world: World, *registered: ExternalServer) -> AsyncIterator[World]:
    watching = asyncio.create_task(world.servers.watch())
    for server in registered:
        await world.servers.add(server)
    yield world
    watching.cancel()
