"""A weight push on one host beside one thread's memory copy, interleaved in one run.

A trainer rank and its replicas are processes of their own, as in a run; each runs our code and is called
through a pipe. `hand_off`: the writer fills shared memory that the readers have mapped, and every reader
has seen it. `push`: WeightSync.push, with checksums on both sides and the commit. GB/s count the model
once, however many replicas receive it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, cast

import numpy as np
import torch

from services.coordinator.replicas import Replica, Replicas
from services.coordinator.sync import WeightSync
from services.rollout.refit import Refit
from services.runtime.clients import Caller, RolloutClient, RolloutInfo, TrainerClient, TrainerInfo
from services.trainer.publish import Publisher
from services.weights.transport import shm
from services.wire.types import BOX, Catalog, Plan, Published, ServiceEntry, StreamManifest, Version

COLUMNS = 2048
TENSOR_BYTES = 4 << 20


def run(megabytes: int = 256, rounds: int = 7) -> dict[str, Any]:
    """Medians over `rounds`: GB/s, ratios to the round's memcpy, CPU seconds, seconds of stall."""
    return asyncio.run(_run(megabytes << 20, rounds))


async def _run(num_bytes: int, rounds: int) -> dict[str, Any]:
    workers = [Worker(kind, num_bytes) for kind in (Writer, Reader, Reader)]
    writer, *readers = workers
    try:
        location = await writer("location")
        for reader in readers:
            await reader("attach", location)
        versions = (Version("bench", number) for number in count(1))
        syncs = {num: _sync(writer, readers[:num], num_bytes) for num in (1, 2)}
        stalls: list[float] = []

        async def hand_off(num_readers: int) -> None:
            expected = await writer("hand_off")
            seen = await asyncio.gather(*(reader("last_byte") for reader in readers[:num_readers]))
            assert seen == [expected] * num_readers

        async def push(num_readers: int) -> None:
            report = await syncs[num_readers].push(next(versions))
            assert (report.num_bytes, report.failed) == (num_bytes, {}), report
            stalls.append(report.stall_s)

        actions: dict[str, Callable[[], Awaitable[object]]] = {
            "memcpy": lambda: writer("memcpy"),
            "hand_off_1": lambda: hand_off(1),
            "hand_off_2": lambda: hand_off(2),
            "push_1": lambda: push(1),
            "push_2": lambda: push(2),
        }
        wall: dict[str, list[float]] = {name: [] for name in actions}
        cpu: dict[str, list[float]] = {name: [] for name in actions}
        for number in range(rounds + 1):
            for name, action in actions.items():
                await writer("train")
                cpu_before, started = await _cpu_s(workers), time.perf_counter()
                await action()
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(await _cpu_s(workers) - cpu_before)
            if number == 0:  # it maps, touches and sends the plan
                stalls.clear()
                for seconds in (*wall.values(), *cpu.values()):
                    seconds.clear()
    finally:
        for worker in workers:
            worker.close()
    ratios = {name: np.array(wall["memcpy"]) / wall[name] for name in actions if name != "memcpy"}
    return {
        "bytes": num_bytes,
        "gb_per_s": {name: num_bytes / median(seconds) / 1e9 for name, seconds in wall.items()},
        "ratio_to_memcpy": {name: median(values.tolist()) for name, values in ratios.items()},
        "hand_off_time_2_to_1": median((np.array(wall["hand_off_2"]) / wall["hand_off_1"]).tolist()),
        "cpu_s": {name: median(seconds) for name, seconds in cpu.items()},
        "stall_s": median(stalls),
    }


class Worker:
    """An object that lives in a process of its own."""

    def __init__(self, kind: type["Writer"] | type["Reader"], num_bytes: int) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, num_bytes), daemon=True)
        self._process.start()

    async def __call__(self, method: str, *arguments: object) -> Any:
        return await asyncio.to_thread(self._call, method, arguments)

    def _call(self, method: str, arguments: tuple[object, ...]) -> Any:
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, kind: type["Writer"] | type["Reader"], num_bytes: int) -> None:
    torch.set_num_threads(1)
    target = kind(num_bytes)
    while True:
        method, arguments = pipe.recv()
        pipe.send(time.process_time() if method == "cpu_s" else getattr(target, method)(*arguments))


async def _cpu_s(workers: Sequence[Worker]) -> float:
    return time.process_time() + sum([cast(float, await worker("cpu_s")) for worker in workers])


class Writer:
    """A trainer rank."""

    def __init__(self, num_bytes: int) -> None:
        self._parameters = torch.rand(num_bytes // 4)
        self._copy = torch.ones_like(self._parameters)
        self._segment = shm.Segment(num_bytes)
        self._publisher = Publisher(0, [self._parameters])

    def location(self) -> str:
        return self._segment.location

    def train(self) -> None:
        self._parameters.add_(1e-3)

    def memcpy(self) -> None:
        np.copyto(self._copy.numpy(), self._parameters.numpy())

    def hand_off(self) -> int:
        self._segment.memory.view(torch.float32).copy_(self._parameters)
        return int(self._segment.memory[-1])

    def publish(
        self, version: Version, dtype: str, plan_ids: Sequence[str], new_plans: Sequence[Plan], part: int
    ) -> Published:
        return self._publisher.publish(version, dtype, plan_ids, new_plans, part)


class Reader:
    """A replica's engine."""

    def __init__(self, num_bytes: int) -> None:
        self._refit = Refit([torch.ones(num_bytes // 4)], Version("", 0))

    def attach(self, location: str) -> None:
        self._memory = shm.attach(location)

    def last_byte(self) -> int:
        return int(self._memory[-1])

    def receive(self, version: Version, streams: Sequence[StreamManifest], plan: Plan | None) -> int:
        return self._refit.receive(version, streams, plan)

    def commit(self, version: Version) -> float:
        started = time.perf_counter()
        self._refit.commit(version)
        return time.perf_counter() - started


class _Trainer:
    """TrainerClient's part in a push."""

    def __init__(self, worker: Worker, catalog: Catalog) -> None:
        self._worker = worker
        self._catalog = catalog

    async def info(self) -> TrainerInfo:
        return TrainerInfo("", 1, 1, 1, 0, 0, "", (self._catalog,), ("actor",))

    async def publish_weights(self, *arguments: object) -> Published:
        return cast(Published, await self._worker("publish", *arguments))


class _Replica:
    """RolloutClient's part in a push."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def receive_weights(self, *arguments: object) -> int:
        return cast(int, await self._worker("receive", *arguments))

    async def commit_weights(self, version: Version, *, finish_running: bool) -> float:
        return cast(float, await self._worker("commit", version))


def _sync(writer: Worker, readers: Sequence[Worker], num_bytes: int) -> WeightSync:
    tensors = [
        (t, 0, TENSOR_BYTES // 4 // COLUMNS, 0, COLUMNS, 0, t * TENSOR_BYTES // 4, COLUMNS)
        for t in range(num_bytes // TENSOR_BYTES)
    ]
    catalog = Catalog(tuple(f"layer.{t}" for t in range(len(tensors))), np.array(tensors, BOX))
    replicas = Replicas(Caller(), request_timeout_s=60)
    nothing = Version("", 0)
    for number, reader in enumerate(readers):
        name = f"rollout-{number}"
        info = RolloutInfo(name, name, nothing, 0, 0, 0, "float32", catalog, 0, 0, 0)
        client = cast(RolloutClient, _Replica(reader))
        replicas.hold(Replica(ServiceEntry("rollout", name, name, ""), client, info, nothing))
    trainer = cast(TrainerClient, _Trainer(writer, catalog))
    return WeightSync(lambda: trainer, replicas, "float32", finish_running=False)
