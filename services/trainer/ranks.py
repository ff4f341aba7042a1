"""The command channel of a trainer fleet: rank 0 (the leader) gives commands, all ranks run them.

A command is a method name and serialized requests, broadcast as bytes over a gloo group of its own;
each rank answers with a serialized reply. A rank that dies closes its connections, which ends whatever
wait the others are in with RankLostError: nobody waits for a dead rank.
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
ANSWER_TIMEOUT = timedelta(minutes=10)  # the leader waits so long for a follower, its own part being done
LEADER = 0
STOP = ""  # the method name that ends the followers

Execute = Callable[[str, Sequence[bytes]], bytes]  # (method, requests) -> reply


class RankLostError(Exception):
    """Another rank of the fleet died, or hangs. What this rank holds may be half an update: it must end."""


class CommandChannel:
    """Call it from one thread on every rank; all ranks broadcast and gather in the same order."""

    def __init__(self) -> None:
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        timeout = ANSWER_TIMEOUT if self._rank == LEADER else IDLE_TIMEOUT
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def broadcast(self, parts: Sequence[bytes] = ()) -> list[bytes]:
        """Returns the leader's `parts` on every rank; followers pass none and wait."""
        lengths = np.array([len(part) for part in parts], "<i8")
        header = torch.tensor([len(parts), int(lengths.sum())])
        with watched():
            dist.broadcast(header, LEADER, group=self._group)
            num_parts, num_bytes = header.tolist()
            frame = torch.empty(8 * num_parts + num_bytes, dtype=torch.uint8)
            if self._rank == LEADER:
                frame = _bytes_tensor(lengths.tobytes() + b"".join(parts))
            dist.broadcast(frame, LEADER, group=self._group)
        data = frame.numpy().tobytes()
        ends = np.cumsum(np.frombuffer(data[: 8 * num_parts], "<i8")) + 8 * num_parts
        return [data[start:end] for start, end in zip([8 * num_parts, *ends], ends, strict=False)]

    def gather(self, part: bytes) -> list[bytes]:
        """Returns every rank's part, in rank order, on the leader; nothing on followers."""
        length = torch.tensor([len(part)])
        if self._rank != LEADER:
            with watched():
                dist.send(length, LEADER, group=self._group)
                dist.send(_bytes_tensor(part), LEADER, group=self._group)
            return []
        parts = [part]
        with watched():
            for rank in range(1, self._size):
                dist.recv(length, rank, group=self._group)
                frame = torch.empty(int(length), dtype=torch.uint8)
                dist.recv(frame, rank, group=self._group)
                parts.append(frame.numpy().tobytes())
        return parts


@contextmanager
def watched() -> Iterator[None]:
    """Turns the failure of a collective into RankLostError: this rank is well, and only noticed."""
    try:
        yield
    except RuntimeError as error:
        is_of_peer = isinstance(error, dist.DistBackendError | dist.DistStoreError) or "gloo" in str(error)
        if not is_of_peer:
            raise
        raise RankLostError(
            f"another rank of this trainer is gone, or did not answer in time; its own log says why ({error})"
        ) from error


def lead(channel: CommandChannel, execute: Execute, method: str, requests: Sequence[bytes]) -> list[bytes]:
    """Runs a command on every rank, this one included; returns their replies in rank order.

    An AtollError leaves the ranks in step and is raised here, of its own class, whichever rank it came from.
    Any other exception of `execute` may leave half an update behind: the caller must end the process.
    """
    channel.broadcast([method.encode(), *requests])
    error: AtollError | None = None
    reply = b""
    try:
        reply = execute(method, requests)
    except AtollError as raised:
        error = raised
    replies = channel.gather(_answer(reply, error))
    if error is not None:
        raise error
    for rank, answer in enumerate(replies):
        if answer[:1] != b"\0":
            name, _, text = answer[1:].decode().partition(" ")
            raise getattr(errors, name, AtollError)(f"trainer rank {rank}: {text}")
    return [answer[1:] for answer in replies]


def follow(channel: CommandChannel, execute: Execute) -> None:
    """Runs the leader's commands until it says stop. Waits for the next one; unblocked by the leader's
    command or its death, which raises RankLostError."""
    while True:
        name, *requests = channel.broadcast()
        method = name.decode()
        if method == STOP:
            return
        try:
            answer = _answer(execute(method, requests), None)
        except AtollError as error:
            answer = _answer(b"", error)
        channel.gather(answer)


def dismiss(channel: CommandChannel) -> None:
    """Ends the followers."""
    channel.broadcast([STOP.encode()])


def _answer(reply: bytes, error: AtollError | None) -> bytes:
    return b"\0" + reply if error is None else b"\1" + f"{type(error).__name__} {error}".encode()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
