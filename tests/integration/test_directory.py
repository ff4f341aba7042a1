"""Services that join and leave, over real leases and real gRPC."""
# ruff: noqa: N802 gRPC gives the methods their names

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from logging.handlers import QueueHandler
from pathlib import Path
from unittest.mock import AsyncMock, call

import grpc
import pytest

from atoll.coordinator.assembly import Assembly
from atoll.coordinator.control import RunControl
from atoll.coordinator.fleet.agent_hosts import AgentHosts
from atoll.coordinator.fleet.directory import ServiceDirectory, TrainerLostError
from atoll.coordinator.fleet.gateways import Gateways
from atoll.coordinator.fleet.registry import Registry
from atoll.coordinator.fleet.replicas import Replica, Replicas, ReplicaState
from atoll.coordinator.rewards.registration import RegistrationRules
from atoll.coordinator.rewards.rewards import Rewards
from atoll.coordinator.rewards.servers import Servers
from atoll.external.addresses import AddressPolicy
from atoll.external.protocols import connect
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.runtime.server import Server
from atoll.runtime.store import Store
from atoll.wire.types import ServiceEntry, Version
from atoll.wire.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from tests.builders import run_config
from tests.tokens import CALLER, TOKEN

Log = asyncio.Queue[logging.LogRecord]


class SlowToDescribe(rollout_pb2_grpc.RolloutServicer):
    def __init__(self, too_late: int = 0) -> None:
        """The first `too_late` answers do not come in time."""
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()
        self._too_late = too_late
        self.num_asked = 0

    async def Info(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.set()
        self.num_asked += 1
        await self.may_answer.wait()
        if self._too_late > 0:
            self._too_late -= 1
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED)
        return rollout_pb2.RolloutInfoReply(slots=1)


class OneOfEach(trainer_pb2_grpc.TrainerServicer):
    async def Info(self, request, context):  # type: ignore[no-untyped-def]
        return trainer_pb2.TrainerInfoReply(roles=["actor", "reference"])


@asynccontextmanager
async def serving(servicer: SlowToDescribe | OneOfEach) -> AsyncIterator[str]:
    def add(server: grpc.aio.Server) -> None:
        if isinstance(servicer, OneOfEach):
            trainer_pb2_grpc.add_TrainerServicer_to_server(servicer, server)
        else:
            rollout_pb2_grpc.add_RolloutServicer_to_server(servicer, server)

    server = await Server.start(
        "atoll.v1.Rollout",
        add,
        host="127.0.0.1",
        port=0,
        token=TOKEN,
        setting="--port",
    )
    yield server.address
    await server.stop(0)


@pytest.fixture
async def log(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Log]:
    """What the membership logs."""
    records: Log = asyncio.Queue()
    logger, handler = logging.getLogger("atoll.coordinator.fleet.directory"), QueueHandler(records)
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def directory(registry: Registry, replicas: Replicas, tell: AsyncMock | None = None) -> ServiceDirectory:
    return ServiceDirectory(
        registry,
        replicas,
        Rewards(0),
        AgentHosts(),
        Gateways(),
        CALLER,
        60,
        NobodyGenerates(),
        "actor",
        tell or AsyncMock(),
    )


async def logged(log: Log, text: str) -> None:
    async with asyncio.timeout(30):
        while text not in (await log.get()).getMessage():
            pass


async def lapse(store: Store, registry: Registry, membership: ServiceDirectory, entry: ServiceEntry) -> None:
    """Its heartbeats stay out for a lease while its connection is held."""
    await asyncio.wait_for(membership._lifelines[entry].held.wait(), 30)
    words = (entry.name, entry.incarnation, entry.role, entry.address)
    await store.read("ZADD", "leases", 1, " ".join(words))
    await registry._touch()


async def test_a_replica_that_answers_after_it_was_replaced_stays_away(store: Store, log: Log) -> None:
    """Nobody would see it leave, and its successor would be lost for good."""
    registry, replicas = Registry(store, lease_s=60), Replicas(CALLER, 60)

    membership = directory(registry, replicas)

    async def logged(text: str) -> None:
        async with asyncio.timeout(30):
            while text not in (await log.get()).getMessage():
                pass

    older, newer = SlowToDescribe(), SlowToDescribe()
    newer.may_answer.set()
    async with serving(older) as old_address, serving(newer) as new_address:
        following = asyncio.create_task(membership.follow())
        old = ServiceEntry("rollout", "rollout-0", "0001-a", old_address)
        new = ServiceEntry("rollout", "rollout-0", "0002-b", new_address)
        await registry.register(old)
        await asyncio.wait_for(older.asked.wait(), 30)
        await registry.register(new)
        await logged(f"rollout-0 joins at {new_address}")
        older.may_answer.set()
        await logged(old_address)
        following.cancel()
    assert [(replica.entry, replica.state) for replica in replicas._all.values()] == [
        (new, ReplicaState.UNHEALTHY)
    ]
    assert list(membership._clients) == [new]


async def test_a_replica_that_is_too_busy_to_answer_is_asked_again(
    store: Store, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays registered, so it never joins anew."""
    monkeypatch.setattr("atoll.coordinator.fleet.directory.RETRY_S", 0.01)
    registry, replicas = Registry(store, lease_s=60), Replicas(CALLER, 60)

    membership = directory(registry, replicas)
    busy = SlowToDescribe(too_late=2)
    busy.may_answer.set()
    async with serving(busy) as address:
        following = asyncio.create_task(membership.follow())
        await registry.register(ServiceEntry("rollout", "rollout-0", "0001-a", address))
        async with asyncio.timeout(30):
            messages = [(await log.get()).getMessage() for _ in range(2)]
        following.cancel()
    assert busy.num_asked == 3
    assert "cannot be used" in messages[0]  # said once
    assert messages[1] == f"rollout-0 joins at {address}"


async def test_a_second_trainer_of_a_role_is_kept_out_until_the_first_leaves(
    store: Store, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights were never trained."""
    monkeypatch.setattr("atoll.coordinator.fleet.directory.RETRY_S", 0.01)
    registry, rewards = Registry(store, lease_s=60), Rewards(0)
    membership = ServiceDirectory(
        registry,
        Replicas(CALLER, 60),
        rewards,
        AgentHosts(),
        Gateways(),
        CALLER,
        60,
        NobodyGenerates(),
        "actor",
        AsyncMock(),
    )

    async def logged() -> str:
        async with asyncio.timeout(30):
            return (await log.get()).getMessage()

    async with serving(OneOfEach()) as first_address, serving(OneOfEach()) as second_address:
        following = asyncio.create_task(membership.follow())
        first = ServiceEntry("actor", "actor", "0001-a", first_address)
        second = ServiceEntry("actor", "spare", "0002-b", second_address)
        await registry.register(first)
        assert await logged() == f"actor joins at {first_address}"
        client = membership.model("actor")
        await registry.register(second)
        assert f"actor at {first_address} is already the run's" in await logged()
        assert membership.model("actor") is client
        assert set(membership.models) == {"actor", "reference"}
        await registry.deregister(first)
        assert await logged() == "actor leaves"
        assert await logged() == f"spare joins at {second_address}"
        assert membership.model("actor").address == second_address
        following.cancel()


async def test_a_service_that_does_not_fit_ends_the_run_only_before_it_has_begun(
    store: Store, log: Log
) -> None:
    class Misfit(OneOfEach):
        async def Info(self, request, context):  # type: ignore[no-untyped-def]
            raise UserError("this is no actor of yours")

    async def logged(text: str) -> None:
        async with asyncio.timeout(30):
            while text not in (await log.get()).getMessage():
                pass

    registry = Registry(store, lease_s=60)
    membership = directory(registry, Replicas(CALLER, 60))
    async with serving(Misfit()) as bad_address, serving(OneOfEach()) as good_address:
        following = asyncio.create_task(membership.follow())
        stray = ServiceEntry("actor", "stray", "0001-a", bad_address)
        await registry.register(stray)
        with pytest.raises(UserError, match=r"stray: .*this is no actor of yours"):
            await membership.wait_for({"actor": 1}, 60)
        await registry.deregister(stray)
        await logged("stray leaves")
        await registry.register(ServiceEntry("actor", "actor", "0002-b", good_address))
        await membership.wait_for({"actor": 1}, 60)
        await registry.register(ServiceEntry("actor", "stray", "0003-c", bad_address))
        await logged("stray is registered")
        with pytest.raises(ServiceUnavailableError, match="missing: 1 x actor; stray was refused: "):
            await membership.wait_for({"actor": 2}, 0.01)
        assert not following.done()
        following.cancel()


async def test_a_service_whose_process_ends_is_lost_at_once_and_its_successor_is_not(
    store: Store, log: Log
) -> None:
    registry, replicas = Registry(store, lease_s=3600), Replicas(CALLER, 60)
    membership = directory(registry, replicas)
    replica, trainer = SlowToDescribe(), OneOfEach()
    replica.may_answer.set()
    following = asyncio.create_task(membership.follow())
    async with serving(replica) as address, serving(trainer) as trainer_address:
        await registry.register(ServiceEntry("rollout", "rollout-0", "0001-a", address))
        await registry.register(ServiceEntry("actor", "actor", "0001-b", trainer_address))
        await membership.wait_for({"actor": 1}, 60)
        await logged(log, f"rollout-0 joins at {address}")
    await logged(log, "rollout-0 leaves")
    with pytest.raises(TrainerLostError, match="actor was lost"):
        await asyncio.wait_for(membership.watch_trainers(), 30)
    assert (registry.services(), replicas.everyone, membership.models) == ((), [], {})
    async with serving(replica) as address:
        await registry.register(ServiceEntry("rollout", "rollout-0", "0002-c", address))
        await logged(log, f"rollout-0 joins at {address}")
        await registry.deregister(ServiceEntry("rollout", "rollout-0", "0001-a", address))
        await membership.wait_for({"actor": 0}, 60)
        assert [member.entry.incarnation for member in replicas.everyone] == ["0002-c"]
    following.cancel()


async def test_a_trainer_that_only_stands_still_is_lost_once_another_takes_its_role(
    store: Store, log: Log
) -> None:
    """Its lease ends, but its weights are there, and so are its calls in progress."""
    registry = Registry(store, lease_s=3600)
    tell = AsyncMock()
    membership = directory(registry, Replicas(CALLER, 60), tell)
    following = asyncio.create_task(membership.follow())
    lost = asyncio.create_task(membership.watch_trainers())
    async with serving(OneOfEach()) as address, serving(OneOfEach()) as other_address:
        actor = ServiceEntry("actor", "actor", "0001-a", address)
        await registry.register(actor)
        await membership.wait_for({"actor": 1}, 60)
        client = membership.model("actor")
        for _ in range(2):
            await lapse(store, registry, membership, actor)
            await logged(log, "actor sends no heartbeats")
            assert not await registry.renew(actor)
            await registry.register(actor)
            await logged(log, "actor is back, with all that it had")
        assert membership.model("actor") is client
        waits = call("actor sends no heartbeats but keeps its connection: the run waits for it")
        assert tell.await_args_list == [waits, call("")] * 2
        assert not lost.done()
        await lapse(store, registry, membership, actor)
        await logged(log, "actor sends no heartbeats")
        with pytest.raises(TrainerLostError, match="actor was lost"):
            await membership.watch_trainers(or_absent=True)  # as after a call that failed
        await registry.register(ServiceEntry("actor", "spare", "0002-b", other_address))
        await logged(log, f"spare joins at {other_address}")
        assert membership.model("actor").address == other_address
        with pytest.raises(TrainerLostError, match="actor was lost"):
            await lost
    following.cancel()


async def test_a_trainer_that_stands_still_and_then_dies_is_lost(store: Store, log: Log) -> None:
    registry = Registry(store, lease_s=3600)
    membership = directory(registry, Replicas(CALLER, 60))
    following = asyncio.create_task(membership.follow())
    async with serving(OneOfEach()) as address:
        actor = ServiceEntry("actor", "actor", "0001-a", address)
        await registry.register(actor)
        await membership.wait_for({"actor": 1}, 60)
        await lapse(store, registry, membership, actor)
        await logged(log, "actor sends no heartbeats")
    with pytest.raises(TrainerLostError, match="actor was lost"):
        await asyncio.wait_for(membership.watch_trainers(), 30)
    assert membership.models == {}
    following.cancel()


class NobodyGenerates:
    async def may_generate(self, replica: Replica) -> bool:
        return True

    async def catch_up(self, replica: Replica) -> None:
        raise AssertionError(f"{replica} generates")


async def test_a_push_that_begins_while_the_actor_is_away_has_lost_a_trainer(
    store: Store, tmp_path: Path
) -> None:
    """A replica may ask for one then: the run goes on once the actor is back."""
    config = run_config(
        run={"dir": tmp_path}, model={"path": tmp_path}, reward={"graders": [{"name": "exact_match"}]}
    )
    control = RunControl(trains=True)
    servers = Servers(
        store,
        RegistrationRules((), AddressPolicy(), ()),
        wait_timeout_s=1.0,
        changed=control.report,
        connect=connect,
    )
    registry = Registry(store, lease_s=60)
    assembly = Assembly(config, store, registry, servers, control, CALLER)
    assert assembly._sync is not None
    with pytest.raises(ServiceUnavailableError, match="the actor was lost"):
        await assembly._sync.push(Version("a3f0", 1))
