"""A clean interpreter with programs' usual modules imported, which forks for each program. Imports only the
standard library: the host starts it as `python -I -S -c`, with the sources of this file and its imports.

The protocol with the host: messages of one struct each, over a socket that preserves message boundaries; an
order carries descriptors.
"""

import gc
import importlib
import os
import select
import signal
import site
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from atoll.reward.sandbox import kernel, landlock, namespaces, program

# Run, whether to kill it, memory and disk in bytes, seconds of CPU time; with descriptors of the source and
# of program.STREAMS
ORDER = struct.Struct("<I?QQI")
# Run, whether it has ended, status as of waitpid, seconds of CPU time. Before its end a run may be reported
# once, to be parked: it sleeps (status 1), or has got the lowest priority (status 0).
REPORT = struct.Struct("<I?id")
READY = b"ready"  # the first message; any other is an error

LOOK_S = 0.1
# A zygote that stands still for this long (SIGSTOP, a frozen cgroup) ends with its programs, which may have
# stood still as well: their deadlines would end them for no fault of theirs.
STILL_S = 2.0
# of CPU time, after which a program gets the lowest priority, to limit what busy loops take from others
SHARE_S, NICENESS_AFTER = 0.5, 19

# Modules that programs import most, and all of the standard library that needs shared libraries of the host,
# which a program cannot open
PRELOADED_MODULES = """
    abc array ast asyncio atexit base64 bisect bz2 calendar cmath codecs collections.abc contextlib copy csv
    ctypes dataclasses datetime decimal enum fractions functools hashlib heapq hmac inspect io itertools json
    keyword linecache lzma math numbers operator pprint queue random re secrets sqlite3 ssl statistics string
    struct textwrap threading time timeit traceback types typing unicodedata uuid weakref zlib
"""


def main(descriptor: int, with_namespaces: bool, filter: bytes) -> None:
    """Ends with the host: when its socket closes, or the parent process is gone. Even if it is stopped: the
    kernel kills it with the thread of the host that started it."""
    host = socket.socket(fileno=descriptor)
    host_process = os.pidfd_open(os.getppid())
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, programs are killed first
        for name in PRELOADED_MODULES.split():
            importlib.import_module(name)
        site.setquit()  # exit() and quit(), which -S omits
        readable = [path for path in sys.path if os.path.isdir(path)]
        if with_namespaces:
            namespaces.enter([*readable, os.devnull])
        # after entering a user namespace, which resets it
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if with_namespaces:
            _leave_to_child()
        walls = program.Confinement(
            _ruleset(readable, with_namespaces), filter, with_namespaces, os.pidfd_open(os.getpid())
        )
        for name in [name for name in sys.modules if name.startswith("atoll.")]:
            del sys.modules[name]
        gc.collect()
        gc.freeze()  # the garbage collector of a fork does not touch, and so copy, this memory
    except BaseException as error:
        host.send(f"{type(error).__name__}: {error}".encode())
        sys.exit(1)  # the host reports the error, or does without namespaces
    host.send(READY)
    Zygote(host, walls).serve(host_process)


def _leave_to_child() -> None:
    """Returns in a child, the first process of its namespace. Each process ends with the other; on SIGTERM,
    the parent waits for the child, which would otherwise be orphaned."""
    own = os.pidfd_open(os.getpid())
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os.waitpid(child, 0)
        os._exit(0)
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if select.select([own], [], [], 0)[0]:  # it ended before the call
        os._exit(0)
    os.close(own)


def _ruleset(readable: Sequence[str], with_namespaces: bool) -> landlock.Ruleset:
    """The standard library, without installed packages."""
    ruleset = landlock.Ruleset()
    ruleset.allow(os.devnull, landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE)
    for path in readable:
        ruleset.allow(path, landlock.READ_DIR)
        for entry in os.scandir(path):
            if entry.name not in ("site-packages", "dist-packages") and not entry.is_symlink():
                ruleset.allow(entry.path, landlock.READ if entry.is_dir() else landlock.READ_FILE)
    if with_namespaces:
        ruleset.allow(namespaces.WORK, landlock.WRITE)
    return ruleset


@dataclass(slots=True)
class ChildProgram:
    process: int
    cpu_s: float = -1.0  # at the last check
    is_parked: bool = False


class Zygote:
    def __init__(self, host: socket.socket, walls: program.Confinement) -> None:
        self._host, self._walls = host, walls
        self._programs: dict[int, ChildProgram] = {}  # by run
        self._ends: dict[int, int] = {}  # runs by pidfd, which becomes readable when the process ends
        self._poll = select.poll()

    def serve(self, host_process: int) -> None:
        """Forks for each order and reports each end, until the host is gone or this process has stood still
        for STILL_S. Waits for orders and ends, and checks running programs every LOOK_S; never waits for a
        single program."""
        look_at = awake_at = 0.0
        self._poll.register(self._host, select.POLLIN)
        self._poll.register(host_process, select.POLLIN)
        while True:
            is_busy = bool(self._programs)
            events = self._poll.poll(LOOK_S * 1000 if is_busy else None)
            stood_since, awake_at = awake_at, time.monotonic()
            if is_busy and awake_at - stood_since > LOOK_S + STILL_S:
                return
            for descriptor, _ in events:
                if descriptor in self._ends:
                    self._report(descriptor)
                elif descriptor == host_process or not self._obey():
                    return
            if time.monotonic() >= look_at:
                self._look()
                look_at = time.monotonic() + LOOK_S

    def _obey(self) -> bool:
        """Returns False once the host has closed its end."""
        message, descriptors, _, _ = socket.recv_fds(self._host, ORDER.size, 1 + len(program.STREAMS))
        if not message:
            return False
        run, kill, *limits = ORDER.unpack(message)
        if kill:
            if run in self._programs:
                os.kill(self._programs[run].process, signal.SIGKILL)
            return True
        try:
            self._start(run, program.ProgramOrder(descriptors[0], descriptors[1:], *limits))
        except OSError as error:  # out of memory, or too many processes
            os.write(descriptors[1], f"fork: {error}".encode())
            self._host.send(REPORT.pack(run, True, 0, 0.0))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, run: int, order: program.ProgramOrder) -> None:
        if self._walls.namespaces:
            namespaces.next_child_is_first(self._walls.zygote)
        process = os.fork()
        if process == 0:
            program.run(order, self._walls)
        descriptor = os.pidfd_open(process)
        self._programs[run] = ChildProgram(process)
        self._ends[descriptor] = run
        self._poll.register(descriptor, select.POLLIN)

    def _report(self, descriptor: int) -> None:
        run = self._ends.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status, usage = os.wait4(self._programs.pop(run).process, 0)
        self._host.send(REPORT.pack(run, True, status, usage.ru_utime + usage.ru_stime))

    def _look(self) -> None:
        """Checks for programs that sleep or have used up their share."""
        for run, running in self._programs.items():
            cpu_s = time.clock_gettime(_cpu_clock(running.process))
            is_greedy, sleeps = cpu_s > SHARE_S, cpu_s == running.cpu_s
            running.cpu_s = cpu_s
            if is_greedy:
                with suppress(ProcessLookupError):  # it is ending
                    os.setpriority(os.PRIO_PGRP, running.process, NICENESS_AFTER)  # of all its threads
            if (is_greedy or sleeps) and not running.is_parked:
                running.is_parked = True
                self._host.send(REPORT.pack(run, False, not is_greedy, cpu_s))


def _cpu_clock(process: int) -> int:
    """Computed as by clock_getcpuclockid(3)."""
    return ~process << 3 | 2
