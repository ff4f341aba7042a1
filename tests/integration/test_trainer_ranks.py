"""The command channel: replies, errors in step, and ranks that vanish or fail half-way."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from atoll.runtime.errors import ServiceUnavailableError, UserError
from atoll.trainer import ranks
from atoll.trainer.folders import Folders
from atoll.trainer.ranks import CommandChannel, RankLostError, dismiss, follow, lead, watched
from atoll.trainer.service import Rank, TrainerService
from atoll.wire.v1 import trainer_pb2 as pb
from tests.ranks import run_ranks

SIZE = 2


def join() -> tuple[CommandChannel, Callable[[str, Sequence[bytes]], bytes]]:
    """A channel, and an `execute` that fails on follower 1 where it is told to."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def execute(method: str, requests: Sequence[bytes]) -> bytes:
        if method == "Fail" and rank == 1:
            raise UserError("no such thing")
        return b"|".join([method.encode(), str(rank).encode(), *requests])

    return CommandChannel(), execute


def commands() -> None:
    channel, execute = join()
    if dist.get_rank() > 0:
        follow(channel, execute)
        return
    assert lead(channel, execute, "Echo", [b"a", b"", b"bc"]) == [b"Echo|0|a||bc", b"Echo|1|a||bc"]
    large = bytes(range(256)) * 20_000
    assert lead(channel, execute, "Echo", [large]) == [b"Echo|0|" + large, b"Echo|1|" + large]
    with pytest.raises(UserError, match=r"^trainer rank 1: no such thing"):
        lead(channel, execute, "Fail", [])
    assert lead(channel, execute, "Still", []) == [b"Still|0", b"Still|1"]
    dismiss(channel)


def lost_leader() -> None:
    channel, execute = join()
    if dist.get_rank() > 0:
        with pytest.raises(RankLostError, match="another rank of this trainer is gone"):
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
        with pytest.raises(RankLostError, match="another rank of this trainer is gone"):
            lead(channel, execute, "Echo", [])


def silent_follower() -> None:
    ranks.ANSWER_TIMEOUT = timedelta(seconds=5)  # of this process alone, and for the meeting of both, too
    channel, execute = join()
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

    def execute(self, method: str, requests: Sequence[bytes]) -> bytes:
        self.at_work.set()
        if dist.get_rank() == 0:
            self.go_on.wait()
            raise RuntimeError("no memory")
        return b""

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
    service = TrainerService(ThreadPoolExecutor(1), cast(Rank, rank), Folders(Path("run")))
    context = cast(Any, None)
    first, second = (asyncio.create_task(service.Info(pb.TrainerInfoRequest(), context)) for _ in range(2))
    await asyncio.to_thread(rank.at_work.wait)
    if caller_leaves:
        first.cancel()
    rank.go_on.set()
    with pytest.raises(RuntimeError, match="no memory"):
        await service.failed()
    with pytest.raises(asyncio.CancelledError if caller_leaves else ServiceUnavailableError):
        await first
    with pytest.raises(ServiceUnavailableError, match="an earlier call failed half-way"):
        await second
    await service.close()


def test_an_error_of_this_rank_is_no_loss_of_another() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), watched():
        raise RuntimeError("shapes differ")


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
