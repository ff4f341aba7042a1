"""The command channel: replies, errors in step, and ranks that vanish or fail half-way."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from atoll.config.schema import Role
from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.trainer import command_channel
from atoll.trainer.command_channel import (
    CommandChannel,
    RankLostError,
    SetupRefusedError,
    dismiss,
    follow,
    lead,
    translate_rank_loss,
)
from atoll.trainer.folders import AllowedFolders
from atoll.trainer.rank import Rank
from atoll.trainer.service import TrainerService
from atoll.wire.codec.batches import put_segments, split_by_groups
from atoll.wire.codec.values import decode_tensor
from atoll.wire.types import CheckpointWrite, Segments
from atoll.wire.v1 import trainer_pb2 as pb
from tests.builders import run_config
from tests.torch_ranks import run_ranks

SIZE = 2
END = timedelta(seconds=60)  # which only a hang reaches


def join(silence: timedelta = END) -> tuple[CommandChannel, command_channel.Execute]:
    """A channel, and an `execute` that fails on follower 1 where it is told to."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def execute(method: str, requests: Sequence[bytes]) -> list[bytes]:
        if method == "Fail" and rank == 1:
            raise UserError("no such thing")
        return [method.encode(), str(rank).encode(), *requests]

    return CommandChannel(silence), execute


def commands() -> None:
    channel, execute = join()
    if dist.get_rank() > 0:
        follow(channel, execute)
        return
    assert lead(channel, execute, "Echo", [b"a", b"", b"bc"]) == [[b"Echo", b"0", b"a", b"", b"bc"]]
    large = bytes(range(256)) * 20_000
    replies = lead(channel, execute, "Echo", [large], ask_all=True)
    assert replies == [[b"Echo", b"0", large], [b"Echo", b"1", large]]
    for ask_all in (False, True):
        with pytest.raises(UserError, match=r"^trainer rank 1: no such thing"):
            lead(channel, execute, "Fail", [], ask_all=ask_all)
    assert lead(channel, execute, "Still", [], ask_all=True) == [[b"Still", b"0"], [b"Still", b"1"]]
    dismiss(channel)


def lost_leader() -> None:
    channel, execute = join()
    if dist.get_rank() > 0:
        with pytest.raises(RankLostError, match="another rank of this trainer exited"):
            follow(channel, execute)
    else:
        lead(channel, execute, "Echo", [])
        dist.destroy_process_group()  # closes the connections, as its death would


def lost_follower() -> None:
    channel, execute = join()
    if dist.get_rank() > 0:
        channel.broadcast()
        dist.destroy_process_group()
    else:
        with pytest.raises(RankLostError, match="another rank of this trainer exited"):
            lead(channel, execute, "Echo", [])


def silent_follower() -> None:
    channel, execute = join(timedelta(seconds=5))  # for the meeting of both, too
    if dist.get_rank() > 0:
        channel.broadcast()
        with pytest.raises(RankLostError):  # it does not answer, and sees the leader go
            channel.broadcast()
    else:
        with pytest.raises(RankLostError, match=r"did not answer in time.*5000ms"):
            lead(channel, execute, "Echo", [])
        dist.destroy_process_group()


class Broken:
    """A rank whose leader fails in the midst of its first command, once it may go on."""

    def __init__(self) -> None:
        self.channel, _ = join()
        self.at_work, self.go_on = threading.Event(), threading.Event()

    def execute(self, method: str, requests: Sequence[bytes]) -> list[bytes]:
        self.at_work.set()
        if dist.get_rank() == 0:
            self.go_on.wait()
            raise RuntimeError("no memory")
        return []

    def lead(self, method: str, requests: Sequence[bytes], *, ask_all: bool) -> list[list[bytes]]:
        return lead(self.channel, self.execute, method, requests, ask_all=ask_all)

    def writing(self, role: str, path: str) -> "Future[CheckpointWrite]":
        raise NotImplementedError

    def dismiss(self) -> None:
        dismiss(self.channel)

    def close(self) -> None:
        dist.destroy_process_group()


def failing_leader(caller_leaves: bool) -> None:
    """It ends at once, although the follower waits until its answer is taken, whoever waits for its own."""
    rank = Broken()
    if dist.get_rank() > 0:
        with pytest.raises(RankLostError):
            follow(rank.channel, rank.execute)
    else:
        asyncio.run(fail(rank, caller_leaves=caller_leaves))


async def fail(rank: Broken, *, caller_leaves: bool) -> None:
    service = TrainerService(ThreadPoolExecutor(1), rank, AllowedFolders(Path("run")))
    first, second = (asyncio.create_task(service.run("Info", [b""])) for _ in range(2))
    await asyncio.to_thread(rank.at_work.wait)
    if caller_leaves:
        first.cancel()
    rank.go_on.set()
    with pytest.raises(RuntimeError, match="no memory"):
        await service.wait_for_failure()
    with pytest.raises(asyncio.CancelledError if caller_leaves else ServiceUnavailableError):
        await first
    with pytest.raises(ServiceUnavailableError, match="an earlier call failed midway"):
        await second
    await service.close()


def nccl_error(kind: str, interpretation: str, last: str) -> dist.DistBackendError:
    """As PyTorch words it (NCCLUtils.cpp)."""
    return dist.DistBackendError(
        f"NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:93, {kind} "
        f"(run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\n{interpretation}\nLast error:\n{last}"
    )


CUDA_FAILED = nccl_error(
    "unhandled cuda error",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Cuda failure 700 'an illegal memory access was encountered'",
)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), CUDA_FAILED], ids=["shapes", "cuda"])
def test_an_error_of_this_rank_is_no_loss_of_another(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised, translate_rank_loss():
        raise error
    assert raised.value is error


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
            "^Duplicate GPU detected : rank 1 and .* CUDA device 1b000: each rank needs its own GPU",
        ),
        (
            "Mismatched NCCL version detected : rank 0 version 22907 rank 1 version 23007",
            "rank 1 version 23007: install the same version of torch",
        ),
        ("Something else", "^Something else: set NCCL_DEBUG=WARN"),
    ],
)
def test_a_setup_that_nccl_refuses_is_named(last: str, expected: str) -> None:
    interpretation = "ncclInvalidUsage: This usually reflects invalid usage of NCCL library."
    with pytest.raises(SetupRefusedError, match=expected), translate_rank_loss():
        raise nccl_error("invalid usage", interpretation, last)


def test_a_peer_that_nccl_lost_is_a_lost_rank() -> None:
    interpretation = (
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting "
        "prematurely."
    )
    with pytest.raises(RankLostError, match="another rank of this trainer exited"), translate_rank_loss():
        raise nccl_error("remote process exited", interpretation, "Call to recv failed : Broken pipe")


@pytest.mark.parametrize(
    "scene",
    [
        commands,
        lost_leader,
        lost_follower,
        silent_follower,
        pytest.param(partial(failing_leader, False), id="failing_leader"),
        pytest.param(partial(failing_leader, True), id="failing_unseen"),
    ],
)
def test_scene(scene: Callable[[], None]) -> None:
    assert len(run_ranks(scene, SIZE)) == SIZE


def compute(model: Path, role: Role) -> int:
    """Computes log-probabilities or values of 10,000 tokens on two data-parallel ranks. Returns what the
    leader has, in numbers, and what the follower has sent, in bytes."""
    section = {"parallel": {"data": 2}}
    config = run_config(
        {
            "model": {"path": model},
            "trainer": section,
            "critic": section,
            "coordinator": {"request_timeout_s": 90.0},
        },
        algorithm={"advantage": "gae", "kl": None},
    )
    rank = Rank(config, role, "127.0.0.1")
    for group, timeout_s in (
        (dist.group.WORLD, 90),
        (parallel_state.get_data_parallel_group(), 120),  # Megatron takes minutes
    ):
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=timeout_s)
    sent, send = [], dist.send

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        sent.append(tensor.numel() * tensor.element_size())
        send(tensor, *args, **kwargs)

    dist.send = counted  # of this process alone
    if dist.get_rank() > 0:
        rank.follow()
        rank.close()
        return sum(sent[:2])  # the size of its answer, and the answer
    method, request, reply, field = {
        "actor": ("ComputeLogprobs", pb.ComputeLogprobsRequest, pb.ComputeLogprobsReply, "logprobs"),
        "critic": ("ComputeValues", pb.ComputeValuesRequest, pb.ComputeValuesReply, "values"),
    }[role]
    segments = Segments(
        np.arange(10_000, dtype=np.int32) % 60,
        np.arange(0, 10_001, 10),
        np.full(1000, -1, np.int32),
        np.arange(1000, dtype=np.int32),
    )
    chunks = [request(role=role) for _ in range(3)]
    for chunk, (part, _) in zip(chunks, split_by_groups(segments, 4000), strict=True):
        put_segments(chunk.segments, part)
    [replies] = rank.lead(method, [chunk.SerializeToString() for chunk in chunks], ask_all=False)
    values = [decode_tensor(getattr(reply.FromString(data), field)) for data in replies]
    assert list(map(len, values)) == [4000, 4000, 2000]
    with pytest.raises(UserError, match=f"the request is not a {request.__name__}"):
        rank.lead(method, [b"\xff"], ask_all=False)
    rank.dismiss()
    rank.close()
    return sum(map(len, values))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_follower_sends_no_values_that_nobody_reads(role: Role, tiny_qwen2: Path) -> None:
    num_values, num_bytes_sent = run_ranks(compute, SIZE, tiny_qwen2, role)
    assert num_values == 10_000
    assert num_bytes_sent == 8 + 16  # [T] would be 40,000
