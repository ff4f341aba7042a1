"""Clients for registered services: connects to those that join and drops those that leave."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack

from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.health import RETRY_S, HealthWatch, WeightProvider
from atoll.coordinator.fleet.lifeline import Lifeline
from atoll.coordinator.fleet.registry import Registry, ServiceJoined, ServiceLeft
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.rewards.rewards import Rewards
from atoll.runtime.clients.agents import AgentsClient
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.gateway import GatewayClient
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.clients.trainer import TrainerClient
from atoll.runtime.errors import AtollError, ServiceUnavailableError, UserError
from atoll.wire.types import ServiceEntry

log = logging.getLogger(__name__)

Trainer = dict[str, TrainerClient]  # by role: one service may hold several


class TrainerLostError(ServiceUnavailableError):
    """A trainer is lost, with all updates since the last checkpoint."""


class ServiceDirectory:
    """Connects to services and closes their clients.

    A replica's way into the run: `follow` hears of it, `_join` connects, and it is unhealthy until its Health
    has seen it generate; then `weights.catch_up` holds it, gives it the current version and routes to it.
    """

    def __init__(
        self,
        registry: Registry,
        replicas: Replicas,
        rewards: Rewards,
        agent_hosts: AgentHosts,
        gateways: Gateways,
        caller: Caller,
        request_timeout_s: float,
        weights: WeightProvider,
        model: str,
        tell: Callable[[str], Awaitable[None]],
    ) -> None:
        """`tell` gets a note on the trainer that the run waits for, "" once that has passed."""
        self._registry = registry
        self._replicas = replicas
        self._rewards = rewards
        self._agent_hosts = agent_hosts
        self._gateways = gateways
        self._caller = caller
        self._timeout_s = request_timeout_s
        self._weights = weights
        self._health = HealthWatch(replicas, model, weights, listener=self)
        self._tell = tell
        self._connecting: set[ServiceEntry] = set()
        self._unseen: set[ServiceEntry] = set()  # replicas that have not generated yet
        self._draining: set[ServiceEntry] = set()
        self._clients: dict[ServiceEntry, RewardClient | Replica | AgentsClient | GatewayClient] = {}
        self._trainers: dict[ServiceEntry, Trainer] = {}
        self._absent: set[ServiceEntry] = set()  # suspended trainers whose leases have ended
        self._lifelines: dict[ServiceEntry, Lifeline] = {}
        self._holding: dict[ServiceEntry, asyncio.Task[None]] = {}  # of lifelines
        self._changed = asyncio.Condition()
        self._lost = ""  # the last trainer that left since `reconnect`
        self._refused: dict[ServiceEntry, str] = {}  # services that do not fit the run, and why
        self._is_complete = False  # all required services have joined

    @property
    def models(self) -> Trainer:
        """The trainers' clients by role."""
        return {role: client for trainer in self._trainers.values() for role, client in trainer.items()}

    def model(self, role: str) -> TrainerClient:
        """Raises TrainerLostError if it is not there, as until it rejoins."""
        models = self.models
        if role not in models:
            raise TrainerLostError(f"the {role} was lost")
        return models[role]

    async def follow(self) -> None:
        """Consumes joins and leaves; waits for the registry; ends only with an error."""
        async with asyncio.TaskGroup() as joining:
            async for change in self._registry.changes():
                if isinstance(change, ServiceJoined):
                    joining.create_task(self._join(change.entry, joining))
                else:
                    await self._leave(change)

    def needed(self, expected: Mapping[str, int]) -> Mapping[str, int]:
        """How many services of each role the run needs. Once it was complete, one of each is enough:
        operators may have scaled it down since.
        """
        return dict.fromkeys(expected, 1) if self._is_complete else expected

    async def wait_for(self, expected: Mapping[str, int], timeout_s: float) -> None:
        """Waits until that many services of each role are connected. Raises ServiceUnavailableError, and
        UserError if a service of a missing role does not fit the run and the set was never complete."""

        def missing() -> dict[str, int]:
            ready = self._clients.keys() - self._unseen - self._draining
            there = [*(entry.role for entry in ready), *self.models]
            counts = {role: number - there.count(role) for role, number in expected.items()}
            return {role: number for role, number in counts.items() if number > 0}

        def misfits() -> list[str]:
            refused = {} if self._is_complete else self._refused
            return [f"{entry.name}: {why}" for entry, why in refused.items() if entry.role in missing()]

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: misfits() or not missing())
        except TimeoutError:
            numbers = ", ".join(f"{number} x {role}" for role, number in missing().items())
            refused = "".join(f"; {entry.name} was refused: {why}" for entry, why in self._refused.items())
            raise ServiceUnavailableError(
                f"after {timeout_s:g} s (coordinator.start_timeout_s) still missing: {numbers}{refused}; "
                "see the logs of these services"
            ) from None
        if reasons := misfits():
            raise UserError("; ".join(reasons))
        self._is_complete = True

    async def drain(self, entry: ServiceEntry) -> None:
        """Gives the service no new work, nor weights; returns once none is in progress there. Trainers are
        the loop's: they return at once."""
        self._draining.add(entry)
        match self._clients.get(entry):
            case Replica() as replica:
                await self._replicas.drain(replica)
                await self._weights.wait_for_push()
            case RewardClient() as reward:
                await self._rewards.drain(reward)
            case GatewayClient() as gateway:
                await self._gateways.drain(gateway)
            case AgentsClient() as host:
                await self._agent_hosts.drain(host)

    async def watch_trainers(self, *, or_absent: bool = False) -> None:
        """Raises TrainerLostError once a trainer is lost, or has been lost since `reconnect`; if `or_absent`,
        also if one is absent.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._lost or (or_absent and self._absent))
        raise TrainerLostError(f"{self._lost or min(entry.name for entry in self._absent)} was lost")

    async def reconnect(self) -> None:
        """Creates new clients for all current trainers; those that are absent are lost.

        Old clients are closed, so that calls of an aborted step reach no trainer, and pending responses are
        discarded.
        """
        for entry in [*self._absent]:
            await self._lose_trainer(entry)
        self._lost, old = "", list(self._trainers.values())
        for entry, trainer in self._trainers.items():
            self._trainers[entry] = {role: self._client(entry, role) for role in trainer}
        for trainer in old:
            await _close(trainer)

    async def _join(self, entry: ServiceEntry, tasks: asyncio.TaskGroup) -> None:
        """Connects to a service; watches a replica's health until it leaves."""
        if entry in self._absent:
            self._absent.discard(entry)
            log.info("%s is back, with all that it had", entry.name)
            await self._tell("")
            return
        if entry in self._connecting:
            return  # its lease lapsed and it came back during the call
        self._connecting.add(entry)
        try:
            is_there = await self._connect_once_it_answers(entry)
        finally:
            self._connecting.discard(entry)
        if not is_there:
            return
        self._lifelines[entry] = Lifeline(entry.address)
        self._holding[entry] = tasks.create_task(self._hold(entry, self._lifelines[entry]))
        log.info("%s joins at %s", entry.name, entry.address)
        await self._notify()
        if isinstance(replica := self._clients.get(entry), Replica):
            await self._health.watch(replica)

    async def _hold(self, entry: ServiceEntry, lifeline: Lifeline) -> None:
        """Ends the lease of a service whose process is gone, or whose host does not answer. A trainer's host
        may be silent until the lease ends, since a loss costs the steps since the last checkpoint.
        """

        def is_patient() -> bool:
            return entry in self._trainers and entry not in self._absent

        why = await lifeline.wait_for_loss(is_patient)
        log.warning("%s at %s is lost: %s", entry.name, entry.address, why)
        if entry in self._absent:
            await self._lose_trainer(entry)
        else:
            await self._registry.deregister(entry)

    async def _connect_once_it_answers(self, entry: ServiceEntry) -> bool:
        """False if it does not answer while registered: it may be busy, its lease may outlive its process, or
        its role may be taken. One that does not fit the run is not retried.
        """
        told = ""
        while entry in self._registry.services() and entry not in self._draining:
            try:
                await self._connect(entry)
                return True
            except AtollError as error:
                if str(error) != told:
                    told = str(error)
                    log.warning(
                        "%s is registered at %s and cannot be used: %s", entry.name, entry.address, told
                    )
                if isinstance(error, UserError):
                    await self._refuse(entry, error)
                if not isinstance(error, ServiceUnavailableError):
                    return False
            await asyncio.sleep(RETRY_S)
        return False

    async def on_refused(self, replica: Replica, error: UserError) -> None:
        await self._refuse(replica.entry, error)

    async def _refuse(self, entry: ServiceEntry, error: UserError) -> None:
        self._refused[entry] = str(error)
        await self._notify()

    async def on_admitted(self, replica: Replica) -> None:
        self._unseen.discard(replica.entry)
        self._refused.pop(replica.entry, None)
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _connect(self, entry: ServiceEntry) -> None:
        async with AsyncExitStack() as undo:
            match entry.role:
                case "reward":
                    reward = RewardClient(entry.address, self._caller)
                    undo.push_async_callback(reward.close)
                    info = await reward.describe()
                    self._check_is_there(entry)
                    self._rewards.add(reward, info.max_queued)
                    self._clients[entry] = reward
                case "gateway":
                    gateway = GatewayClient(entry.address, self._caller)
                    undo.push_async_callback(gateway.close)
                    await gateway.info()
                    self._check_is_there(entry)
                    self._gateways.add(entry.name, gateway)
                    self._clients[entry] = gateway
                case "agents":
                    host = AgentsClient(entry.address, self._caller)
                    undo.push_async_callback(host.close)
                    concurrency = (await host.info()).concurrency
                    self._check_is_there(entry)
                    self._agent_hosts.add(host, concurrency)
                    self._clients[entry] = host
                case "rollout":
                    replica = await self._replicas.connect(entry)
                    undo.push_async_callback(replica.client.close)
                    self._check_is_there(entry)
                    self._replicas.suspend(replica, replica.why)
                    self._clients[entry] = replica
                    self._unseen.add(entry)
                case "actor" | "critic" | "cost_critic" | "reference" | "reward_model" | "cost_model":
                    client = self._client(entry, entry.role)
                    undo.push_async_callback(client.close)
                    roles = (await client.info()).roles  # one, or the actor with its reference
                    self._check_is_there(entry)
                    for absent in [other for other in self._absent if {*roles} & {*self._trainers[other]}]:
                        await self._lose_trainer(absent)
                    self._check_is_free({entry.role, *roles})
                    others = {role: self._client(entry, role) for role in roles if role != entry.role}
                    self._trainers[entry] = {entry.role: client, **others}
                case role:
                    raise AtollError(f"no part of a run has the role {role!r}")
            undo.pop_all()

    def _check_is_there(self, entry: ServiceEntry) -> None:
        """Raises ServiceUnavailableError if it left during the call: its leaving would not be seen again, and
        its successor may have joined.
        """
        if entry not in self._registry.services() or entry in self._draining:
            raise ServiceUnavailableError("it left before it answered")

    def _check_is_free(self, roles: Collection[str]) -> None:
        """Raises ServiceUnavailableError if another trainer has one of the roles: a second one would have
        different weights. It can take the role once the first has left.
        """
        for other, trainer in self._trainers.items():
            if taken := [role for role in roles if role in trainer]:
                raise ServiceUnavailableError(
                    f"{other.name} at {other.address} is already the run's {' and '.join(taken)}, expected "
                    "one service for each role: stop one of the two"
                )

    def _client(self, entry: ServiceEntry, role: str) -> TrainerClient:
        return TrainerClient(entry.address, self._caller, self._timeout_s, role)

    async def _leave(self, change: ServiceLeft) -> None:
        """A trainer that keeps its connection is absent: its calls wait, and it is lost only if another one
        takes its role or the connection ends.
        """
        entry, lifeline = change.entry, self._lifelines.get(change.entry)
        if entry in self._trainers and change.lapsed and lifeline and lifeline.held.is_set():
            note = f"{entry.name} sends no heartbeats but keeps its connection: the run waits for it"
            log.warning(note)
            await self._tell(note)
            self._absent.add(entry)
            await self._notify()
            return
        log.info("%s leaves", entry.name)
        self._refused.pop(entry, None)
        self._draining.discard(entry)
        if entry in self._trainers:
            await self._lose_trainer(entry)
        self._let_go(entry)
        match self._clients.pop(entry, None):
            case Replica() as replica:
                self._unseen.discard(entry)
                self._replicas.lose(replica, "its lease ended")
                await replica.client.close()
            case RewardClient() as reward:
                self._rewards.remove(reward)
                await reward.close()
            case GatewayClient() as gateway:
                self._gateways.remove(gateway)
                await gateway.close()
            case AgentsClient() as host:
                self._agent_hosts.remove(host)
                await host.close()

    async def _lose_trainer(self, entry: ServiceEntry) -> None:
        self._absent.discard(entry)
        await self._tell("")
        await _close(self._trainers.pop(entry))
        self._lost = entry.name
        await self._notify()
        self._let_go(entry)

    def _let_go(self, entry: ServiceEntry) -> None:
        self._lifelines.pop(entry, None)
        if holding := self._holding.pop(entry, None):
            holding.cancel()


async def _close(trainer: Trainer) -> None:
    for client in trainer.values():
        await client.close()
