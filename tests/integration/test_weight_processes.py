"""Two trainer ranks and three replicas of two ranks, each rank a process, over tcp: rounds, a replica killed
by SIGKILL during a push, and one that joins late. The test plays the coordinator."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from threading import Lock

import numpy as np
import pytest
import torch

from atoll.rollout.refit import Refit
from atoll.runtime.errors import WeightPushError
from atoll.trainer.publish import Publisher, merge_published
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
    Version,
)

pytestmark = pytest.mark.long

ROWS, COLUMNS, TENSORS = 1024, 1024, 16  # 64 MiB in float32
DEADLINE_S = 60.0
V0, V1, V2 = (Version("a3f0", number) for number in range(3))


def shard_layout(rank: int, num_ranks: int) -> ShardLayout:
    """Rows of each tensor, in one buffer."""
    rows = ROWS // num_ranks
    boxes = [(t, rank * rows, rows, 0, COLUMNS, 0, t * rows * COLUMNS, COLUMNS) for t in range(TENSORS)]
    return ShardLayout(tuple(f"layer.{t}" for t in range(TENSORS)), np.array(boxes, BOX))


def values(seed: int, rank: int, num_ranks: int) -> torch.Tensor:
    """A rank's buffer for the model `seed`, in which every element is unique."""
    rows = ROWS // num_ranks
    whole = torch.arange(TENSORS * ROWS * COLUMNS, dtype=torch.int32).view(TENSORS, ROWS, COLUMNS)
    mine = whole[:, rank * rows : (rank + 1) * rows] * 64 + seed
    return mine.contiguous().view(-1).view(torch.float32)  # any bits are some number


class TrainerRank:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buffer = values(0, rank, 2).clone()
        opens = partial(open_sender, "tcp", DEADLINE_S, "127.0.0.1")
        self._publisher = Publisher(rank, [self._buffer], opens, stays_readable=False)

    def train(self, seed: int) -> None:
        self._buffer.copy_(values(seed, self._rank, 2))

    def publish(self, version: Version, membership: Membership, plan: Plan, part: int) -> PublishedPart:
        return self._publisher.publish(
            PublishRequest(version, "float32", {plan.id: membership}, [plan], part)
        )


class ReplicaRank:
    def __init__(self, rank: int) -> None:
        self._rank = rank
        buffer = torch.zeros(TENSORS * ROWS // 2 * COLUMNS)
        self._refit = Refit([buffer], V0, open_receiver("tcp", DEADLINE_S), rank)

    def receive(self, part: PushPart) -> int:
        return self._refit.receive(part)

    def holds(self, version: Version, seed: int) -> bool:
        """Commits, then compares with the model."""
        (live,) = self._refit.commit(version)
        return torch.equal(live.view(torch.int32), values(seed, self._rank, 2).view(torch.int32))


def serve(pipe: Connection, kind: type[TrainerRank] | type[ReplicaRank], rank: int) -> None:
    torch.set_num_threads(1)
    target = kind(rank)
    pipe.send(None)
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send(getattr(target, method)(*arguments))
        except WeightPushError as error:
            pipe.send(error)


class Worker:
    """A rank in its own process; one call at a time."""

    def __init__(self, kind: type[TrainerRank] | type[ReplicaRank], rank: int) -> None:
        context = multiprocessing.get_context("forkserver")  # which imports torch once
        context.set_forkserver_preload(["atoll.rollout.refit", "atoll.trainer.publish"])
        self._lock = Lock()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, kind, rank), daemon=True)
        self._process.start()
        theirs.close()

    def started(self) -> None:
        assert self._pipe.recv() is None

    def __call__(self, method: str, *arguments: object):
        """Raises what the rank raises; EOFError or OSError if it is dead."""
        with self._lock:
            self._pipe.send((method, arguments))
            answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[list[Worker], list[list[Worker]]]]:
    trainer = [Worker(TrainerRank, rank) for rank in range(2)]
    replicas = [[Worker(ReplicaRank, rank) for rank in range(2)] for _ in range(3)]
    everyone = [*trainer, *(worker for replica in replicas for worker in replica)]
    for worker in everyone:
        worker.started()
    yield trainer, replicas
    for worker in everyone:
        worker.kill()


PLAN = partial(plan, [shard_layout(r, 2) for r in range(2)], [shard_layout(r, 2) for r in range(2)])


def test_a_push_survives_a_killed_replica_and_a_late_one(workers):
    trainer, (first, killed, late) = workers
    weight_plan = PLAN(part_elements=1 << 20)
    num_rounds = int(weight_plan.transfers["round"].max()) + 1
    assert num_rounds >= 8
    threads = ThreadPoolExecutor(8)

    def publish(version: Version, epoch: int, num_members: int, part: int) -> PublishedPart:
        membership = Membership(epoch, num_members)
        calls = [threads.submit(rank, "publish", version, membership, weight_plan, part) for rank in trainer]
        return merge_published([call.result() for call in calls])

    def receive(version: Version, epoch: int, published: PublishedPart, replicas: list[list[Worker]]) -> list:
        """The futures of all ranks, by replica."""
        return [
            [
                threads.submit(
                    worker,
                    "receive",
                    PushPart(
                        version, published.streams, weight_plan, Membership(epoch, len(replicas), member)
                    ),
                )
                for worker in replica
            ]
            for member, replica in enumerate(replicas)
        ]

    def push(version: Version, epoch: int, replicas: list[list[Worker]]) -> None:
        for part in count():
            published = publish(version, epoch, len(replicas), part)
            for calls in receive(version, epoch, published, replicas):
                for call in calls:
                    call.result()
            if published.last:
                break

    for rank in trainer:
        rank("train", 1)
    push(V1, 1, [first, killed])
    assert all(worker("holds", V1, 1) for worker in (*first, *killed))

    for rank in trainer:
        rank("train", 2)
    started = time.monotonic()
    for part in range(num_rounds // 2):
        for calls in receive(V2, 1, publish(V2, 1, 2, part), [first, killed]):
            for call in calls:
                call.result()
    published = publish(V2, 1, 2, num_rounds // 2)
    for worker in killed:
        worker.kill()
    survivors, dead = receive(V2, 1, published, [first, killed])
    for call in dead:
        with pytest.raises((EOFError, OSError)):
            call.result()
    push(V2, 2, [first])  # while the survivor may still wait for the old epoch's part
    for call in survivors:
        assert call.exception() is None or isinstance(call.exception(), WeightPushError)
    assert time.monotonic() - started < DEADLINE_S / 2  # no deadline was waited for
    assert all(worker("holds", V2, 2) for worker in first)

    for rank in trainer:
        rank("train", 3)  # trained on; the committed version is what it was
    push(V2, 3, [late])
    assert all(worker("holds", V2, 2) for worker in late)
    threads.shutdown()
