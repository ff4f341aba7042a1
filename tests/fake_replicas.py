"""Generation over peers of a test's own: whatever has a replica's `generate` and `abort`."""

from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.runtime.clients.base import Caller
from atoll.wire.types import Graded, ScoreItem, ServiceEntry, Version
from tests.builders import generation_without_agents
from tests.fake_rewards import rewards_of

V3 = Version("run", 3)  # that all of them have committed
VOCAB_SIZE = 50
SAMPLE_TIMEOUT_S = 600.0


class AllRight:
    """A reward service."""

    async def verdicts(self, items: Sequence[ScoreItem]) -> AsyncGenerator[list[Graded], None]:
        yield [Graded(item.id, 1.0, {}) for item in items]


class Fleet:
    """rollout-0, rollout-1, ...: each has half as much room as the one before, so the first gets all groups
    for as long as it is routed."""

    def __init__(self, *peers: Any, graders: object = None) -> None:
        self.replicas = Replicas(Caller(), 5.0)
        self.members = [
            Replica(
                ServiceEntry("rollout", f"rollout-{number}", "1", ""),
                peer,
                SimpleNamespace(slots=64 >> number, vocab_size=VOCAB_SIZE, route_shape=(2, 3)),  # type: ignore[arg-type]
                V3,
            )
            for number, peer in enumerate(peers)
        ]
        rewards = rewards_of(graders or AllRight())
        self.generation = generation_without_agents(
            self.replicas,
            rewards,
            model="actor",
            max_attempts=3,
            sample_timeout_s=SAMPLE_TIMEOUT_S,
            timeout_s=100.0,
        )

    async def route_all(self) -> None:
        for member in self.members:
            await self.replicas.route(member)
