"""The command channel: replies, errors in step, and ranks that vanish."""

from collections.abc import Callable, Sequence

import pytest
import torch.distributed as dist

from services.runtime.errors import AtollError, UserError
from services.trainer.ranks import CommandChannel, RankLostError, dismiss, follow, lead
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
    with pytest.raises(AtollError, match="trainer rank 1: no such thing"):
        lead(channel, execute, "Fail", [])
    assert lead(channel, execute, "Still", []) == [b"Still|0", b"Still|1"]
    dismiss(channel)


def lost_leader() -> None:
    channel, execute = join()
    if dist.get_rank() > 0:
        with pytest.raises(RankLostError, match=r"rank 1: the leader \(rank 0\) or a follower is gone"):
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
        with pytest.raises(RankLostError, match="a follower is gone"):
            lead(channel, execute, "Echo", [])


@pytest.mark.parametrize("scene", [commands, lost_leader, lost_follower])
def test_scene(scene: Callable[[], None]) -> None:
    assert len(run_ranks(scene, SIZE)) == SIZE
