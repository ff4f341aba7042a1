"""The command channel of a trainer fleet: rank 0 (the leader) broadcasts commands, all ranks run them.

A command is a method name and serialized requests, broadcast as bytes over a gloo group of its own. Each
follower answers that it is done, or with its error, and with its reply only if the leader reads it. A dying
rank closes its connections, which ends waits of the other ranks with RankLostError.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from atoll.runtime import errors
from atoll.runtime.errors import AtollError

IDLE_TIMEOUT = timedelta(days=365)  # followers wait for the next command as long as the leader lives
LEADER = 0
STOP = ""  # the method name that ends the followers
_DONE, _REPLY = b"", b"reply"  # what the leader wants to hear of them: that they have done it, or its reply

Execute = Callable[[str, Sequence[bytes]], list[bytes]]  # (method, requests) -> replies, one or a stream's


# What NCCL's errors hold if another rank is to blame; PyTorch words all of them as DistBackendError.
NCCL_RANK_LOST = (
    "ncclRemoteError",
    "closed by remote peer",
    "reset by peer",
    "collective operation timeout",
)
NCCL_REFUSED = {  # what to do about errors of the setup
    "Duplicate GPU": "each rank needs its own GPU: give this role as many GPUs as it has ranks",
    "using the same GPU": "each rank needs its own GPU: give this role as many GPUs as it has ranks",
    "Mismatched NCCL version": "install the same version of torch for all ranks",
    "ncclInvalidUsage": "set NCCL_DEBUG=WARN and see its log",
    "ncclInvalidArgument": "set NCCL_DEBUG=WARN and see its log",
}


class RankLostError(Exception):
    """Another rank of the fleet died, or hangs. What this rank holds may be half an update: it must end."""


class SetupRefusedError(Exception):
    """NCCL does not connect ranks that are set up like these. A restart would not help."""


class CommandChannel:
    """Call it from one thread on every rank; all ranks broadcast and gather in the same order."""

    def __init__(self, silence: timedelta = timedelta(minutes=10)) -> None:
        """`silence`: how long the leader waits for a follower's reply, after its own part."""
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        timeout = silence if self._rank == LEADER else IDLE_TIMEOUT
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def broadcast(self, parts: Sequence[bytes] = ()) -> Sequence[bytes]:
        """Returns the leader's `parts` on every rank; followers pass none and wait."""
        frame = _framed(parts)
        size = torch.tensor([len(frame)])
        with translate_rank_loss():
            dist.broadcast(size, LEADER, group=self._group)
            if self._rank != LEADER:
                frame = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(frame, LEADER, group=self._group)
        return parts if self._rank == LEADER else _parts(frame)

    def send(self, parts: Sequence[bytes]) -> None:
        """Sends a follower's answer to the leader."""
        frame = _framed(parts)
        with translate_rank_loss():
            dist.send(torch.tensor([len(frame)]), LEADER, group=self._group)
            dist.send(frame, LEADER, group=self._group)

    def gather(self) -> list[list[bytes]]:
        """Returns every follower's answer, in rank order, on the leader."""
        answers, size = [], torch.tensor([0])
        with translate_rank_loss():
            for rank in range(1, self._size):
                dist.recv(size, rank, group=self._group)
                frame = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(frame, rank, group=self._group)
                answers.append(_parts(frame))
        return answers


@contextmanager
def translate_rank_loss() -> Iterator[None]:
    """Translates a failed collective to RankLostError if the cause is on another rank, and to
    SetupRefusedError if it would fail again. Others, such as an error of this GPU, pass."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "NCCL" in text:
            for sign, advice in NCCL_REFUSED.items():
                if sign in text:
                    raise SetupRefusedError(f"{_nccl_cause(text)}: {advice}") from error
            is_of_peer = any(sign in text for sign in NCCL_RANK_LOST)
        else:
            is_of_peer = isinstance(error, dist.DistBackendError | dist.DistStoreError) or "gloo" in text
        if not is_of_peer:
            raise
        raise RankLostError(
            f"another rank of this trainer exited or did not answer in time; see its log ({error})"
        ) from error


def _nccl_cause(text: str) -> str:
    """The line that says it, of the several that PyTorch makes of NCCL's error."""
    return (text.rpartition("Last error:")[2].strip() or text).splitlines()[0]


def lead(
    channel: CommandChannel,
    execute: Execute,
    method: str,
    requests: Sequence[bytes],
    *,
    ask_all: bool = False,
) -> list[list[bytes]]:
    """Runs a command on every rank, this one included; returns this rank's replies, and with `ask_all` those
    of the others, in rank order.

    An AtollError leaves the ranks in step and is raised here, of its own class, whichever rank it came from.
    Any other exception of `execute` may leave half an update behind: the caller must end the process.
    """
    channel.broadcast([method.encode(), _REPLY if ask_all else _DONE, *requests])
    error: AtollError | None = None
    replies: list[list[bytes]] = []
    try:
        replies.append(execute(method, requests))
    except AtollError as raised:
        error = raised
    answers = channel.gather()
    if error is not None:
        raise error
    for rank, [error_text, *reply] in enumerate(answers, start=1):
        if error_text:
            name, _, text = error_text.decode().partition(" ")
            raise getattr(errors, name, AtollError)(f"trainer rank {rank}: {text}")
        if ask_all:
            replies.append(reply)
    return replies


def follow(channel: CommandChannel, execute: Execute) -> None:
    """Runs the leader's commands until it says stop. Waits for the next one; unblocked by the leader's
    command or its death, which raises RankLostError."""
    while True:
        name, answer, *requests = channel.broadcast()
        method = name.decode()
        if method == STOP:
            return
        try:
            replies = execute(method, requests)
        except AtollError as error:
            channel.send([f"{type(error).__name__} {error}".encode()])
        else:
            channel.send([b"", *(replies if answer == _REPLY else [])])


def dismiss(channel: CommandChannel) -> None:
    """Ends the followers."""
    channel.broadcast([STOP.encode(), _DONE])


def _framed(parts: Sequence[bytes]) -> torch.Tensor:
    """uint8: the number of parts, their lengths, the parts."""
    lengths = np.array([len(parts), *(len(part) for part in parts)], "<i8").tobytes()
    return torch.frombuffer(bytearray().join([lengths, *parts]), dtype=torch.uint8)


def _parts(frame: torch.Tensor) -> list[bytes]:
    """The inverse."""
    data = frame.numpy().data
    num_parts = int(np.frombuffer(data, "<i8", 1)[0])
    lengths = np.frombuffer(data, "<i8", num_parts, offset=8)
    ends = 8 * (1 + num_parts) + np.cumsum(lengths)
    return [bytes(data[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
