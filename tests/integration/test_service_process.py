"""`run_service` in a process of its own, against a real coordinator servicer and store."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.coordinator.control import RunControl
from atoll.coordinator.fleet.registry import Registry, ServiceJoined, ServiceLeft
from atoll.coordinator.service import OPERATORS_MAY, CoordinatorService
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.coordinator import CoordinatorClient
from atoll.runtime.clients.reward import RewardClient
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.errors import StaleFenceError, UnauthenticatedError, UserError
from atoll.runtime.process import EXIT_RESTARTS_EXHAUSTED
from atoll.runtime.server import Server, TokenGrant
from atoll.runtime.store import EmbeddedServer, Store
from atoll.wire.types import PauseMode, ServiceEntry
from tests.tokens import TOKEN

# A reward service that answers Describe with its incarnation and can be paused; config's run.seed 13
# refuses to build, 14 has a bug, 15 breaks at the first call, of 16 the engine dies at the first call,
# of 17 it does not start.
NO_SERVERS = SimpleNamespace(health=tuple)

PROGRAM = """
import asyncio
from atoll.runtime.errors import EngineDiedError, UserError
from atoll.runtime.process import run_service
from atoll.wire.v1 import reward_pb2, reward_pb2_grpc, rollout_pb2, rollout_pb2_grpc

class Obeys(rollout_pb2_grpc.RolloutServicer):
    async def Pause(self, request, context): return rollout_pb2.PauseReply()

class Fake(reward_pb2_grpc.RewardServicer):
    def __init__(self, context):
        self.incarnation = context.incarnation
        self.death = {15: KeyError("broken"), 16: EngineDiedError("no engine")}.get(context.config.run.seed)
        self.called = asyncio.Event()
    def add_to(self, server):
        reward_pb2_grpc.add_RewardServicer_to_server(self, server)
        rollout_pb2_grpc.add_RolloutServicer_to_server(Obeys(), server)
    async def Describe(self, request, context):
        self.called.set()
        return reward_pb2.DescribeReply(graders=[self.incarnation])
    async def wait_for_failure(self):
        await self.called.wait()
        if self.death is not None: raise self.death
        await asyncio.Event().wait()
    async def close(self): print("closed", flush=True)

async def build(context):
    if context.config.run.seed == 13: raise UserError("model.path: no such folder")
    if context.config.run.seed == 17: raise EngineDiedError("no engine")
    if context.config.run.seed == 14: raise KeyError("a bug")
    return Fake(context)

run_service("reward", build)
"""

Start = Callable[..., Awaitable[tuple[Process, str]]]


def config_file(folder: Path, seed: int, **coordinator: float) -> Path:
    tree = {
        "run": {"name": "toy", "steps": 1, "seed": seed},
        "model": {"path": "model"},
        "data": {"train": [{"path": "rows.jsonl"}]},
        "rollout": {"max_restarts": 1},
        "coordinator": coordinator,
    }
    path = folder / f"config-{seed}.json"
    path.write_text(json.dumps(tree))
    return path


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts the program; returns its process and the line of its readiness pipe."""
    started: list[Process] = []

    async def start(
        *arguments: str, seed: int = 0, token: str | None = TOKEN, **settings: float
    ) -> tuple[Process, str]:
        read_end, write_end = os.pipe()
        ready = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(ready), os.fdopen(read_end, "rb")
        )
        without = {name: value for name, value in os.environ.items() if name != "ATOLL_TOKEN"}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, "--config", str(config_file(tmp_path, seed, **settings))),
            *("--name", "reward-0", "--ready-fd", str(write_end), *arguments),
            pass_fds=[write_end],
            stdout=PIPE,
            stderr=PIPE,
            env=without | ({} if token is None else {"ATOLL_TOKEN": token}),
        )
        os.close(write_end)
        started.append(process)
        return process, (await asyncio.wait_for(ready.readline(), 30)).decode()

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


@asynccontextmanager
async def coordinator(
    registry: Registry, port: int = 0, token: str = TOKEN, control: RunControl | None = None
) -> AsyncIterator[str]:
    server = await Server.start(
        "atoll.v1.Coordinator",
        CoordinatorService("toy", registry, NO_SERVERS, control or RunControl(trains=False)).add_to,
        host="127.0.0.1",
        port=port,
        token=token,
        setting="coordinator.port",
        operators=TokenGrant("operators-token", OPERATORS_MAY),
    )
    yield server.address
    await server.stop(0)


async def next_of(changes: AsyncIterator[ServiceJoined | ServiceLeft]) -> ServiceJoined | ServiceLeft:
    return await asyncio.wait_for(anext(changes), 30)


async def test_a_service_announces_itself_serves_registers_and_leaves_in_order(
    start: Start, store: Store
) -> None:
    registry = Registry(store, lease_s=60)
    async with coordinator(registry) as address:
        process, line = await start("--coordinator", address)
        served_at = json.loads(line)["address"]
        client = RewardClient(served_at, Caller(token=TOKEN), timeout_s=5)
        (incarnation,) = (await client.describe()).graders
        await client.close()
        changes = registry.changes()
        expected = ServiceEntry("reward", "reward-0", incarnation, served_at)
        assert await next_of(changes) == ServiceJoined(expected)
        process.send_signal(signal.SIGTERM)
        assert await next_of(changes) == ServiceLeft(expected)  # long before its lease ends
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, stdout) == (0, b"closed\n")
    assert f"INFO reward-0 atoll.runtime.process: serves reward at {served_at}" in stderr.decode()


async def test_a_service_outlives_its_coordinator_and_registers_with_the_next(
    start: Start, store: Store, store_server: EmbeddedServer
) -> None:
    first = Registry(store, lease_s=1)
    async with coordinator(first) as address:
        process, _ = await start("--coordinator", address)
        assert isinstance(await next_of(first.changes()), ServiceJoined)
    other_store = Store(store_server.url, "another run of the store's keys")
    await other_store.take_epoch()
    second = Registry(other_store, lease_s=1)
    async with coordinator(second, port=int(address.rpartition(":")[2])):
        change = await next_of(second.changes())
    assert isinstance(change, ServiceJoined)
    assert change.entry.name == "reward-0"
    assert process.returncode is None
    await other_store.close()


async def test_a_service_ends_with_its_run(start: Start, store: Store) -> None:
    registry = Registry(store, lease_s=1)
    async with coordinator(registry) as address:
        process, _ = await start("--coordinator", address)
        assert isinstance(await next_of(registry.changes()), ServiceJoined)
        await registry.dismiss()
        assert await store.read("ZCARD", "leases") == 0  # it deregistered before its lease ended
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, stdout) == (0, b"closed\n")
    assert "INFO reward-0 atoll.runtime.lease: the run has ended" in stderr.decode()


class NotingRegistry(Registry):
    """Notes heartbeats."""

    def __init__(self, store: Store, lease_s: float) -> None:
        super().__init__(store, lease_s)
        self.renewed = asyncio.Event()

    async def renew(self, entry: ServiceEntry) -> bool:
        self.renewed.set()
        return await super().renew(entry)


class Busy:
    """A coordinator's departures: services have work until `idle`."""

    def __init__(self) -> None:
        self.control = RunControl(trains=False)
        self.asked, self.idle = asyncio.Event(), asyncio.Event()
        self.control.departures.serve(self.let_go)

    async def let_go(self, entry: ServiceEntry) -> None:
        self.asked.set()
        await self.idle.wait()


@pytest.mark.parametrize("by", ["signal", "operator"])
async def test_a_service_that_leaves_serves_until_its_work_is_done(
    start: Start, store: Store, by: str
) -> None:
    registry, run = NotingRegistry(store, lease_s=1), Busy()
    async with coordinator(registry, control=run.control) as address:
        process, line = await start("--coordinator", address)
        changes = registry.changes()
        assert isinstance(await next_of(changes), ServiceJoined)
        if by == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            operator = CoordinatorClient(address, Caller(token="operators-token"))
            entry, warning = await operator.drain_service("reward-0")
            await operator.close()
            assert (entry.name, warning[:31]) == ("reward-0", "reward-0 is the run's only rewa")
        await asyncio.wait_for(run.asked.wait(), 30)
        registry.renewed.clear()
        await asyncio.wait_for(registry.renewed.wait(), 30)
        client = RewardClient(json.loads(line)["address"], Caller(token=TOKEN), timeout_s=5)
        await client.describe()
        await client.close()
        run.idle.set()
        assert isinstance(await next_of(changes), ServiceLeft)
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def test_a_service_leaves_unfinished_work_behind_when_its_grace_is_over(
    start: Start, store: Store
) -> None:
    registry, run = Registry(store, lease_s=60), Busy()
    async with coordinator(registry, control=run.control) as address:
        process, _ = await start("--coordinator", address, drain_grace_s=0.5)
        changes = registry.changes()
        assert isinstance(await next_of(changes), ServiceJoined)
        process.send_signal(signal.SIGTERM)
        assert isinstance(await next_of(changes), ServiceLeft)
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, run.asked.is_set()) == (0, True)
    assert "leaves after 0.5 s (coordinator.drain_grace_s)" in stderr.decode()


async def test_a_second_signal_ends_a_service_at_once(start: Start, store: Store) -> None:
    registry, run = Registry(store, lease_s=60), Busy()
    async with coordinator(registry, control=run.control) as address:
        process, _ = await start("--coordinator", address)
        assert isinstance(await next_of(registry.changes()), ServiceJoined)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(run.asked.wait(), 30)
        process.send_signal(signal.SIGTERM)
        stdout, _ = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, stdout) == (-signal.SIGTERM, b"")


async def test_a_service_whose_coordinator_is_away_leaves_at_once(start: Start, store: Store) -> None:
    registry = Registry(store, lease_s=60)  # so that it sends no heartbeat in this test
    async with coordinator(registry) as address:
        process, _ = await start("--coordinator", address)
        assert isinstance(await next_of(registry.changes()), ServiceJoined)
    process.send_signal(signal.SIGTERM)
    stdout, stderr = await asyncio.wait_for(process.communicate(), 15)  # less than its grace
    assert (process.returncode, stdout) == (0, b"closed\n")
    assert "leaves after" not in stderr.decode()


async def test_a_service_ends_when_its_coordinator_stays_away(start: Start, store: Store) -> None:
    registry = Registry(store, lease_s=1)
    async with coordinator(registry) as address:
        process, _ = await start("--coordinator", address, away_timeout_s=0.5)
        assert isinstance(await next_of(registry.changes()), ServiceJoined)
    stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, stdout) == (1, b"closed\n")
    told = f"reward-0: no answer from the coordinator at {address} for 0.5 s (coordinator.away_timeout_s)"
    assert stderr.decode().splitlines()[-1].startswith(told)


async def test_a_service_takes_orders_of_the_epoch_that_its_coordinator_has_and_of_no_other(
    start: Start, store: Store
) -> None:
    async with coordinator(Registry(store, lease_s=60)) as address:
        _, line = await start("--coordinator", address)

        async def pause(epoch: int) -> None:
            client = RolloutClient(json.loads(line)["address"], Caller(epoch, TOKEN), timeout_s=30)
            try:
                await client.pause(PauseMode.WAIT)
            finally:
                await client.close()

        with pytest.raises(StaleFenceError, match=f"is over, epoch {store.epoch} has begun"):
            await pause(store.epoch - 1)  # which no other has called before
        for made_up in (store.epoch + 1, 2**62):
            with pytest.raises(StaleFenceError, match=f"has not begun, the coordinator says {store.epoch}"):
                await pause(made_up)
        await pause(store.epoch)


async def test_a_newer_process_of_the_same_name_sends_the_older_one_home(start: Start, store: Store) -> None:
    registry = Registry(store, lease_s=6)  # the older one hears of it by its next heartbeat, within a third
    async with coordinator(registry) as address:
        changes = registry.changes()
        older, _ = await start("--coordinator", address)
        first = await next_of(changes)
        await start("--coordinator", address)
        assert await next_of(changes) == ServiceLeft(first.entry)
        second = await next_of(changes)
        assert second.entry.incarnation != first.entry.incarnation
        _, stderr = await asyncio.wait_for(older.communicate(), 30)
        assert older.returncode == 1
        assert "reward-0 is taken by a process that registered later" in stderr.decode().splitlines()[-1]
        assert registry.services() == (second.entry,)


async def test_a_service_killed_loses_its_lease(start: Start, store: Store) -> None:
    registry = Registry(store, lease_s=1)
    async with coordinator(registry) as address:
        changes = registry.changes()
        process, _ = await start("--coordinator", address)
        joined = await next_of(changes)
        process.kill()
        assert await next_of(changes) == ServiceLeft(joined.entry)


async def test_nothing_is_heard_of_a_service_after_its_goodbye(start: Start, store: Store) -> None:
    """The answer to it takes a lease, in which three heartbeats would come."""

    class Slow(Registry):
        async def deregister(self, entry: ServiceEntry) -> None:
            await super().deregister(entry)
            await asyncio.sleep(1)

    registry = Slow(store, lease_s=1)
    async with coordinator(registry) as address:
        process, _ = await start("--coordinator", address)
        assert isinstance(await next_of(registry.changes()), ServiceJoined)
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert await store.read("ZCARD", "leases") == 0


async def test_what_the_user_can_mend_is_one_message_and_the_rest_a_traceback(start: Start) -> None:
    process, line = await start(seed=13)
    _, stderr = await process.communicate()
    assert (line, process.returncode) == ("", 1)
    assert stderr.decode() == "reward-0: model.path: no such folder\n"
    process, line = await start(seed=14)
    _, stderr = await process.communicate()
    assert (line, process.returncode) == ("", 1)
    assert "Traceback" in stderr.decode()
    assert stderr.decode().endswith("KeyError: 'a bug'\n")
    process, line = await start(seed=17)
    _, stderr = await process.communicate()
    assert (line, process.returncode) == ("", EXIT_RESTARTS_EXHAUSTED)
    assert "engine restart" not in stderr.decode()
    assert stderr.decode().endswith("EngineDiedError: no engine\n")


async def test_a_service_that_breaks_says_goodbye_and_ends_with_a_traceback(
    start: Start, store: Store
) -> None:
    registry = Registry(store, lease_s=60)
    async with coordinator(registry) as address:
        changes = registry.changes()
        process, line = await start("--coordinator", address, seed=15)
        joined = await next_of(changes)
        client = RewardClient(json.loads(line)["address"], Caller(token=TOKEN), timeout_s=5)
        assert len((await client.describe()).graders) == 1
        assert await next_of(changes) == ServiceLeft(joined.entry)  # long before its lease ends
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
        await client.close()
    assert (process.returncode, stdout) == (1, b"closed\n")
    assert "Traceback" in stderr.decode()
    assert stderr.decode().endswith("KeyError: 'broken'\n")


async def test_a_service_whose_engine_dies_is_built_anew_and_joins_as_another_incarnation(
    start: Start, store: Store
) -> None:
    registry = Registry(store, lease_s=60)
    async with coordinator(registry) as address:
        changes = registry.changes()
        process, line = await start("--coordinator", address, seed=16)
        first = await next_of(changes)
        assert first.entry.address == json.loads(line)["address"]
        assert await incarnation_at(first.entry.address) == first.entry.incarnation
        assert await next_of(changes) == ServiceLeft(first.entry)
        second = await next_of(changes)
        assert isinstance(second, ServiceJoined)
        assert (second.entry.name, process.returncode) == ("reward-0", None)
        assert second.entry.incarnation != first.entry.incarnation
        assert await incarnation_at(second.entry.address) == second.entry.incarnation
        assert await next_of(changes) == ServiceLeft(
            second.entry
        )  # one more than rollout.max_restarts allows
        stdout, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, stdout) == (EXIT_RESTARTS_EXHAUSTED, b"closed\nclosed\n")
    assert stderr.decode().count("engine restart 1 of 1: no engine") == 1
    assert stderr.decode().endswith("EngineDiedError: no engine\n")


async def incarnation_at(address: str) -> str:
    client = RewardClient(address, Caller(token=TOKEN), timeout_s=5)
    (incarnation,) = (await client.describe()).graders
    await client.close()
    return incarnation


async def test_a_port_in_use_closes_what_was_built(start: Start, store: Store) -> None:
    async with coordinator(Registry(store, lease_s=60)) as address:
        process, line = await start("--port", address.rpartition(":")[2])
        stdout, stderr = await process.communicate()
    assert (line, process.returncode, stdout) == ("", 1, b"closed\n")
    assert f"cannot listen on {address}" in stderr.decode()
    assert "set --port to a free port, or to 0 for any" in stderr.decode()


async def test_tokens_are_shared_and_never_logged(start: Start, store: Store) -> None:
    registry = Registry(store, lease_s=60)
    async with coordinator(registry, token="right-secret") as address:
        process, _ = await start("--coordinator", address, token="wrong-secret")
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 1
        assert "give caller and service the same ATOLL_TOKEN" in stderr.decode()
        assert "secret" not in stderr.decode()
        process, _ = await start("--coordinator", address, token="right-secret")
        assert isinstance(await next_of(registry.changes()), ServiceJoined)
        process.send_signal(signal.SIGTERM)
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == 0
        assert "secret" not in stderr.decode()


@pytest.mark.parametrize("token", [None, ""])
async def test_a_service_without_a_token_says_what_to_do(start: Start, token: str | None) -> None:
    process, line = await start(token=token)
    _, stderr = await process.communicate()
    assert (line, process.returncode) == ("", 1)
    problem = "is not set: `atoll run` sets" if token is None else "is empty, expected a secret"
    assert f"reward-0: the environment variable ATOLL_TOKEN {problem}" in stderr.decode()
    assert len(stderr.decode().splitlines()) == 1


async def test_operators_cannot_register_services(store: Store) -> None:
    registry = Registry(store, lease_s=60)
    async with coordinator(registry) as address:
        operator = CoordinatorClient(address, Caller(token="operators-token"))
        assert (await operator.status()).run == "toy"
        entry = ServiceEntry("actor", "actor-0", "ffffffffffff", "127.0.0.1:1")
        for call in (operator.register, operator.heartbeat, operator.deregister):
            with pytest.raises(UnauthenticatedError, match="the operators' token is not enough"):
                await call(entry)
        await operator.close()
    assert await store.read("ZRANGE", "leases", 0, -1) == []


async def test_a_run_that_trains_nothing_refuses_to_save_at_once(store: Store) -> None:
    async with coordinator(Registry(store, lease_s=60)) as address:
        client = CoordinatorClient(address, Caller(token=TOKEN))
        async with asyncio.timeout(5):
            with pytest.raises(UserError, match='mode "rollout_only" has no trainer to save'):
                await client.checkpoint()
        await client.close()
