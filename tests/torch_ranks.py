"""Starts a function on several torch.distributed ranks, each its own process.

Ranks are forked from a server that has imported torch, Megatron and transformers, which takes eight seconds
of a core. It is started for the first test that wants ranks, and ends with the tests' process. It must not
touch CUDA, which no process can use if its parent did before the fork.
"""

import faulthandler
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, cast
from unittest.mock import patch

from atoll.runtime.ports import reserve_port

PRELOADED = (
    "tests.trainer_models",
    "tests.plain_loop",
    "atoll.trainer.checkpoint",
    "transformers.generation",
)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240) -> list[Any]:
    """Calls `function(*args)` on every rank with torchrun's variables set; returns what the ranks returned.

    `function` is a module's own (it is imported by name), arguments and results are small and picklable.
    The first rank that fails ends all of them, and its traceback is the error. At the deadline each rank
    that still runs prints where it stands.
    """
    _, server = _server()
    with reserve_port() as port:
        call = function, world_size, port, args, timeout_s, dict(os.environ), os.getcwd()
        server.send_bytes(pickle.dumps(call))  # tensors by value
        error, results = pickle.loads(server.recv_bytes())
    if error is not None:
        raise error
    return cast(list[Any], results)


@cache
def _server() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = multiprocessing.Pipe()
    paths = [path for path in sys.path if path]
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.torch_ranks import serve; serve({theirs.fileno()})"],
        pass_fds=[theirs.fileno()],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # torch.cuda.is_available() asks the driver's library alone
        },
    )
    theirs.close()
    return process, ours


@contextmanager
def forbid_cuda() -> Iterator[None]:
    """Raises AssertionError from any call that initializes CUDA, also on a machine without it."""
    import torch

    def refuse(*_: object) -> None:
        raise AssertionError("this initializes CUDA before a fork: forked processes could not use it")

    with (
        patch.object(torch._C, "_cuda_getDeviceCount", refuse, create=True),
        patch.object(torch.cuda, "_lazy_init", refuse),
    ):
        yield


def serve(descriptor: int) -> None:
    """Runs one function after another, until the other end of the pipe is closed."""
    pipe = Connection(descriptor)
    with forbid_cuda():
        for name in PRELOADED:
            import_module(name)
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        function, world_size, port, args, timeout_s, environment, folder = pickle.loads(call)
        os.environ.clear()
        os.environ |= environment
        os.chdir(folder)
        answer: tuple[Exception | None, list[Any]]
        try:
            answer = None, _run(function, world_size, port, args, timeout_s)
        except (AssertionError, TimeoutError) as error:
            answer = error, []
        pipe.send_bytes(pickle.dumps(answer))


def _run(
    function: Callable[..., Any], world_size: int, port: int, args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    context = multiprocessing.get_context("fork")
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
