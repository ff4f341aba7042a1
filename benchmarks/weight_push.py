"""A weight push on one host beside one thread's memory copy, interleaved in one run.

A trainer rank and its replicas are processes of their own, as in a run; each runs our code and is called
through a pipe. `hand_off`: the writer fills shared memory that the readers have mapped, and every reader
has seen it. `push`: WeightSync.push, with checksums on both sides and the commit. GB/s count the model
once, however many replicas receive it.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from atoll.config.schema import WeightsSection
from atoll.config.transports import TRANSPORTS
from atoll.coordinator.fleet.replicas import Replica, Replicas
from atoll.coordinator.weight_sync.canary import Canary
from atoll.coordinator.weight_sync.sync import WeightSync
from atoll.rollout.refit import Refit
from atoll.runtime.clients.base import Caller
from atoll.runtime.clients.rollout import RolloutClient
from atoll.runtime.clients.trainer import TrainerClient
from atoll.trainer.publish import Publisher
from atoll.weights.transport import shm
from atoll.weights.transport.base import open_receiver, open_sender
from atoll.wire.info import RolloutInfo, TrainerInfo
from atoll.wire.types import (
    BOX,
    PublishedPart,
    PublishRequest,
    PushPart,
    ServiceEntry,
    ShardLayout,
    Version,
)

COLUMNS = 2048
TENSOR_BYTES = 4 << 20
DEADLINE_S = 60.0
NOTHING = Version("", 0)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a push travels and ends."""

    transport: str = "shm"
    in_place: bool = False  # a commit copies, as SGLang's does, instead of swapping buffers
    num_readers: int = 1


def run(num_bytes: int, rounds: int, setting: Setting) -> dict[str, Any]:
    """Medians over `rounds`: GB/s, ratios to the round's memcpy, CPU seconds, seconds of stall."""
    return asyncio.run(_run(num_bytes, rounds, setting))


async def _run(num_bytes: int, rounds: int, setting: Setting) -> dict[str, Any]:
    # a tcp sender's own thread takes a core, too
    cores: Iterator[int | None] = repeat(None) if setting.transport == "tcp" else count()
    writer = Worker(next(cores), Writer, num_bytes, setting.transport)
    readers = [
        Worker(next(cores), Reader, num_bytes, setting.transport, setting.in_place)
        for _ in range(setting.num_readers)
    ]
    workers = [writer, *readers]
    try:
        location = await writer("location")
        for reader in readers:
            await reader("attach", location)

        async def hand_off(num_readers: int) -> None:
            expected = await writer("hand_off")
            seen = await asyncio.gather(*(reader("last_byte") for reader in readers[:num_readers]))
            assert seen == [expected] * num_readers

        shard_layout = even_shard_layout(num_bytes)
        replicas = {cast(RolloutClient, _Replica(reader)): (shard_layout,) for reader in readers}
        pusher = Pusher(writer, shard_layout, replicas, setting.transport)
        actions: dict[str, Callable[[], Awaitable[object]]] = {"memcpy": lambda: writer("memcpy")}
        for num in range(1, 1 + setting.num_readers):
            actions[f"hand_off_{num}"] = lambda num=num: hand_off(num)  # type: ignore[misc]
        actions["push"] = pusher.push
        measured = await interleaved(actions, rounds, workers, lambda: writer("train"))
        arrived = await asyncio.gather(*(reader("take_arrived") for reader in readers))
        assert arrived == [num_bytes * (rounds + 1)] * len(readers), "each target gets its own shard, once"
        return {"bytes": num_bytes, **measured, "stall_s": pusher.stall_s}
    finally:
        for worker in workers:
            worker.close()


async def interleaved(
    actions: Mapping[str, Callable[[], Awaitable[object]]],
    rounds: int,
    workers: Sequence["Worker"],
    before_each: Callable[[], Awaitable[object]],
) -> dict[str, Any]:
    """Seconds of each action, and of the first round's "memcpy" over them; one round more maps, touches and
    sends the plan."""
    wall: dict[str, list[float]] = {name: [] for name in actions}
    cpu: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds + 1):
        for name, action in actions.items():
            await before_each()
            cpu_before, started = await _cpu_s(workers), time.perf_counter()
            await action()
            wall[name].append(time.perf_counter() - started)
            cpu[name].append(await _cpu_s(workers) - cpu_before)
    memcpy = np.array(wall["memcpy"][1:])
    ratios = {name: memcpy / wall[name][1:] for name in actions if name != "memcpy"}
    return {
        "wall_s": {name: median(seconds[1:]) for name, seconds in wall.items()},
        "ratio_to_memcpy": {name: median(values.tolist()) for name, values in ratios.items()},
        "cpu_s": {name: median(seconds[1:]) for name, seconds in cpu.items()},
    }


class Pusher:
    """The coordinator's side: pushes version after version."""

    def __init__(
        self,
        writer: "Worker",
        shard_layout: ShardLayout,
        replicas: Mapping[RolloutClient, tuple[ShardLayout, ...]],
        transport: str,
    ) -> None:
        known = Replicas(Caller(), request_timeout_s=60)
        for number, (client, shard_layouts) in enumerate(replicas.items()):
            name = f"rollout-{number}"
            info = RolloutInfo(name, name, NOTHING, 0, 0, 0, "float32", shard_layouts, 0, 0, 0, 0)
            known.hold(Replica(ServiceEntry("rollout", name, name, ""), client, info, NOTHING))
        self._trainer = cast(TrainerClient, _Trainer(writer, shard_layout))
        self._sync = WeightSync(
            known,
            Canary(Path(), every=0, tolerance=0.0),
            WeightsSection.model_validate({"transport": transport, "deadline_s": DEADLINE_S}),
            "float32",
            finish_running=False,
            first_epoch=1,
        )
        self._versions = (Version("bench", number) for number in count(1))
        self._num_bytes = flat(shard_layout)[1]
        self._stalls: list[float] = []

    @property
    def stall_s(self) -> float:
        """Median of all pushes but the first, which sends the plan."""
        return median(self._stalls[1:])

    async def push(self) -> None:
        if not self._stalls:
            await self._sync.use_trainer(self._trainer)
        report = await self._sync.push(next(self._versions))
        assert (report.num_bytes, report.failed) == (self._num_bytes, {}), report
        self._stalls.append(report.stall_s)


class Worker:
    """An object that lives in a process of its own.

    `core`: where alone it runs. Free to choose, both ends of a push share one for a part of the rounds.
    """

    def __init__(self, core: int | None, kind: type["Writer"] | type["Reader"], *arguments: object) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, core, kind, arguments), daemon=True)
        self._process.start()

    async def __call__(self, method: str, *arguments: object) -> Any:
        return await asyncio.to_thread(self._call, method, arguments)

    def _call(self, method: str, arguments: tuple[object, ...]) -> Any:
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(
    pipe: Connection, core: int | None, kind: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    if core is not None:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[core % len(allowed)]})
    target = kind(*arguments)
    while True:
        method, arguments = pipe.recv()
        pipe.send(time.process_time() if method == "cpu_s" else getattr(target, method)(*arguments))


async def _cpu_s(workers: Sequence[Worker]) -> float:
    return time.process_time() + sum([cast(float, await worker("cpu_s")) for worker in workers])


class Writer:
    """A trainer rank."""

    def __init__(self, num_bytes: int, transport: str) -> None:
        self._parameters = torch.rand(num_bytes // 4)
        self._copy = torch.ones_like(self._parameters)
        self._segment = shm.SharedSegment(num_bytes)
        self._publisher = Publisher(
            0,
            [self._parameters],
            lambda parts: open_sender(transport, DEADLINE_S, "127.0.0.1", parts),
            stays_readable=TRANSPORTS[transport].stays_readable,
        )

    def location(self) -> str:
        return self._segment.location

    def train(self) -> None:
        self._parameters.add_(1e-3)

    def memcpy(self) -> None:
        np.copyto(self._copy.numpy(), self._parameters.numpy())

    def hand_off(self) -> int:
        self._segment.memory.view(torch.float32).copy_(self._parameters)
        return int(self._segment.memory[-1])

    def publish(self, request: PublishRequest) -> PublishedPart:
        return self._publisher.publish(request)


class Reader:
    """A replica's engine."""

    def __init__(self, num_bytes: int, transport: str, in_place: bool) -> None:
        parameters = [torch.ones(num_bytes // 4)]
        receiver = open_receiver(transport, DEADLINE_S)
        self._refit = Refit(parameters, NOTHING, receiver, in_place=in_place)
        self._arrived = 0

    def attach(self, location: str) -> None:
        self._memory = shm.attach(location)

    def last_byte(self) -> int:
        return int(self._memory[-1])

    def receive(self, part: PushPart) -> int:
        num_bytes = self._refit.receive(part)
        self._arrived += num_bytes
        return num_bytes

    def commit(self, version: Version) -> float:
        started = time.perf_counter()
        self._refit.commit(version)
        return time.perf_counter() - started

    def take_arrived(self) -> int:
        return self._arrived


class _Trainer:
    """TrainerClient's part in a push."""

    def __init__(self, worker: Worker, shard_layout: ShardLayout) -> None:
        self._worker = worker
        self._shard_layout = shard_layout

    async def info(self) -> TrainerInfo:
        return TrainerInfo("", 1, 1, 1, 1, 1, 1, 0, 0, "", (self._shard_layout,), ("actor",))

    async def publish_weights(self, request: PublishRequest) -> PublishedPart:
        return cast(PublishedPart, await self._worker("publish", request))


class _Replica:
    """RolloutClient's part in a push."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def receive_weights(self, part: PushPart) -> int:
        return cast(int, await self._worker("receive", part))

    async def commit_weights(self, version: Version, *, finish_running: bool) -> float:
        return cast(float, await self._worker("commit", version))

    async def progress(self) -> int:
        return 0


def even_shard_layout(num_bytes: int) -> ShardLayout:
    """Matrices of TENSOR_BYTES, one behind the other."""
    tensors = [
        (t, 0, TENSOR_BYTES // 4 // COLUMNS, 0, COLUMNS, 0, t * TENSOR_BYTES // 4, COLUMNS)
        for t in range(num_bytes // TENSOR_BYTES)
    ]
    return ShardLayout(tuple(f"layer.{t}" for t in range(len(tensors))), np.array(tensors, BOX))


def flat(shard_layout: ShardLayout) -> tuple[ShardLayout, int]:
    """The same boxes, dense, in one buffer; and its bytes in float32."""
    boxes = shard_layout.boxes.copy()
    sizes = boxes["rows"] * boxes["columns"]
    boxes["buffer"], boxes["stride"], boxes["offset"] = 0, boxes["columns"], np.cumsum(sizes) - sizes
    return ShardLayout(shard_layout.tensors, boxes), int(sizes.sum()) * 4
