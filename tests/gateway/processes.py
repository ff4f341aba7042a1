"""Real gateway processes over the real store, with a stand-in for the coordinator in this process."""

import asyncio
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from atoll.cli.launch.processes import Fleet as Processes
from atoll.cli.launch.processes import ServiceCommand, ServiceGroup
from atoll.config.load import validate, write_resolved
from atoll.config.resolve import resolve
from atoll.coordinator.fleet.gateways import GatewayLink, Want
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.gateway import GatewayClient
from atoll.runtime.store import Store
from atoll.wire.codec.trajectories import decode_payload
from atoll.wire.types import (
    BELOW_PROMPT,
    FinishReason,
    GroupId,
    Int32,
    Node,
    Origin,
    SampleId,
    Sampling,
    SessionEnd,
    SessionId,
    SessionLimits,
    SessionSpec,
    Trajectory,
    TrajectoryStatus,
    Turn,
    TurnId,
    TurnRequest,
    Version,
    VersionSpan,
)
from tests.builders import NO_GPUS


@dataclass(slots=True)
class GatewayProcess:
    link: GatewayLink
    port: int  # of HTTP
    pid: int
    log: Path

    @property
    def rss(self) -> int:
        """Bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)


@asynccontextmanager
async def running_gateways(
    folder: Path, store_url: str, want: Want, *, number: int = 1, max_length: int = 4096
) -> AsyncIterator[list[GatewayProcess]]:
    """Gateways of the model in `folder`/model. `want` is called with the turns that they ask for.

    Call it within `run_embedded_server`, which belongs to the main thread."""
    config = resolve(
        validate(
            {
                "run": {"name": "gateways", "dir": folder, "steps": 1},
                "model": {"path": folder / "model"},
                "data": {"train": [{"path": folder / "rows.jsonl"}]},
                "rollout": {"local": {"max_length": max_length}},
            },
            "gateways",
        ),
        NO_GPUS,
    )
    config.folder.mkdir(exist_ok=True)
    write_resolved(config, path := config.folder / "config.json")
    token = secrets.token_hex(8)
    store = Store(store_url, "gateways")
    epoch = await store.take_epoch()
    logs = config.folder / "logs"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(store.close)
        environment = {"ATOLL_TOKEN": token, "PYTHONPATH": os.getcwd()}
        processes = await stack.enter_async_context(Processes(logs, environment))
        gateways = []
        for name in (f"gateway-{index}" for index in range(number)):
            command = (sys.executable, "-m", "atoll.gateway", "--config", str(path), "--name", name)
            service = ServiceCommand(name, (*command, "--store", store_url))
            address = await processes.start(ServiceGroup((service,)))
            client = GatewayClient(address, Caller(epoch, token))
            stack.push_async_callback(client.close)
            port = int((await client.info()).url.rpartition(":")[2])
            link = GatewayLink(name, client)
            stack.callback(asyncio.create_task(link.follow(want)).cancel)
            gateways.append(GatewayProcess(link, port, _pid_listening(port), logs / f"{name}.log"))
        yield gateways


def drawn_turn(id: TurnId, token_ids: Int32) -> Trajectory:
    """As a replica draws a turn: `token_ids` [T] end with a stop token."""
    T = len(token_ids)
    node = Node(
        parent=BELOW_PROMPT,
        token_ids=token_ids,
        loss_mask=np.ones(T, np.bool_),
        logprobs=np.full(T, -0.5, np.float32),
        spans=(VersionSpan(Version("test", 0), 0, T),),
    )
    now = time.time()
    turn = Turn(0, FinishReason.STOP, "", Origin("r", "i"), now, now, number=id.turn, branch=id.branch)
    return Trajectory(id.sample, id.attempt, (node,), (turn,), TrajectoryStatus.COMPLETED)


@dataclass
class StandIn:
    """Draws every turn at once, with what `reply` says. Turns asked for while it is `paused` wait."""

    reply: Callable[[TurnRequest], Int32]  # token ids [T] of each of its turns
    requests: list[TurnRequest] = field(default_factory=list)  # that were asked for, the oldest first
    paused: bool = False
    waiting: list[tuple[GatewayLink, TurnRequest]] = field(default_factory=list)
    _asked: asyncio.Event = field(default_factory=asyncio.Event)

    def want(self, link: GatewayLink, requests: Sequence[TurnRequest]) -> None:
        self.requests += requests
        self.waiting += [(link, request) for request in requests]
        self._asked.set()
        if not self.paused:
            self.resume()

    def resume(self) -> None:
        self.paused = False
        waiting, self.waiting = self.waiting, []
        for link, request in waiting:
            ids = self.reply(request)
            link.answer([drawn_turn(id, ids) for id in request.ids], [])

    async def wait_for_requests(self, number: int) -> None:
        """Until so many were asked for in all."""
        while len(self.requests) < number:
            self._asked.clear()
            await self._asked.wait()


def new_session(*, max_new_tokens: int = 64, max_turns: int = 0) -> SessionSpec:
    """Of a group that no other session has."""
    id = SessionId(SampleId(GroupId("gateways", 0, secrets.randbelow(1 << 60)), 0), 0)
    keys = secrets.token_hex(16), secrets.token_hex(16)
    return SessionSpec(id, *keys, Sampling(max_new_tokens=max_new_tokens), SessionLimits(turns=max_turns))


async def end_session(gateway: GatewayProcess, id: SessionId) -> Trajectory | None:
    """None: it has no turn."""
    _, payload = await gateway.link.client.end(id, SessionEnd.DONE)
    return next(iter(decode_payload(payload)), None) if payload else None


def _pid_listening(port: int) -> int:
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr
        if listens and listens.port == port and connection.pid:
            return connection.pid
    raise RuntimeError(f"nobody listens on port {port}")
