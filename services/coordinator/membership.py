"""The registry's services as clients: who joins is connected, who leaves gets no more calls."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from services.coordinator.registry import Joined, Registry
from services.coordinator.replicas import Replica, Replicas
from services.coordinator.rewards import Rewards
from services.runtime.clients import Caller, RewardClient, TrainerClient
from services.runtime.errors import AtollError, ServiceUnavailableError, UserError
from services.wire.types import ServiceEntry

log = logging.getLogger(__name__)


class Membership:
    """`admit` brings a replica that joined up to the current weights before it gets work."""

    def __init__(
        self,
        registry: Registry,
        replicas: Replicas,
        rewards: Rewards,
        caller: Caller,
        request_timeout_s: float,
        admit: Callable[[Replica], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._replicas = replicas
        self._rewards = rewards
        self._caller = caller
        self._timeout_s = request_timeout_s
        self._admit = admit
        self._clients: dict[ServiceEntry, RewardClient | TrainerClient | Replica] = {}
        self.models: dict[str, TrainerClient] = {}  # one service may hold several roles
        self._changed = asyncio.Condition()

    async def follow(self) -> None:
        """Consumes joins and leaves; waits for the registry; ends by an error only."""
        async with asyncio.TaskGroup() as joining:
            async for change in self._registry.changes():
                if isinstance(change, Joined):
                    joining.create_task(self._join(change.entry))
                else:
                    await self._leave(change.entry)

    async def wait_for(self, expected: Mapping[str, int], timeout_s: float) -> None:
        """Returns once that many services of each role are connected. Raises ServiceUnavailableError."""

        def missing() -> str:
            others = [entry.role for entry in self._clients if entry.role not in self.models]
            there = [*others, *self.models]
            counts = {role: number - there.count(role) for role, number in expected.items()}
            return ", ".join(f"{number} x {role}" for role, number in counts.items() if number > 0)

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: not missing())
        except TimeoutError:
            raise ServiceUnavailableError(
                f"after {timeout_s:g} s still missing: {missing()}; see logs/*.log of the run"
            ) from None

    async def _join(self, entry: ServiceEntry) -> None:
        """Connects to a service that answers; a lease may outlive its process."""
        try:
            client = await self._connect(entry)
        except UserError:
            raise  # it serves another model: the config is wrong, not the service
        except AtollError as error:
            log.warning("%s is registered at %s and cannot be used: %s", entry.name, entry.address, error)
            return
        log.info("%s joins at %s", entry.name, entry.address)
        self._clients[entry] = client
        async with self._changed:
            self._changed.notify_all()

    async def _connect(self, entry: ServiceEntry) -> RewardClient | TrainerClient | Replica:
        match entry.role:
            case "reward":
                reward = RewardClient(entry.address, self._caller)
                await reward.describe()
                self._rewards.add(reward)
                return reward
            case "rollout":
                replica = await self._replicas.connect(entry)
                await self._admit(replica)
                return replica
            case "actor" | "critic" | "cost_critic" | "reference" | "reward_model" | "cost_model":
                model = TrainerClient(entry.address, self._caller, self._timeout_s, entry.role)
                for role in (await model.info()).roles:  # one, or the actor with its reference
                    if role == entry.role:
                        self.models[role] = model
                    else:
                        self.models[role] = TrainerClient(entry.address, self._caller, self._timeout_s, role)
                return model
            case role:
                raise AtollError(f"no part of a run has the role {role!r}")

    async def _leave(self, entry: ServiceEntry) -> None:
        log.info("%s leaves", entry.name)
        client = self._clients.pop(entry, None)
        match client:
            case Replica():
                self._replicas.lose(client, "its lease ended")
                await client.client.close()
            case RewardClient():
                self._rewards.remove(client)
                await client.close()
            case TrainerClient():
                raise ServiceUnavailableError(f"{entry.name} is gone; see its log")
