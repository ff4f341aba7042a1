"""Runs a session's program and leaves no process of it behind: `python -I -S supervisor.py`, by command.py.

Whatever the program starts stays below this process, even what leaves its process group: the kernel hands
orphans to the nearest subreaper. Stdin is a socket to the agents' process. A byte from there ends the
program, as does the end of the agents' process, which closes the socket however it dies. The program's exit
code goes back as text once nothing of it runs.
"""

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import time

TERM_GRACE_S = 2.0  # between SIGTERM and SIGKILL; less than the runner's CANCEL_GRACE_S
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_AGENTS = 0  # file descriptor of the socket
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # by this process, which still has to clean up
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def main(folder: str, stdin: str, memory: str, cpu_s: str, file_size: str, *command: str) -> None:
    """`folder` is removed if the agents' process has died. Sizes are in bytes."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    wakeups, wakeup = os.pipe()
    for descriptor in (wakeups, wakeup):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    program = os.fork()
    if program == 0:
        _limit(resource.RLIMIT_DATA, int(memory))
        _limit(resource.RLIMIT_CPU, int(cpu_s))
        _limit(resource.RLIMIT_FSIZE, int(file_size))
        _execute(stdin, command)
    exit_code = _wait(program, wakeups)
    _end(program, wakeups)
    try:
        os.write(_AGENTS, str(exit_code).encode())
    except BrokenPipeError:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _execute(stdin: str, command: tuple[str, ...]) -> None:
    """Does not return."""
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number in (*_IGNORED, *_IGNORED_BY_PYTHON):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(stdin, os.O_RDONLY), _AGENTS)
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)  # as shells do


def _limit(kind: int, value: int) -> None:
    """Above the soft limit, the kernel sends a signal that names the cause; above the hard one, SIGKILL."""
    _, most = resource.getrlimit(kind)
    soft, hard = (min(each, most) if most != resource.RLIM_INFINITY else each for each in (value, value + 1))
    resource.setrlimit(kind, (soft, hard))


def _wait(program: int, wakeups: int) -> int:
    """The program's exit code; that of SIGTERM if it is to be ended."""
    while True:
        ready, _, _ = select.select([_AGENTS, wakeups], [], [])
        if _AGENTS in ready:
            os.read(_AGENTS, 1)
            return -signal.SIGTERM
        os.read(wakeups, 4096)
        ended, _ = _reap()
        if program in ended:
            return os.waitstatus_to_exitcode(ended[program])


def _end(program: int, wakeups: int) -> None:
    """Ends all that is left of the program, first politely."""
    deadline = time.monotonic() + TERM_GRACE_S
    _, is_any_left = _reap()
    if is_any_left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program, signal.SIGTERM)
    while is_any_left and (left_s := deadline - time.monotonic()) > 0:
        select.select([wakeups], [], [], left_s)
        with contextlib.suppress(BlockingIOError):
            os.read(wakeups, 4096)
        _, is_any_left = _reap()
    while is_any_left:
        for child, group in _children():
            with contextlib.suppress(ProcessLookupError):
                if group == os.getpgrp():  # it has not come to its setsid yet
                    os.kill(child, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # children of the dead arrive here
        _, is_any_left = _reap()


def _reap() -> tuple[dict[int, int], bool]:
    """Statuses of children that have ended, and whether there are others."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended[pid] = status


def _children() -> list[tuple[int, int]]:
    """Each with its process group."""
    children = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as stat:
            _, parent, group, *_ = stat.read().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                children.append((int(name), int(group)))
    return children


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    main(*sys.argv[1:])
