"""The filter as the kernel interprets it: each test runs the classic BPF program on a system call.

System call numbers here are from the kernel's tables (arch/x86/entry/syscalls/syscall_64.tbl and
include/uapi/asm-generic/unistd.h), not from the code under test.
"""

import pytest

from atoll.reward.sandbox import seccomp
from atoll.runtime.errors import SandboxError
from tests.sandbox import bpf

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCH = {"x86_64": bpf.X86_64, "aarch64": bpf.AARCH64}
BOTH = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


def judge(machine: str, number: int, *arguments: int, arch: int | None = None) -> int:
    """The filter's decision."""
    return bpf.verdict(seccomp.program(machine), ARCH[machine] if arch is None else arch, number, *arguments)


@pytest.mark.parametrize(
    ("name", "x86_64", "aarch64"),
    [
        ("read", 0, 63),
        ("write", 1, 64),
        ("close", 3, 57),
        ("fstat", 5, 80),
        ("mmap", 9, 222),
        ("rt_sigreturn", 15, 139),
        ("getpid", 39, 172),
        ("openat", 257, 56),
        ("futex", 202, 98),
        ("exit_group", 231, 94),
        ("getrandom", 318, 278),
    ],
)
def test_what_an_interpreter_needs_is_allowed(name: str, x86_64: int, aarch64: int) -> None:
    assert judge("x86_64", x86_64) == ALLOW
    assert judge("aarch64", aarch64) == ALLOW


@pytest.mark.parametrize(
    ("name", "x86_64", "aarch64"),
    [
        ("execve", 59, 221),
        ("execveat", 322, 281),
        ("kill", 62, 129),
        ("tkill", 200, 130),
        ("tgkill", 234, 131),
        ("ptrace", 101, 117),
        ("socket", 41, 198),
        ("connect", 42, 203),
        ("bind", 49, 200),
        ("sendmsg", 46, 211),
        ("setsockopt", 54, 208),
        ("unshare", 272, 97),
        ("setns", 308, 268),
        ("mount", 165, 40),
        ("chroot", 161, 51),
        ("fchmod", 91, 52),
        ("fchmodat", 268, 53),
        ("truncate", 76, 45),
        ("setxattr", 188, 5),
        ("utimensat", 280, 88),
        ("prctl", 157, 167),
        ("seccomp", 317, 277),
        ("bpf", 321, 280),
        ("keyctl", 250, 219),
        ("memfd_create", 319, 279),
        ("userfaultfd", 323, 282),
        ("perf_event_open", 298, 241),
        ("io_uring_setup", 425, 425),
        ("io_uring_enter", 426, 426),
        ("pidfd_open", 434, 434),
        ("pidfd_getfd", 438, 438),
        ("open_by_handle_at", 304, 265),
        ("process_vm_readv", 310, 270),
        ("setpriority", 141, 140),
        ("sched_setaffinity", 203, 122),
        ("inotify_add_watch", 254, 27),
        ("timer_create", 222, 107),
        ("a call of the future", 600, 600),
    ],
)
def test_what_reaches_others_is_refused(name: str, x86_64: int, aarch64: int) -> None:
    assert judge("x86_64", x86_64) == EPERM
    assert judge("aarch64", aarch64) == EPERM


def test_calls_of_x86_64_alone() -> None:
    assert {judge("x86_64", number) for number in (57, 58)} == {EPERM}  # fork, vfork
    assert judge("x86_64", 2) == judge("x86_64", 4) == ALLOW  # open, stat
    assert judge("x86_64", 90) == EPERM  # chmod


def test_foreign_architectures_are_killed() -> None:
    assert judge("x86_64", 4, arch=bpf.I386) == KILL  # write
    assert judge("aarch64", 4, arch=bpf.ARM) == KILL
    assert judge("x86_64", 0x40000000) == judge("x86_64", 0x40000000 + 520) == KILL  # x32: read, execve
    with pytest.raises(SandboxError, match=r"is a riscv64, .* x86_64 and aarch64"):
        seccomp.program("riscv64")


@BOTH
def test_clone_makes_threads_only(machine: str) -> None:
    clone = {"x86_64": 56, "aarch64": 220}[machine]
    assert judge(machine, clone, 0x3D0F00) == ALLOW  # pthread_create of glibc
    assert judge(machine, clone, 0x7D0F00) == ALLOW  # of musl
    sigchld, new_user, new_net, vfork = 17, 0x10000000, 0x40000000, 0x4100
    for flags in (sigchld, 0x3D0F00 | new_user, 0x3D0F00 | new_net, vfork | sigchld, 0, 0x3D0F00 | 1 << 32):
        assert judge(machine, clone, flags) == EPERM
    assert judge(machine, 435) == ENOSYS  # clone3


@BOTH
def test_arguments_of_fcntl_and_ioctl(machine: str) -> None:
    fcntl, ioctl = {"x86_64": (72, 16), "aarch64": (25, 29)}[machine]
    for command in (0, 1, 2, 3, 4, 6, 1030):  # F_DUPFD, GETFD, SETFD, GETFL, SETFL, SETLK, DUPFD_CLOEXEC
        assert judge(machine, fcntl, 5, command) == ALLOW
    for command in (
        8,
        10,
        15,
        1024,
        1026,
        1031,
        1033,
    ):  # SETOWN, SETSIG, SETOWN_EX, lease, notify, pipe, seals
        assert judge(machine, fcntl, 5, command) == EPERM
    assert judge(machine, ioctl, 0, 0x5401) == judge(machine, ioctl, 0, 0x5421) == ALLOW  # TCGETS, FIONBIO
    assert judge(machine, ioctl, 0, 0x5412) == judge(machine, ioctl, 0, 0x540E) == EPERM  # TIOCSTI, TIOCSCTTY


@BOTH
def test_limits_of_itself_only(machine: str) -> None:
    prlimit, stack, cpu, pointer = {"x86_64": 302, "aarch64": 261}[machine], 3, 0, 0x7FFF00000000
    assert judge(machine, prlimit, 0, cpu, 0, pointer) == ALLOW  # asks
    assert judge(machine, prlimit, 0, stack, pointer, 0) == ALLOW
    # a lower one for CPU time would make the kernel kill it, as if it had been killed from outside
    assert judge(machine, prlimit, 0, cpu, pointer, 0) == EPERM
    for pid in (1, 4242, -1):
        assert judge(machine, prlimit, pid, cpu, 0, pointer) == EPERM


@BOTH
def test_sockets_that_are_pairs_of_streams(machine: str) -> None:
    socketpair, sendto = {"x86_64": (53, 44), "aarch64": (199, 206)}[machine]
    stream, datagram, sequence, flags, unix, inet = 1, 2, 5, 0o2004000, 1, 2
    assert (
        judge(machine, socketpair, unix, stream) == judge(machine, socketpair, unix, stream | flags) == ALLOW
    )
    for family, kind in ((unix, datagram), (unix, sequence), (inet, stream)):
        assert judge(machine, socketpair, family, kind) == EPERM
    assert judge(machine, sendto, 3, 0x7FFF00000000, 5, 0, 0, 0) == ALLOW
    for address in (0x7FFF00000000, 0x1000):  # all of it counts
        assert judge(machine, sendto, 3, 0x7FFF00000000, 5, 0, address, 16) == EPERM
