"""A fork of the zygote: confines itself, then runs a program. Imports only the standard library.

The host reads its reports. Anything but STARTED is the reason why it could not confine itself; anything after
STARTED may have been written by the program, so it is trusted no more than an exit code.
"""

import atexit
import fcntl
import io
import linecache
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType

from atoll.reward.sandbox import kernel, namespaces
from atoll.reward.sandbox.landlock import Ruleset

# the program's descriptors; an order lists them in this order and may omit the channel
STREAMS = REPORT, STDIN, STDOUT, STDERR, CHANNEL = 4, 0, 1, 2, 3
STARTED = b"\0"
_OPEN_FILES = 64
_THREADS = 64
# Without namespaces the kernel counts all threads of the user together. A program whose threads need no
# memory could use up all process ids of the machine.
_THREADS_OF_USER = 4096
_STACK_BYTES = 64 << 20
_NICENESS = 5  # lower priority than the service, which must respond
_DETAIL_BYTES = 1000
_NAME = "<program>"


@dataclass(frozen=True, slots=True)
class ProgramOrder:
    """One program to run. Descriptors are the zygote's."""

    source: int
    streams: Sequence[int]  # become those of STREAMS; the channel may be missing
    memory_bytes: int
    disk_bytes: int
    cpu_s: int


@dataclass(frozen=True, slots=True)
class Confinement:
    ruleset: Ruleset
    filter: bytes
    namespaces: bool
    zygote: int  # a descriptor of the process


def run(order: ProgramOrder, walls: Confinement) -> None:
    """Does not return."""
    code = 1
    try:
        source = _lock_in(order, walls)
        os.write(REPORT, STARTED)
        code = _main(source)
    except BaseException as error:
        _say_why(error, order)
    finally:  # whatever happens: the zygote's code is above on the stack
        os._exit(code)


def _say_why(error: BaseException, order: ProgramOrder) -> None:
    """Reports why the program was not started; the host ignores this if it was."""
    text = f"{type(error).__name__}: {error}".encode()
    try:
        os.write(order.streams[0], text)
    except OSError:  # already moved
        os.write(REPORT, text)


def _lock_in(order: ProgramOrder, walls: Confinement) -> bytes:
    """Returns the source. Apart from what is dropped here, only memory is inherited."""
    os.setsid()  # its priority is set for its process group, and so for all its threads
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([walls.zygote], [], [], 0)[0]:
        raise OSError("the zygote is gone")
    os.nice(_NICENESS)
    if walls.namespaces:
        namespaces.work_in(order.disk_bytes)
    with open(order.source, "rb", closefd=False) as file:
        source = file.read()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    walls.ruleset.restrict_self()
    _take_streams(order.streams)
    _limit(order, walls)  # only now: the zygote's descriptors, one per running program, are closed
    kernel.drop_capabilities()
    kernel.filter_system_calls(walls.filter)
    return source


def _limit(order: ProgramOrder, walls: Confinement) -> None:
    for limit, value in (
        (resource.RLIMIT_CPU, order.cpu_s),
        (resource.RLIMIT_FSIZE, order.disk_bytes if walls.namespaces else 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_NPROC, _THREADS if walls.namespaces else _THREADS_OF_USER),
        (resource.RLIMIT_AS, order.memory_bytes),
    ):
        value = _at_most(value, limit)
        resource.setrlimit(limit, (value, value))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (_at_most(_STACK_BYTES, resource.RLIMIT_STACK), hard))


def _at_most(value: int, limit: int) -> int:
    """`value`, or the hard limit if that is lower."""
    hard = resource.getrlimit(limit)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _take_streams(streams: Sequence[int]) -> None:
    """Keeps these descriptors and closes all others."""
    apart = [fcntl.fcntl(stream, fcntl.F_DUPFD, len(STREAMS)) for stream in streams]
    for stream, number in zip(apart, STREAMS, strict=False):
        os.dup2(stream, number)
    if len(streams) < len(STREAMS):
        os.closerange(CHANNEL, CHANNEL + 1)
    os.closerange(len(STREAMS), 1 << 30)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(STDIN)), "utf-8", "surrogateescape")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(STDOUT, "w")), "utf-8", "surrogateescape")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(STDERR, "w")), "utf-8", "backslashreplace", line_buffering=True
    )
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)


def _main(source: bytes) -> int:
    """Runs the program as `python FILE` does, and returns its exit code."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        code = compile(source, _NAME, "exec")
    except BaseException as error:  # SyntaxError, ValueError, RecursionError, MemoryError, OverflowError
        return _report_exception("compile error", error, None)
    status = 0
    try:
        exec(code, module.__dict__)
    except SystemExit as exit:
        status = _exit_code(exit.code)
    except BaseException as error:
        # without the frame of this function
        status = _report_exception(
            "exception", error, error.__traceback__ and error.__traceback__.tb_next, source
        )
    return _shut_down() or status


def _shut_down() -> int:
    """Does what the interpreter does at exit, except freeing memory, which the kernel does faster."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for non-daemon threads
        atexit._run_exitfuncs()
        for stream in sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__:
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:  # the program may have broken its interpreter
        return 120  # as the interpreter does if it cannot flush
    return 0


def _report_exception(
    how: str, error: BaseException, trace: TracebackType | None, source: bytes = b""
) -> int:
    try:
        lines = source.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[_NAME] = len(source), None, lines, _NAME
        traceback.print_exception(type(error), error, trace)
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    except BaseException:  # its __str__ is the program's code, too
        detail = type(error).__name__
    try:
        os.write(REPORT, f"{how}\n{detail}".encode(errors="replace")[:_DETAIL_BYTES])
    except OSError:  # it has closed the descriptor: the exit code must do
        return 1
    return 1


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1
