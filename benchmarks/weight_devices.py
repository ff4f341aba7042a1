"""A weight push between processes on GPUs beside a copy on one of them: 3 GB in 339 tensors, about what a
model of 1.5 billion parameters in bfloat16 has. `python -m benchmarks.weight_devices` prints JSON.

`copy`: tensor by tensor, within a device. `hand_off` (cuda_ipc): the same out of the trainer's memory into a
replica's buffers, unchecked. `push`: packed, checksummed, received, checked and committed. With one GPU the
trainer and one replica share it (cuda_ipc); with more, each further one is a replica (nccl).
"""

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
import torch

from atoll.config.transports import TRANSPORTS
from atoll.rollout.refit import Refit
from atoll.trainer.publish import DTYPES, Publisher
from atoll.weights.plan import plan
from atoll.weights.transport.base import open_receiver, open_sender
from atoll.wire.types import (
    BOX,
    Membership,
    Plan,
    PublishedPart,
    PublishRequest,
    PushPart,
    ShardLayout,
    StreamManifest,
    Version,
)

NUM_TENSORS, ROWS, COLUMNS = 339, 1080, 2048  # of float32: 3.0 GB
PART_ELEMENTS = 256 << 20  # 1 GiB: three rounds
DEADLINE_S = 60.0


class Writer:
    """The trainer's rank."""

    def __init__(self, device: str, transport: str, num_elements: int, dtype: str) -> None:
        use(device)
        self._dtype = dtype
        self._weights = torch.rand(num_elements, device=device, dtype=DTYPES[dtype])
        self._copy = torch.zeros_like(self._weights)
        self._publisher = Publisher(
            0,
            [self._weights],
            partial(open_sender, transport, DEADLINE_S, "127.0.0.1"),
            stays_readable=TRANSPORTS[transport].stays_readable,
        )

    def train(self) -> None:
        self._weights.add_(1e-3)
        finish(self._weights)

    def copy(self) -> float:
        """Seconds."""
        pairs = list(zip(self._copy.chunk(NUM_TENSORS), self._weights.chunk(NUM_TENSORS), strict=True))
        return copied(pairs)

    def publish(self, version: Version, membership: Membership, plan: Plan, part: int) -> PublishedPart:
        return self._publisher.publish(
            PublishRequest(version, self._dtype, {plan.id: membership}, [plan], part)
        )


class Reader:
    """A replica's rank."""

    def __init__(self, device: str, transport: str, num_elements: int, dtype: str) -> None:
        use(device)
        weights = torch.zeros(num_elements, device=device, dtype=DTYPES[dtype])
        self._staging = torch.zeros_like(weights)
        self._receiver = open_receiver(transport, DEADLINE_S)
        self._refit = Refit([weights], Version("", 0), self._receiver, in_place=True)

    def receive(
        self, version: Version, streams: Sequence[StreamManifest], plan: Plan, membership: Membership
    ) -> int:
        return self._refit.receive(PushPart(version, streams, plan, membership))

    def commit(self, version: Version) -> None:
        self._refit.commit(version)

    def hand_off(self, streams: Sequence[StreamManifest], membership: Membership) -> float:
        """Seconds to copy what stays readable, a tensor (or a part's piece of one) at a time."""
        parts = [self._receiver.take(stream, membership).view(self._staging.dtype) for stream in streams]
        pieces = [piece for part in parts for piece in tensors_of(part)]
        into = self._staging.split_with_sizes([len(piece) for piece in pieces])
        return copied(list(zip(into, pieces, strict=True)))


def tensors_of(part: torch.Tensor) -> Sequence[torch.Tensor]:
    return part.tensor_split(list(range(ROWS * COLUMNS, len(part), ROWS * COLUMNS)))


def use(device: str) -> None:
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)


def copied(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    started = time.perf_counter()
    for into, source in pairs:
        into.copy_(source)
    finish(pairs[0][0])
    return time.perf_counter() - started


def finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


class Worker:
    """An object that lives in a process of its own."""

    def __init__(
        self, kind: type[Writer] | type[Reader], device: str, transport: str, num_elements: int, dtype: str
    ) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, kind, device, transport, num_elements, dtype
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, method: str, *arguments: object) -> Any:
        self._pipe.send((method, arguments))
        return self._pipe.recv()

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(
    pipe: Connection,
    kind: Callable[[str, str, int, str], object],
    device: str,
    transport: str,
    num_elements: int,
    dtype: str,
) -> None:
    target = kind(device, transport, num_elements, dtype)
    while True:
        method, arguments = pipe.recv()
        pipe.send(getattr(target, method)(*arguments))


def matrices() -> ShardLayout:
    """In one buffer."""
    boxes = [(t, 0, ROWS, 0, COLUMNS, 0, t * ROWS * COLUMNS, COLUMNS) for t in range(NUM_TENSORS)]
    return ShardLayout(tuple(f"layer.{t}" for t in range(NUM_TENSORS)), np.array(boxes, BOX))


def measure(
    transport: str,
    devices: Sequence[str],
    source: ShardLayout | None = None,
    target: ShardLayout | None = None,
    dtype: str = "float32",
    rounds: int = 7,
) -> dict[str, Any]:
    """Medians of seconds. The first device is the trainer's, the others are replicas'. `source` and `target`
    are their layouts, each in one buffer without gaps; None: `matrices`."""
    source, target = source or matrices(), target or matrices()
    num_elements = int((source.boxes["rows"] * source.boxes["columns"]).sum())
    weight_plan = plan([source], [target], part_elements=PART_ELEMENTS)
    writer, *readers = workers = [
        Worker(Reader if number else Writer, device, transport, num_elements, dtype)
        for number, device in enumerate(devices)
    ]
    threads = ThreadPoolExecutor(len(workers))
    membership = Membership(1, len(readers))
    streams: list[StreamManifest] = []

    def push(version: Version) -> None:
        streams.clear()
        ahead = threads.submit(writer, "publish", version, membership, weight_plan, 0)
        for part in count(1):
            published: PublishedPart = ahead.result()
            if not published.last:
                ahead = threads.submit(writer, "publish", version, membership, weight_plan, part)
            streams.extend(published.streams)
            receive = [
                threads.submit(
                    reader, "receive", version, published.streams, weight_plan, Membership(1, len(readers), m)
                )
                for m, reader in enumerate(readers)
            ]
            for call in receive:
                call.result()
            if published.last:
                break
        for reader in readers:
            reader("commit", version)

    seconds: dict[str, list[float]] = {"copy": [], "hand_off": [], "push": []}
    try:
        for number in range(1, rounds + 2):  # the first one opens, connects and sends the plan
            writer("train")
            started = time.perf_counter()
            push(Version("bench", number))
            seconds["push"].append(time.perf_counter() - started)
            seconds["copy"].append(writer("copy"))
            if transport in ("cuda_ipc", "shm"):
                seconds["hand_off"].append(readers[0]("hand_off", streams, membership))
    finally:
        for worker in workers:
            worker.close()
        threads.shutdown()
    medians = {name: median(times[1:]) for name, times in seconds.items() if times}
    return {
        "transport": transport,
        "replicas": len(readers),
        "bytes": DTYPES[dtype].itemsize * num_elements,
        "seconds": medians,
        "ratio_to_copy": {name: medians["copy"] / time_ for name, time_ in medians.items()},
    }


def main() -> None:
    num_gpus = torch.cuda.device_count()
    results = [measure("cuda_ipc", ["cuda:0", "cuda:0"])]
    if num_gpus > 1:
        results.append(measure("nccl", [f"cuda:{number}" for number in range(num_gpus)]))
    print(json.dumps({"device": torch.cuda.get_device_name(0), "gpus": num_gpus, "results": results}))


if __name__ == "__main__":
    main()
