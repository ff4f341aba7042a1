"""Weights in GPU memory of one host, over a stand-in for CUDA and CuPy. Tests on GPUs are in tests/gpu."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from atoll.runtime.errors import MemoryExhaustedError, WeightPushError
from atoll.wire.types import Membership, StreamManifest
from tests.unit.cupy_stand_in import Gpus, simulated_gpus
from tests.unit.test_weight_push import V1, V2, Fleet, assert_equal
from tests.unit.weight_layouts import shards

ALONE = Membership(0, 1)


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with simulated_gpus("GPU-a", "GPU-b", "GPU-c", "GPU-d") as gpus:
        yield gpus


@pytest.fixture
def cuda_ipc(gpus: Gpus) -> ModuleType:
    return importlib.import_module("atoll.weights.transport.cuda_ipc")


def fleet_on(cuda_ipc: ModuleType, gpus: Gpus, first: int) -> Fleet:
    """Trainer rank r on device r, TP2 x DP2; a replica of TP2 on devices `first` and `first` + 1."""

    def sender(rank: int):
        def open_sender(part_bytes):
            with gpus.on(rank):
                return cuda_ipc.CudaIpcSender(part_bytes)

        return open_sender

    def receiver(rank: int):
        with gpus.on(first + rank):
            return cuda_ipc.CudaIpcReceiver()

    return Fleet(shards(2, 2), shards(2, gap=3), open_sender=sender, open_receiver=receiver)


@pytest.mark.parametrize("first", [0, 2])
def test_ranks_of_a_trainer_push_to_a_replica_of_two_ranks_on_their_gpus(cuda_ipc, gpus, first):
    """The plan chooses senders without regard to GPUs."""
    fleet = fleet_on(cuda_ipc, gpus, first)
    sent = {(int(t["source"]), int(t["target"])) for t in fleet.plan.transfers}
    remote = {(source, target) for source, target in sent if source != first + target}
    assert remote  # or the test would show nothing
    for seed, version in enumerate((V1, V2)):
        model = fleet.train(seed)
        streams = [stream for part in fleet.push(version) for stream in part.streams]
        assert_equal(fleet.live(fleet.replica), model)
        targets = {(s.source, s.part): int(target_of(fleet, s)) for s in streams}
        expected = [
            (first + targets[s.source, s.part], s.num_bytes)
            for s in streams
            if (s.source, targets[s.source, s.part]) in remote
        ]
        assert sorted(gpus.copies) == sorted(expected)  # a reader on the sender's GPU copies nothing
        gpus.copies.clear()
    assert gpus.num_open == len(sent)


def target_of(fleet: Fleet, stream: StreamManifest) -> int:
    transfers = fleet.plan.transfers
    (first, *_) = transfers[(transfers["source"] == stream.source) & (transfers["round"] == stream.part)]
    return first["target"]


def sent(cuda_ipc: ModuleType, device: int, gpus: Gpus) -> StreamManifest:
    with gpus.on(device):
        sender = cuda_ipc.CudaIpcSender([8])
    sender.begin(ALONE)
    sender.room(0).fill_(7)
    return StreamManifest(3, *sender.send(0, 0, 8), 8, "plan", 0, 0)


def test_a_gpu_that_the_replica_does_not_see_is_named(cuda_ipc, gpus):
    stream = sent(cuda_ipc, 3, gpus)
    del gpus.uuids[3]  # the replica's process sees the others
    with pytest.raises(WeightPushError, match=r"rank 3 .* on GPU GPU-d, which .*CUDA_VISIBLE_DEVICES"):
        cuda_ipc.CudaIpcReceiver().take(stream, ALONE)


def test_devices_are_found_whatever_their_numbers(cuda_ipc, gpus):
    """The replica's own GPU is its first."""
    stream = sent(cuda_ipc, 0, gpus)
    gpus.uuids = ["GPU-c", "GPU-a"]
    receiver = cuda_ipc.CudaIpcReceiver()
    assert torch.equal(receiver.take(stream, ALONE), torch.full((8,), 7, dtype=torch.uint8))
    assert gpus.copies == [(0, 8)]
    receiver.close()
    assert gpus.num_open == 0


def test_memory_of_a_dead_trainer_is_refused(cuda_ipc, gpus):
    stream = sent(cuda_ipc, 0, gpus)
    gpus.memory.clear()
    with pytest.raises(WeightPushError, match=r"rank 3 \(cudaError 201\): it must be alive"):
        cuda_ipc.CudaIpcReceiver().take(stream, ALONE)


def test_a_segment_takes_memory_that_torch_holds_in_reserve(cuda_ipc, gpus, monkeypatch):
    """Two halves of 1 MiB: torch's cache has what is missing."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gpus.free.update({"GPU-a": 3 << 20}))
    cuda_ipc.CudaIpcSender([1 << 20])


def test_a_segment_that_does_not_fit_ends_the_rank_with_advice(cuda_ipc):
    with pytest.raises(MemoryExhaustedError, match=r"needs 4\.0 GiB on GPU 0 for two copies .*\"shm\""):
        cuda_ipc.CudaIpcSender([2 << 30])
