"""The NCCL communicator's deadlines and aborts, and what it refuses, over a stand-in for CuPy. Tests on GPUs
are in tests/gpu."""

import importlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import pytest
import torch

from atoll.runtime.errors import WeightPushError
from atoll.weights.transport.collective import BroadcastReceiver, BroadcastSender
from atoll.wire.types import Membership, StreamManifest
from tests.unit.cupy_stand_in import NCCL_VERSION, Gpus, NcclCommunicator, simulated_gpus


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with simulated_gpus("GPU-a", "GPU-b", "GPU-c") as gpus:
        yield gpus


@pytest.fixture
def nccl(gpus: Gpus) -> ModuleType:
    return importlib.import_module("atoll.weights.transport.nccl")


def here(nccl: ModuleType, device: int) -> object:
    return nccl.Here(device, f"GPU-{'abc'[device]}", NCCL_VERSION)


def allocate(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def ends(
    nccl: ModuleType, deadline_s: float, num_members: int
) -> tuple[BroadcastSender, list[BroadcastReceiver]]:
    """The sender on device 0, member m on device m + 1."""
    sender = BroadcastSender(
        partial(nccl._create_communicator, here(nccl, 0), deadline_s), allocate, [8, 8, 8]
    )
    return sender, [
        BroadcastReceiver(partial(nccl._join_communicator, here(nccl, 1 + member), deadline_s), allocate)
        for member in range(num_members)
    ]


def send(sender: BroadcastSender, part: int) -> StreamManifest:
    sender.room(part).fill_(part + 1)
    return StreamManifest(0, *sender.send(part, 0, 8), 8, "plan", part=part, checksum=0)


def test_parts_reach_all_members(nccl, gpus):
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
    (group,) = gpus.groups.values()
    assert group.ranks == {rank: (f"GPU-{'abc'[rank]}", NCCL_VERSION) for rank in range(3)}


@pytest.mark.parametrize(
    ("uuid", "version", "reason"),
    [
        ("GPU-b", 23007, r"trainer runs NCCL 2\.29\.7, this replica NCCL 2\.30\.7.*the same torch, "),
        (
            "GPU-a",
            22907,
            r'both on GPU GPU-a.*Set weights\.transport = "cuda_ipc", or place them on different',
        ),
    ],
)
def test_what_nccl_would_refuse_is_refused_in_words(nccl, uuid, version, reason):
    sender, _ = ends(nccl, 20.0, 0)
    member = nccl.Here(1, uuid, version)
    receiver = BroadcastReceiver(partial(nccl._join_communicator, member, 20.0), allocate)
    with closing(sender):
        sender.begin(Membership(1, 1))
        stream = send(sender, 0)
        with pytest.raises(WeightPushError, match=f"from trainer rank 0: .*{reason}"):
            receiver.take(stream, Membership(1, 1, 0))


@pytest.mark.parametrize("fault", ["two members on one GPU", "another version"])
def test_what_nccl_refuses_names_its_reason(nccl, gpus, fault):
    """Members compare themselves with the sender; only NCCL sees all ranks."""
    if fault == "another version":
        gpus.versions["GPU-c"] += 1
    else:
        gpus.uuids[2] = "GPU-b"
    sender, receivers = ends(nccl, 20.0, 2)
    with closing(sender), ThreadPoolExecutor(2) as threads:
        sender.begin(Membership(1, 2))
        stream = send(sender, 0)
        taken = [threads.submit(r.take, stream, Membership(1, 2, m)) for m, r in enumerate(receivers)]
        for one in taken:
            with pytest.raises(WeightPushError, match=r"did not end a broadcast \(NCCL_ERROR_INVALID_USAGE"):
                one.result()


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
    communicator = nccl._create_communicator(here(nccl, 0), 20.0, Membership(1, 2))

    def queue() -> SimpleQueue:
        communicator.abort()
        return SimpleQueue()

    monkeypatch.setattr(nccl, "SimpleQueue", queue)
    with pytest.raises(WeightPushError, match="epoch 1 is over"):  # not at the deadline
        communicator.broadcast(allocate(8))


def test_one_thread_at_a_time_frees_a_communicator(nccl, monkeypatch):
    """The broadcast's own threads free it, too, and CuPy would free it once for each."""
    communicator = nccl._create_communicator(here(nccl, 0), 20.0, Membership(1, 0))
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


def test_an_abort_frees_nothing_that_a_broadcast_uses(nccl, gpus, monkeypatch):
    """The first one connects the ranks before it returns, and CuPy lets other threads run until then."""
    communicator = nccl._create_communicator(here(nccl, 0), 20.0, Membership(1, 0))
    monkeypatch.setattr(nccl, "RETURN_S", 0.01)
    connect, freed = NcclCommunicator._wait, threading.Event()

    def aborted_during_the_wait(inner: NcclCommunicator) -> None:
        if inner._in_use:
            aborting = threading.Thread(target=communicator.abort)
            aborting.start()
            aborting.join()
            assert not freed.is_set()
        connect(inner)

    abort = NcclCommunicator.abort
    monkeypatch.setattr(NcclCommunicator, "_wait", aborted_during_the_wait)
    monkeypatch.setattr(NcclCommunicator, "abort", lambda inner: (abort(inner), freed.set()))
    endless = SimpleNamespace(ptr=0, record=lambda: SimpleNamespace(done=False))
    monkeypatch.setattr(nccl.cupy.cuda, "Stream", lambda non_blocking: endless)
    with pytest.raises(WeightPushError, match="epoch 1 is over"):
        communicator.broadcast(allocate(8))
    assert freed.wait(20)  # by the thread that used it
    assert not gpus.freed_in_use


def test_an_unexpected_error_ends_the_broadcast(nccl, gpus, monkeypatch):
    """Such as CuPy's TypeError for arguments of another release. It does not wait for the deadline."""
    monkeypatch.setattr(gpus, "use", lambda device: {}[device])
    with pytest.raises(WeightPushError, match=r"did not end a broadcast \(0\)"):
        nccl._create_communicator(here(nccl, 0), 20.0, Membership(1, 0)).broadcast(allocate(8))
