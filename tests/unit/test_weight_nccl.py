"""The NCCL communicator's deadlines and aborts, over a stand-in for CuPy: ranks are threads, device memory is
host memory, and calls wait for their ranks forever, like NCCL's. Tests on GPUs are in tests/gpu."""

import ctypes
import importlib
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from atoll.runtime.errors import WeightPushError
from atoll.weights.transport.collective import BroadcastReceiver, BroadcastSender
from atoll.wire.types import Membership, StreamManifest


class NcclError(RuntimeError):
    pass


class NcclCommunicator:
    """Each call waits until all ranks have made it, or one of them aborts."""

    _groups: ClassVar[dict[tuple[int, ...], threading.Barrier]] = {}
    _sources: ClassVar[dict[tuple[int, ...], int]] = {}
    _lock: ClassVar = threading.Lock()

    def __init__(self, num_ranks: int, unique_id: tuple[int, ...], rank: int) -> None:
        assert len(unique_id) == 128
        assert all(-128 <= number < 128 for number in unique_id)
        with self._lock:
            self._barrier = self._groups.setdefault(unique_id, threading.Barrier(num_ranks))
        self._id, self._rank = unique_id, rank
        self._wait()

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None:
        assert (source, dtype, root) == (target, 1, 0)
        if self._rank == root:
            self._sources[self._id] = source
        self._wait()
        if self._rank != root:
            ctypes.memmove(target, self._sources[self._id], count)
        self._wait()

    def abort(self) -> None:
        self._barrier.abort()

    def check_async_error(self) -> None:
        pass

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise NcclError("aborted") from None


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    stand_in = SimpleNamespace(
        available=True,
        NCCL_UINT8=1,
        NcclError=NcclError,
        NcclCommunicator=NcclCommunicator,
        get_unique_id=lambda: tuple(byte - 128 for byte in secrets.token_bytes(128)),
    )
    stream = SimpleNamespace(ptr=0, record=lambda: SimpleNamespace(done=True))
    cuda = SimpleNamespace(
        nccl=stand_in,
        Device=lambda number: SimpleNamespace(use=lambda: None),
        Stream=lambda non_blocking: stream,
        runtime=SimpleNamespace(CUDARuntimeError=MemoryError),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    name = "atoll.weights.transport.nccl"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name)


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def ends(
    nccl: ModuleType, deadline_s: float, num_members: int
) -> tuple[BroadcastSender, list[BroadcastReceiver]]:
    sender = BroadcastSender(partial(nccl._create_communicator, 0, deadline_s), allocate, [8, 8, 8])
    return sender, [
        BroadcastReceiver(partial(nccl._join_communicator, 0, deadline_s), allocate)
        for _ in range(num_members)
    ]


def send(sender: BroadcastSender, part: int) -> StreamManifest:
    sender.room(part).fill_(part + 1)
    return StreamManifest(0, *sender.send(part, 0, 8), 8, "plan", 0, np.zeros(0, np.uint64))


def test_parts_reach_all_members(nccl):
    sender, receivers = ends(nccl, 20.0, 2)
    with closing(sender):
        sender.begin(Membership(1, 2))
        for part in range(3):
            stream, got = send(sender, part), []
            members = [
                threading.Thread(
                    target=lambda r=r, m=m, s=stream, g=got: g.extend(r.take(s, Membership(1, 2, m)).tolist())
                )
                for m, r in enumerate(receivers)
            ]
            for member in members:
                member.start()
            for member in members:
                member.join()
            assert got == [part + 1] * 16


def test_a_rank_that_does_not_enter_ends_the_broadcast_at_the_deadline(nccl):
    sender, receivers = ends(nccl, 0.2, 1)
    with closing(sender):
        sender.begin(Membership(1, 2))
        stream = send(sender, 0)
        send(sender, 1)
        with pytest.raises(WeightPushError, match=r"members 0 to 1 of epoch 1 .*\(not within 0\.2 s\)"):
            receivers[0].take(stream, Membership(1, 2, 0))
        with pytest.raises(WeightPushError, match="members 0 to 1 of epoch 1 did not end a broadcast"):
            sender.room(2)


def test_a_new_epoch_ends_the_old_one_at_once(nccl):
    sender, receivers = ends(nccl, 600.0, 1)
    with closing(sender):
        sender.begin(Membership(1, 2))
        send(sender, 0)
        alone = Membership(2, 1)
        sender.begin(alone)
        stream = send(sender, 0)
        assert receivers[0].take(stream, alone).tolist() == [1] * 8


def test_an_abort_ends_a_broadcast_that_has_just_begun(nccl, monkeypatch):
    communicator = nccl._create_communicator(0, 20.0, Membership(1, 2))

    def queue() -> SimpleQueue:
        communicator.abort()
        return SimpleQueue()

    monkeypatch.setattr(nccl, "SimpleQueue", queue)
    with pytest.raises(WeightPushError, match="epoch 1 is over"):  # not at the deadline
        communicator.broadcast(allocate(8))


def test_one_thread_at_a_time_frees_a_communicator(nccl, monkeypatch):
    """The broadcast's own threads free it, too, and CuPy would free it once for each."""
    communicator = nccl._create_communicator(0, 20.0, Membership(1, 0))
    freeing, most, polled = 0, 0, threading.Event()

    def abort(inner: NcclCommunicator) -> None:
        nonlocal freeing, most
        freeing += 1
        most = max(most, freeing)
        time.sleep(0.1)
        freeing -= 1

    endless = SimpleNamespace(ptr=0, record=lambda: SimpleNamespace(done=False))
    monkeypatch.setattr(nccl.cupy.cuda, "Stream", lambda non_blocking: endless)
    monkeypatch.setattr(NcclCommunicator, "check_async_error", lambda inner: polled.set())
    monkeypatch.setattr(NcclCommunicator, "abort", abort)
    with ThreadPoolExecutor(1) as threads:
        broadcast = threads.submit(communicator.broadcast, allocate(8))
        assert polled.wait(20)
        communicator.abort()
        with pytest.raises(WeightPushError, match="epoch 1 is over"):
            broadcast.result()
    assert most == 1
