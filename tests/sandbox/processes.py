"""Attacks with processes: outlive the deadline, multiply, become another program, leave something behind."""

import ctypes
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time

from atoll.wire.types import ProgramStatus
from tests.sandbox.preamble import ARM, attempts, call, libc, machine_code, seen

ENDS = {  # of attacks that cannot be refused
    "ignore_all_signals": {ProgramStatus.TIMEOUT},
    "sleep_past_the_deadline": {ProgramStatus.TIMEOUT},
    "threads_spin_after_main": {ProgramStatus.TIMEOUT},
    "catastrophic_regular_expression": {ProgramStatus.TIMEOUT},
    "stop_itself": {ProgramStatus.TIMEOUT, ProgramStatus.OK},
    "threads_that_outlive_the_first": {ProgramStatus.TIMEOUT},
    "core_dump": {ProgramStatus.SIGNAL},
    "crash": {ProgramStatus.SIGNAL},
}


def ignore_all_signals(host):
    for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        pass


def sleep_past_the_deadline(host):
    while True:
        time.sleep(60)


def stop_itself(host):
    os.kill(os.getpid(), signal.SIGSTOP)


def threads_spin_after_main(host):
    def spin():
        while True:
            pass

    for _ in range(4):
        threading.Thread(target=spin).start()


def catastrophic_regular_expression(host):
    import re

    return re.match(r"(a+)+$", "a" * 60 + "b")


def fork_300(host):
    born = 0
    for _ in range(300):
        try:
            child = os.fork()
        except OSError:
            continue
        if child == 0:
            time.sleep(5)
            os._exit(0)
        born += 1
    return born


def fork_in_threads(host):
    born = []

    def fork():
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
        born.append(1)

    threading.excepthook = lambda _: None
    threads = [threading.Thread(target=fork) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return born


def vfork_by_posix_spawn(host):
    return attempts((os.posix_spawn, "/bin/sh", ["sh", "-c", "exit 0"], {}))


def clone_as_fork(host):
    child = call("clone", signal.SIGCHLD)
    if child == 0:
        os._exit(0)
    return child


def clone_as_sibling(host):
    child = call("clone", 0x8000 | signal.SIGCHLD)  # CLONE_PARENT: the host would have to reap it
    if child == 0:
        os._exit(0)
    return child


def clone_without_exit_signal(host):
    child = call("clone", 0)
    if child == 0:
        os._exit(0)
    return child


def clone_into_new_namespaces(host):
    child = call("clone", 0x10000000 | 0x20000000 | 0x40000000 | signal.SIGCHLD)  # NEWUSER, NEWPID, NEWNET
    if child == 0:
        os._exit(0)
    return child


def clone_that_shares_memory(host):
    stack = mmap.mmap(-1, 1 << 16)
    top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 16)
    end = ctypes.cast(libc._exit, ctypes.c_void_p)
    ctypes.set_errno(0)
    return libc.clone(end, ctypes.c_void_p(top), 0x100 | signal.SIGCHLD, None) > 0  # CLONE_VM


def clone_thread_with_namespaces(host):
    # a filter that looks only for CLONE_THREAD lets it pass; the kernel then says EINVAL
    return seen("clone", 0x10000 | 0x800 | 0x100 | 0x200 | 0x20000)  # THREAD SIGHAND VM FS NEWNS


def clone3(host):
    return seen("clone3")


def clone3_flags(host):
    flags = (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD)
    child = call("clone3", ctypes.addressof(flags), ctypes.sizeof(flags))
    if child == 0:
        os._exit(0)
    return child


def daemon_forked_twice(host):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(30)
        os._exit(0)
    return "a daemon"


def daemon_that_holds_stdout(host):
    if os.fork() == 0:
        os.setsid()
        while True:
            time.sleep(60)
    os._exit(0)


def session_of_its_own(host):
    attempts((os.setsid,), (os.setpgid, 0, 0))
    attempts((libc.prctl, 36, 1), (libc.prctl, 1, 0))  # child subreaper; no signal at the parent's death
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    return "a child in a session of its own"


def threads_flood(host):
    import _thread

    threading.stack_size(1 << 15)
    started = 0
    try:
        while started < 8000:
            _thread.start_new_thread(time.sleep, (1,))
            started += 1
    except (RuntimeError, MemoryError):
        pass
    return started >= host["threads"] and started


def threads_without_stacks(host):
    if ARM:
        return ""
    word = ctypes.c_int()
    at = ctypes.addressof(word).to_bytes(8, "little")
    # mov eax, 56; mov edi, flags of a thread; xor esi, esi; mov rdx, at; mov r10, at; xor r8d, r8d; syscall
    clone = (
        b"\xb8\x38\x00\x00\x00\xbf\x00\x0f\x3d\x00\x31\xf6\x48\xba"
        + at
        + b"\x49\xba"
        + at
        + b"\x45\x31\xc0\x0f\x05"
    )
    # test eax, eax; jz child; ret; child: mov eax, 34 (pause); syscall; jmp child
    code = clone + b"\x85\xc0\x74\x01\xc3\xb8\x22\x00\x00\x00\x0f\x05\xeb\xf7"
    global start  # they run in it until the process ends
    start = machine_code(code)
    started = 0
    while started < 6000 and start() > 0:
        started += 1
    return started >= host["threads"] and started


def threads_that_outlive_the_first(host):
    def spin():
        while True:
            pass

    for _ in range(2):
        threading.Thread(target=spin, daemon=True).start()
    libc.syscall(93 if ARM else 60, 0)  # exit: of this thread only


def execve(host):
    os.execv("/bin/sh", ["sh", "-c", "echo ESCAPED"])


def execve_of_the_interpreter(host):
    os.execv(sys.executable or "/usr/bin/python3", ["python", "-c", "print('ESCAPED')"])


def execve_through_the_loader(host):
    loader = "/lib/ld-linux-aarch64.so.1" if ARM else "/lib64/ld-linux-x86-64.so.2"
    os.execv(loader, [loader, "/bin/echo", "ESCAPED"])


def execve_from_a_thread(host):
    def become():
        os.execv("/bin/sh", ["sh", "-c", "echo ESCAPED"])

    threading.excepthook = lambda _: None
    thread = threading.Thread(target=become)
    thread.start()
    thread.join()


def execveat(host):
    return seen("execveat", -1)


def fexecve_of_memory(host):
    script = os.memfd_create("program", 0)
    os.write(script, b"#!/bin/sh\necho ESCAPED\n")
    os.execve(script, ["program"], {})


def fexecve_of_own_file(host):
    with open("program", "w") as file:
        file.write("#!/bin/sh\necho ESCAPED\n")
    os.chmod("program", 0o755)
    os.execv("./program", ["program"])


def shell(host):
    return attempts(
        (subprocess.check_output, ["/bin/id"]),
        (subprocess.check_output, "id", -1),
    ) or (libc.system(b"echo ESCAPED > /dev/stdout") == 0)


def pseudo_terminal(host):
    import pty

    child, _ = pty.fork()
    if child == 0:
        os._exit(0)
    return child


def process_pool(host):
    import multiprocessing

    context = multiprocessing.get_context("fork")
    worker = context.Process(target=time.sleep, args=(0,))
    worker.start()
    worker.join()
    return worker.exitcode == 0


def raise_own_limits(host):
    kinds = "AS", "CPU", "FSIZE", "NPROC", "NOFILE", "CORE"
    infinite = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    limits = [getattr(resource, f"RLIMIT_{kind}") for kind in kinds]
    return attempts(*((resource.prlimit, 0, limit, infinite) for limit in limits))


def core_dump(host):
    attempts((resource.prlimit, 0, resource.RLIMIT_CORE, (1 << 30, 1 << 30)), (libc.prctl, 4, 1))
    if attempts((os.stat, "core")):
        return "core of another one"
    os.abort()


def crash(host):
    ctypes.string_at(8)
