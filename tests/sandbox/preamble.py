"""The head of every attack: what an attack may use besides the standard library. Its text comes before the
attack's own in the program that runs in the sandbox, so it imports nothing else."""

import ctypes
import errno
import fcntl  # noqa: F401
import mmap
import os
import platform
import resource  # noqa: F401
import signal  # noqa: F401
import socket  # noqa: F401
import struct  # noqa: F401
import subprocess  # noqa: F401
import sys  # noqa: F401
import threading  # noqa: F401
import time  # noqa: F401
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
ARM = platform.machine() == "aarch64"

NUMBERS = {  # x86_64, aarch64
    "acct": (163, 89),
    "add_key": (248, 217),
    "adjtimex": (159, 171),
    "bpf": (321, 280),
    "capset": (126, 91),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execveat": (322, 281),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "get_robust_list": (274, 100),
    "init_module": (175, 105),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "landlock_create_ruleset": (444, 444),
    "lsm_set_self_attr": (460, 460),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "modify_ldt": (154, 0),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "openat2": (437, 437),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "sched_setattr": (314, 274),
    "sched_setscheduler": (144, 119),
    "seccomp": (317, 277),
    "semget": (64, 190),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vhangup": (153, 58),
}


def call(name: str, *arguments: int) -> int:
    """A system call as the kernel sees it. Raises OSError."""
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(value) for value in (NUMBERS[name][ARM], *arguments, 0, 0, 0, 0)))
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    return int(result)


def seen(name: str, *arguments: int) -> str:
    """The kernel's response to a call; "" if it was refused before the kernel looked at the arguments, which
    are nonsense or harmless."""
    try:
        return f"{name} = {call(name, *arguments)}"
    except OSError as error:
        return "" if error.errno in (errno.EPERM, errno.ENOSYS) else f"{name}: {error}"


def machine_code(code: bytes) -> Callable[[], int]:
    """A function of these instructions."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    first = ctypes.c_char.from_buffer(page)  # the function holds it, and it holds the page
    function = ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(first))
    return lambda: int(first is not None and function())


def attempts(*calls: tuple) -> str:  # type: ignore[type-arg]  # (function, argument, ...)
    """The first of several attempts that was not refused, and its result."""
    for function, *arguments in calls:
        try:
            outcome = function(*arguments)
        except (OSError, MemoryError):
            continue
        return f"{function} {arguments} gave {outcome!r:.200}"
    return ""


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(4096)
