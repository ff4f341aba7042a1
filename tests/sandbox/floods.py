"""Attacks by quantity: output, memory, descriptors, processor time."""

import ctypes
import fcntl
import mmap
import os
import socket
import sys
import threading
import time

from atoll.wire.types import ProgramStatus
from tests.sandbox.preamble import libc

ENDS = {
    "stdout_flood": {ProgramStatus.OUTPUT_LIMIT},
    "stderr_flood": {ProgramStatus.OUTPUT_LIMIT},
    "both_flood": {ProgramStatus.OUTPUT_LIMIT},
    "flood_of_single_bytes": {ProgramStatus.OUTPUT_LIMIT, ProgramStatus.TIMEOUT},
    "flood_from_threads": {ProgramStatus.OUTPUT_LIMIT},
    "huge_exception": {ProgramStatus.EXCEPTION, ProgramStatus.OUTPUT_LIMIT},
    "huge_exception_type": {ProgramStatus.EXCEPTION, ProgramStatus.OUTPUT_LIMIT},
    "exception_that_cannot_be_printed": {ProgramStatus.EXCEPTION},
    "huge_exit_message": {ProgramStatus.EXIT_CODE},
    "deep_recursion": {ProgramStatus.EXCEPTION},
    "deep_recursion_without_limit": {ProgramStatus.SIGNAL, ProgramStatus.EXCEPTION, ProgramStatus.TIMEOUT},
    "exception_that_floods": {ProgramStatus.OUTPUT_LIMIT, ProgramStatus.EXCEPTION},
    "endless_finalizer": {ProgramStatus.TIMEOUT, ProgramStatus.OK},
    "slow_power": {ProgramStatus.TIMEOUT},
    "memory_by_stack": {ProgramStatus.SIGNAL, ProgramStatus.OK},
}


def stdout_flood(host):
    while True:
        sys.stdout.write("x" * 65536)


def stderr_flood(host):
    while True:
        os.write(2, b"x" * 65536)


def both_flood(host):
    while True:
        os.write(1, b"x" * 4096)
        os.write(2, b"x" * 4096)


def flood_of_single_bytes(host):
    while True:
        os.write(1, b"x")


def flood_from_threads(host):
    def write():
        while True:
            os.write(1, b"x" * 65536)

    for _ in range(4):
        threading.Thread(target=write).start()


def flood_of_the_channel(host):
    for _ in range(10_000):
        os.write(3, b"\xff" * 65536)
    return "600 MiB"


def huge_exception(host):
    raise ValueError("x" * (50 << 20))


def huge_exception_type(host):
    raise type("X" * (1 << 20), (Exception,), {})


def exception_that_cannot_be_printed(host):
    class BadError(Exception):
        def __str__(self):
            raise BadError

        __repr__ = __str__

    raise BadError


def exception_that_floods(host):
    class BadError(Exception):
        def __str__(self):
            return "x" * (20 << 20)

    raise BadError


def huge_exit_message(host):
    sys.exit("x" * 1000)


def deep_recursion(host):
    def deeper():
        return deeper()

    return deeper()


def deep_recursion_without_limit(host):
    sys.setrecursionlimit(1 << 30)
    value = []
    for _ in range(1_000_000):
        value = [value]
    return repr(value)


def memory_in_one_piece(host):
    return len(bytearray(4 << 30))


def memory_in_pieces(host):
    held = []
    while len(held) < 4096:
        held.append(b"x" * (1 << 20))
    return "4 GiB"


def memory_by_map(host):
    held = [mmap.mmap(-1, 64 << 20) for _ in range(64)]
    return len(held)


def memory_by_numbers(host):
    return len(range(1)) and (1 << (1 << 36)).bit_length()


def memory_shared(host):
    page = mmap.mmap(-1, 2 << 30, mmap.MAP_SHARED)
    for offset in range(0, 2 << 30, 4096):
        page[offset] = 1
    return "2 GiB of shared memory"


def memory_by_stack(host):
    threading.stack_size(1 << 30)
    threads = [threading.Thread(target=time.sleep, args=(0.1,)) for _ in range(16)]
    for thread in threads:
        try:
            thread.start()
        except RuntimeError:
            return ""
    return "16 GiB of stacks"


def memory_by_pipes(host):
    held = 0
    ends = []
    try:
        for _ in range(4096):
            reader, writer = os.pipe()
            ends.append(reader)
            os.set_blocking(writer, False)
            try:
                held += fcntl.fcntl(writer, 1031, 1 << 20)  # F_SETPIPE_SZ
            except OSError:
                held += 1 << 16
            try:
                while True:
                    os.write(writer, bytes(1 << 16))
            except BlockingIOError:
                pass
    except OSError:
        pass
    return held > 256 << 20 and f"{held >> 20} MiB in pipes"


def memory_by_sockets(host):
    held = 0
    ends = []
    try:
        for _ in range(4096):
            pair = socket.socketpair()
            ends.append(pair)
            pair[0].setblocking(False)
            try:
                while True:
                    held += pair[0].send(bytes(1 << 16))
            except BlockingIOError:
                pass
    except OSError:
        pass
    return held > 256 << 20 and f"{held >> 20} MiB in sockets"


def memory_by_descriptors_in_flight(host):
    # descriptors that are sent and never received do not count against the sender's own limit
    sent = 0
    left, right = socket.socketpair()
    left.setblocking(False)
    held = []
    try:
        for _ in range(20_000):
            socket.send_fds(left, [b"x"], [right.fileno()] * 200)
            sent += 200
    except OSError:
        pass
    return sent > 10_000 and (sent, held)


def descriptors(host):
    held = []
    try:
        for _ in range(100_000):
            held.append(os.dup(0))
    except OSError:
        pass
    return len(held) > 4096 and len(held)


def timers(host):
    timer = ctypes.c_void_p()
    made = 0
    for _ in range(100_000):
        if libc.timer_create(1, None, ctypes.byref(timer)) == -1:
            break
        made += 1
    return made > 50_000 and made


def many_maps(host):
    held = []
    try:
        for _ in range(200_000):
            held.append(mmap.mmap(-1, 4096))
    except (OSError, MemoryError):
        pass
    return len(held) > 100_000 and len(held)


def endless_finalizer(host):
    class Bad:
        def __del__(self):
            while True:
                pass

    global keep
    keep = Bad()
    return ""


def slow_power(host):
    return str(7 ** (7**9)) and "done"


def processors(host):
    # threads that spin: bounded by the deadline; what they burn is the host's to limit
    return len(os.sched_getaffinity(0)) == 0
