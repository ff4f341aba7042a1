"""Attacks on other processes: the host's, an ordinary one of the same user, a sibling program, the zygotes.

`host.pids` has all of them; in a pid namespace their numbers differ, so low numbers are tried as well.
"""

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct

from atoll.wire.types import ProgramStatus
from tests.sandbox.preamble import attempts, call, libc, seen

ENDS: dict[str, set[ProgramStatus]] = {}


def kill_others(host):
    return attempts(*((os.kill, pid, signal.SIGKILL) for pid in host["pids"]))


def kill_parent(host):
    pid = os.getppid()
    return pid > 1 and attempts(
        (os.kill, pid, signal.SIGKILL), (os.kill, pid, signal.SIGSTOP), (os.kill, pid, 0)
    )


def kill_all(host):
    return attempts((os.kill, -1, 0))  # 0: whoever it would reach besides, as this must be able to fail


def kill_group(host):
    return attempts((os.kill, 0, 0), (os.killpg, 0, 0), (os.kill, -os.getpgrp() or -1, 0))


def kill_groups_of_others(host):
    return attempts(*((os.killpg, pid, 0) for pid in host["pids"]))


def kill_low_numbers(host):
    return attempts(*((os.kill, pid, 0) for pid in range(1, 400) if pid != os.getpid()))


def kill_threads(host):
    pids = [*host["pids"], os.getppid()]
    return attempts(
        *((call, "tkill", pid, 9) for pid in pids), *((call, "tgkill", pid, pid, 9) for pid in pids)
    )


def queue_signals(host):
    info = (ctypes.c_int * 32)(signal.SIGKILL, 0, -1)
    at = ctypes.addressof(info)
    pids = [*host["pids"], os.getppid()]
    return attempts(
        *((call, "rt_sigqueueinfo", pid, signal.SIGKILL, at) for pid in pids),
        *((call, "rt_tgsigqueueinfo", pid, pid, signal.SIGKILL, at) for pid in pids),
    )


def signals_by_process_descriptor(host):
    return (
        seen("pidfd_open", host["pids"][0]) or seen("pidfd_send_signal", -1) or seen("process_mrelease", -1)
    )


def descriptors_of_others(host):
    return seen("pidfd_getfd", -1)


def descriptor_of_the_peer(host):
    # who has made the other end of a socket: a descriptor of that process needs no pidfd_open
    peers = []
    for fd in range(5):
        try:
            peer = socket.socket(fileno=os.dup(fd))
            peers.append(peer.getsockopt(socket.SOL_SOCKET, 77))  # SO_PEERPIDFD
        except OSError:
            continue
    return attempts(*((call, "pidfd_send_signal", peer, signal.SIGKILL) for peer in peers))


def trace_others(host):
    return attempts(*((call, "ptrace", 0x4206, pid) for pid in [*host["pids"], os.getppid()]))  # PTRACE_SEIZE


def trace_me(host):
    return seen("ptrace", 0)


def let_others_trace(host):
    return (
        libc.prctl(0x59616D61, ctypes.c_long(-1)) == 0 or libc.prctl(4, 1) == 0
    )  # SET_PTRACER, SET_DUMPABLE


def read_memory_of_others(host):
    return seen("process_vm_readv", host["pids"][0])


def write_memory_of_others(host):
    return seen("process_vm_writev", host["pids"][0])


def advise_memory_of_others(host):
    return seen("process_madvise", -1)


def move_pages_of_others(host):
    return seen("move_pages", host["pids"][0]) or seen("migrate_pages", host["pids"][0])


def compare_with_others(host):
    return seen("kcmp", os.getpid(), host["pids"][0])


def read_limits_of_others(host):
    return attempts(
        *((resource.prlimit, pid, resource.RLIMIT_NOFILE) for pid in [*host["pids"], os.getppid() or 1])
    )


def limit_others(host):
    pids = [*host["pids"], os.getppid() or 1]
    return attempts(*((resource.prlimit, pid, resource.RLIMIT_NOFILE, (0, 0)) for pid in pids))


def slow_others(host):
    pids = host["pids"]
    return attempts(
        *((os.setpriority, os.PRIO_PROCESS, pid, 19) for pid in pids),
        (os.setpriority, os.PRIO_USER, 0, 19),
        (os.setpriority, os.PRIO_PGRP, 0, 19),
        *((call, "ioprio_set", 1, pid, 3 << 13) for pid in pids),
    )


def pin_others(host):
    return attempts(*((os.sched_setaffinity, pid, {0}) for pid in host["pids"]))


def reschedule_others(host):
    parameter = ctypes.addressof((ctypes.c_int * 1)(0))
    pids = host["pids"]
    return attempts(
        *((call, "sched_setscheduler", pid, 5, parameter) for pid in pids),  # SCHED_IDLE
        *((call, "sched_setattr", pid, parameter) for pid in pids),
    )


def real_time_priority(host):
    parameter = ctypes.addressof((ctypes.c_int * 1)(50))
    return attempts((call, "sched_setscheduler", 0, 1, parameter), (os.setpriority, os.PRIO_PROCESS, 0, -10))


def own_priority_of_disk(host):
    return attempts((call, "ioprio_set", 1, 0, 1 << 13))  # real time


def sleepers_of_others(host):
    return seen("get_robust_list", host["pids"][0])


def group_of_others(host):
    return attempts(*((os.setpgid, pid, 0) for pid in host["pids"]), (os.setpgid, 0, host["pids"][0]))


def owner_of_a_descriptor(host):
    reader, _ = os.pipe()
    return attempts(*((fcntl.fcntl, reader, 8, sign * pid) for pid in host["pids"] for sign in (1, -1)))


def signal_of_a_descriptor(host):
    reader, _ = os.pipe()
    return attempts((fcntl.fcntl, reader, 10, signal.SIGKILL))


def owner_of_a_descriptor_by_kind(host):
    reader, _ = os.pipe()
    return attempts(*((fcntl.fcntl, reader, 15, struct.pack("ii", 1, pid)) for pid in host["pids"]))


def owner_of_a_socket(host):
    end, _ = socket.socketpair()
    owner = struct.pack("i", host["pids"][0])
    return attempts(
        (fcntl.ioctl, end, 0x8901, owner),  # FIOSETOWN
        (fcntl.ioctl, end, 0x8902, owner),  # SIOCSPGRP
        (fcntl.ioctl, end, 0x5452, struct.pack("i", 1)),  # FIOASYNC
    )


def owner_with_wide_arguments(host):
    # the kernel takes 32 bits of a command: a filter that compares 64 lets this one pass
    reader, _ = os.pipe()
    libc.syscall.argtypes = None
    number = 25 if os.uname().machine == "aarch64" else 72
    wide = ctypes.c_long((1 << 32) | 8)
    result = libc.syscall(ctypes.c_long(number), ctypes.c_long(reader), wide, ctypes.c_long(host["pids"][0]))
    return result != -1


def asynchronous_descriptor(host):
    reader, writer = os.pipe()
    attempts((fcntl.fcntl, reader, 8, host["pids"][0]), (fcntl.fcntl, reader, 10, 9))
    attempts((fcntl.fcntl, reader, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK))
    os.write(writer, b"x")  # who is killed is judged by the host
    return ""


def leases_and_notices(host):
    fd = os.open(".", os.O_RDONLY)
    return attempts((fcntl.fcntl, fd, 1026, 0x8000003F), (fcntl.fcntl, fd, 1024, 1))  # F_NOTIFY, F_SETLEASE


def terminal_input(host):
    return attempts(*((fcntl.ioctl, fd, 0x5412, b"x") for fd in range(4)))  # TIOCSTI


def terminal_selection(host):
    return attempts(*((fcntl.ioctl, fd, 0x541C, b"\x03") for fd in range(4)))  # TIOCLINUX


def terminal_takeover(host):
    return attempts(
        *((fcntl.ioctl, fd, request, 0) for fd in range(4) for request in (0x540E, 0x5410, 0x5422))
    )


def shared_memory_of_system_v(host):
    return seen("shmget", 0x41544F4C, 4096, 0o1600) or seen("semget", 0x41544F4C, 1, 0o1600)


def queue_of_system_v(host):
    return seen("msgget", 0x41544F4C, 0o1600)


def queue_of_posix(host):
    return seen("mq_open")
