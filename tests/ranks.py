"""Starts a function on several torch.distributed ranks, each its own process."""

import faulthandler
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240) -> list[Any]:
    """Calls `function(*args)` on every rank with torchrun's variables set; returns what the ranks returned.

    `function` is a module's own (it is imported by name), arguments and results are small and picklable.
    The first rank that fails ends all of them, and its traceback is the error. At the deadline each rank
    that still runs prints where it stands.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    ranks, pipes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_call, args=(sender, function, rank, world_size, port, timeout_s, args), daemon=True
        )
        process.start()
        sender.close()
        ranks.append(process)
        pipes.append(receiver)
    try:
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, deadline - time.monotonic())
        if not ready:
            missing = sorted(set(range(len(pipes))) - results.keys())
            raise TimeoutError(f"ranks {missing} did not finish in time; their stacks are on stderr")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                error, results[rank] = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word; see its stderr") from None
            if error:
                raise AssertionError(f"rank {rank} of {len(pipes)} failed:\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _call(
    answer: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(max(timeout_s - 1, 0.1), file=sys.__stderr__)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    try:
        answer.send(("", function(*args)))
    except BaseException:
        answer.send((traceback.format_exc(), None))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
