"""Weights from GPU to GPU: device memory by handle, and CuPy's NCCL with as many ranks as there are GPUs. The
protocol is tested on CPUs over tcp (tests/unit/test_weight_transports.py)."""

import importlib
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from atoll.config.transports import TRANSPORTS
from atoll.rollout.refit import Refit
from atoll.runtime.errors import WeightPushError
from atoll.trainer.publish import DTYPES, Publisher
from atoll.weights.boxes import copy_part, device_checksum
from atoll.weights.delta import decode, encode
from atoll.weights.plan import plan
from atoll.weights.transport.base import open_receiver, open_sender
from atoll.wire.types import Membership, PublishedPart, PublishRequest, PushPart, Version
from tests.torch_ranks import run_ranks
from tests.unit.weight_layouts import Shard, random_model, shards

V0, V1, V2 = (Version("a3f0", number) for number in range(3))
DEADLINE_S = 20.0

needs_cupy = pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")


def test_checksums_equal_those_of_the_same_bytes_on_a_cpu():
    sources = [torch.randn(rows, 2047) for rows in (1, 7, 15_000)]  # the part has 15 blocks of words
    data = torch.cat([source.bfloat16().view(-1) for source in sources]).view(torch.uint8)
    part = torch.zeros_like(data, device="cuda")
    pieces = part.view(torch.bfloat16).split([source.numel() for source in sources])
    packed = [piece.view(source.shape) for piece, source in zip(pieces, sources, strict=True)]
    expected = int(device_checksum(data)) % 2**64
    assert copy_part(part, packed, [source.cuda() for source in sources]) == expected
    assert torch.equal(part.cpu(), data)


def test_deltas_are_those_of_a_cpu():
    old = torch.randn(100_000).bfloat16()
    new = old.clone()
    new[::997] += 1
    delta = encode(old, new)
    on_device = encode(old.cuda(), new.cuda())
    assert on_device.is_cuda
    assert torch.equal(on_device.cpu(), delta)
    decoded = old.cuda()
    decode(on_device, decoded)
    assert torch.equal(decoded.cpu(), new)


def check_pushes(transport: str, dtype: str, delta: bool, on_host: bool = False) -> None:
    """Rank 0 trains, the others are replicas of one rank; the process group carries only manifests.
    `on_host`: the trainer holds the first tensors there, as it does those with merged adapters."""
    dist.init_process_group("gloo")
    rank, num_members = dist.get_rank(), dist.get_world_size() - 1
    torch.cuda.set_device(rank % torch.cuda.device_count())
    (source,), (target,) = shards(1), shards(1, dtype=DTYPES[dtype], gap=3)
    weight_plan = plan([source.shard_layout], [target.shard_layout], part_elements=256)
    mine = [buffer.cuda() for buffer in (target if rank else source).buffers]
    if on_host and rank == 0:
        mine[0] = mine[0].cpu()
    publisher = refit = None
    if rank == 0:
        publisher = Publisher(
            0,
            mine,
            lambda parts: open_sender(transport, DEADLINE_S, "", parts),
            delta=delta,
            stays_readable=TRANSPORTS[transport].stays_readable,
        )
    else:
        staging = "host" if rank == 2 else "device"
        refit = Refit(mine, V0, open_receiver(transport, DEADLINE_S), in_place=True, staging=staging)
    model = random_model(1)
    for version in (V1, V2):
        for tensor in model.values():
            tensor[-1, -1] += 1
        expected = {name: tensor.to(DTYPES[dtype]).float() for name, tensor in model.items()}
        last, part, num_bytes = False, 0, 0
        while not last:
            published: list[PublishedPart | None] = [None]
            if publisher is not None:
                Shard(source.shard_layout, mine).fill(model)
                assert [buffer.is_cuda for buffer in mine] == [not on_host, *[True] * (len(mine) - 1)]
                members = {weight_plan.id: Membership(1, num_members)}
                published = [publisher.publish(PublishRequest(version, dtype, members, [weight_plan], part))]
            dist.broadcast_object_list(published)
            assert published[0] is not None
            last, part = published[0].last, part + 1
            num_bytes += published[0].num_bytes
            if refit is not None:
                membership = Membership(1, num_members, rank - 1)
                if transport == "cuda_ipc" and part == 1:
                    wrong = [replace(s, checksum=s.checksum ^ 1) for s in published[0].streams]
                    with pytest.raises(WeightPushError, match="nothing was committed"):
                        refit.receive(PushPart(version, wrong, weight_plan, membership))
                refit.receive(PushPart(version, published[0].streams, weight_plan, membership))
            dist.barrier()
        assert (num_bytes < 1000) == (delta and version == V2)
        if refit is not None:
            got = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
            live = refit.commit(version)
            assert all(buffer.is_cuda for buffer in live)
            Shard(target.shard_layout, [buffer.cpu() for buffer in live]).read_into(got)
            for name, tensor in expected.items():
                torch.testing.assert_close(got[name], tensor, rtol=0, atol=0, msg=name)
    dist.barrier()
    if publisher is not None:
        publisher.close()
    dist.destroy_process_group()


@needs_cupy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pushes_in_the_memory_of_one_gpu(dtype):
    """The assertions are in check_pushes, on every rank."""
    run_ranks(check_pushes, 3, "cuda_ipc", dtype, False)


@needs_cupy
def test_pushes_of_merged_adapters():
    """The assertions are in check_pushes, on every rank."""
    run_ranks(check_pushes, 3, "cuda_ipc", "bfloat16", False, True)


@needs_cupy
@pytest.mark.parametrize("delta", [False, True])
def test_pushes_between_gpus(delta):
    """The assertions are in check_pushes, on every rank."""
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip("NCCL has one rank per GPU, and here is one")
    run_ranks(check_pushes, num_gpus, "nccl", "bfloat16", delta)


def check_nccl_alone() -> None:
    nccl = importlib.import_module("atoll.weights.transport.nccl")
    sender = nccl.open_sender(DEADLINE_S, [1 << 20] * 4)
    sender.begin(Membership(1, 0))
    for part in range(4):
        room = sender.room(part)
        assert room.is_cuda
        room.fill_(part)
        _, offset = sender.send(part, 0, 1 << 20)
        assert offset == part << 20
    sender.room(3)
    sender.begin(Membership(2, 2))  # whom nobody joins
    sender.room(0)
    sender.send(0, 0, 1 << 20)
    sender.close()  # ends the wait for them


@needs_cupy
def test_nccl_with_the_sender_alone():
    """What one GPU can test: a communicator of one rank broadcasts, and one with missing ranks is abandoned.

    The assertions are in check_nccl_alone.
    """
    run_ranks(check_nccl_alone, 1, timeout_s=DEADLINE_S)
