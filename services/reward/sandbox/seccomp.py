"""The seccomp filter of a program: which system calls it may make, as classic BPF.

Everything else fails with EPERM: fork, exec, every network and namespace call, ptrace and signals, io_uring,
bpf, keyctl, perf, memfd, userfaultfd, mounts, and calls that change files in ways that Landlock does not
check (chmod, chown, truncate by path, extended attributes, times).
"""

import errno
import struct
from collections.abc import Sequence

from atoll.runtime.errors import SandboxError

# linux/filter.h: (operation, jump if true, jump if false, operand)
_LOAD, _JUMP, _EQUAL, _AT_LEAST, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h
# offsets in struct seccomp_data; argument i is the words 2i (low) and 2i + 1
_NUMBER, _ARCH, _WORDS = 0, 4, 16
_X32 = 0x40000000  # x86_64 system calls with 32-bit pointers, which have their own numbers

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h

# name: number on x86_64 and on aarch64; None: does not exist on aarch64
FREE: dict[str, tuple[int, int | None]] = {
    "access": (21, None),
    "alarm": (37, None),
    "brk": (12, 214),
    "chdir": (80, 49),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "close_range": (436, 436),
    "copy_file_range": (326, 285),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "epoll_wait": (232, None),
    "eventfd2": (290, 19),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fallocate": (285, 47),
    "fchdir": (81, 50),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fstat": (5, 80),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getgroups": (115, 158),
    "getitimer": (36, 102),
    "getpeername": (52, 205),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getpriority": (140, 141),
    "getrandom": (318, 278),
    "getresgid": (120, 150),
    "getresuid": (118, 148),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsid": (124, 156),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "link": (86, None),
    "linkat": (265, 37),
    "lseek": (8, 62),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "msync": (26, 227),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pause": (34, None),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "pwritev2": (328, 287),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "restart_syscall": (219, 128),
    "rmdir": (84, None),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "select": (23, None),
    "sendfile": (40, 71),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "setitimer": (38, 103),
    "shutdown": (48, 210),
    "sigaltstack": (131, 132),
    "stat": (4, None),
    "statx": (332, 291),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "sysinfo": (99, 179),
    "time": (201, None),
    "times": (100, 153),
    "umask": (95, 166),
    "uname": (63, 160),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "write": (1, 64),
    "writev": (20, 66),
}

AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
RLIMIT_STACK = 3
# CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID and CHILD_CLEARTID: glibc's flags for
# threads; musl adds CLONE_DETACHED, which does nothing
THREAD, CLONE_DETACHED = 0x3D0F00, 0x400000
# F_DUPFD, GETFD, SETFD, GETFL, SETFL, GETLK, SETLK, SETLKW, DUPFD_CLOEXEC, GETPIPE_SZ: neither signals to
# other processes (F_SETOWN, F_SETSIG, F_SETOWN_EX) nor larger pipes
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
ANY = 0xFFFFFFFF

# (word, mask, values): this argument word, masked, must be one of the values
Check = tuple[int, int, Sequence[int]]
# name: number on x86_64 and on aarch64, and alternatives in which it is allowed: all checks of one must hold
CHECKED: dict[str, tuple[int, int, Sequence[Sequence[Check]]]] = {
    "clone": (56, 220, [[(0, ~CLONE_DETACHED & ANY, [THREAD]), (1, ANY, [0])]]),
    "fcntl": (72, 25, [[(2, ANY, FCNTL)]]),
    "ioctl": (16, 29, [[(2, ANY, IOCTL)]]),
    # its own only: to query limits, or to set its stack
    "prlimit64": (
        302,
        261,
        [[(0, ANY, [0]), (4, ANY, [0]), (5, ANY, [0])], [(0, ANY, [0]), (2, ANY, [RLIMIT_STACK])]],
    ),
    # without an address: a datagram could reach any socket in the file system
    "sendto": (44, 206, [[(8, ANY, [0]), (9, ANY, [0])]]),
    # asyncio needs one
    "socketpair": (53, 199, [[(0, ANY, [AF_UNIX]), (2, SOCK_TYPE_MASK, [SOCK_STREAM])]]),
}
# glibc tries it before clone; its arguments are in memory, where no filter can look
CLONE3 = 435


def program(machine: str) -> bytes:
    """The filter as an array of struct sock_filter, for `machine` as in uname. Raises SandboxError for an
    architecture whose system calls are not known."""
    if machine not in ARCHES:
        raise SandboxError(
            f"the machine is a {machine}, but the sandbox supports only {' and '.join(ARCHES)}: "
            "run reward services on one of these"
        )
    column = list(ARCHES).index(machine)
    code = [*_load(_ARCH), *_unless_equal([ARCHES[machine]], [(_RETURN, 0, 0, _KILL)]), *_load(_NUMBER)]
    if machine == "x86_64":
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    numbers = [call[column] for call in FREE.values()]
    for number in numbers:
        if number is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    code += [(_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for *numbers_of_call, ways in CHECKED.values():
        block = [line for way in ways for line in _way(way)] + [(_RETURN, 0, 0, _ERRNO | errno.EPERM)]
        code += [(_EQUAL, 0, len(block), numbers_of_call[column]), *block]
    code.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    return b"".join(struct.pack("HBBI", *line) for line in code)


Line = tuple[int, int, int, int]


def _load(offset: int) -> list[Line]:
    return [(_LOAD, 0, 0, offset)]


def _unless_equal(values: Sequence[int], then: Sequence[Line]) -> list[Line]:
    """Jumps over `then` if the loaded word is one of the values."""
    jumps = [(_EQUAL, len(values) - 1 - i + len(then), 0, value) for i, value in enumerate(values)]
    return [*jumps, *then]


def _way(checks: Sequence[Check]) -> list[Line]:
    """Allows the call if all checks hold; otherwise continues after these instructions."""
    lines: list[Line] = [(_RETURN, 0, 0, _ALLOW)]
    for word, mask, values in reversed(checks):
        leave: Line = (_JUMP, 0, 0, len(lines))
        test = _unless_equal(values, [leave])
        lines = [*_load(_WORDS + 4 * word), (_AND, 0, 0, mask), *test, *lines]
    return lines
