"""The seccomp filter on attackers' system calls: by arguments, and for calls that it does not name."""

import errno

import pytest

from atoll.reward.sandbox import seccomp
from atoll.runtime.errors import SandboxError
from tests.sandbox import bpf
from tests.sandbox.preamble import NUMBERS

ALLOW, KILL = "allow", "kill"
AUDIT = {"x86_64": bpf.X86_64, "aarch64": bpf.AARCH64, "i386": bpf.I386, "arm": bpf.ARM}
MACHINES = "x86_64", "aarch64"
# name: numbers on both, arguments, decision
CALLS = [
    ("a thread", (56, 220), (0x3D0F00,), ALLOW),
    ("a thread as musl makes it", (56, 220), (0x7D0F00,), ALLOW),
    ("fork", (56, 220), (17,), errno.EPERM),
    ("a thread in new namespaces", (56, 220), (0x3D0F00 | 0x10000000,), errno.EPERM),
    ("a thread, flags above 32 bits", (56, 220), (0x3D0F00 | 1 << 32,), errno.EPERM),
    ("clone3", (435, 435), (), errno.ENOSYS),
    ("F_GETFL", (72, 25), (3, 3), ALLOW),
    ("F_DUPFD_CLOEXEC", (72, 25), (3, 1030), ALLOW),
    ("F_SETOWN", (72, 25), (3, 8, 1), errno.EPERM),
    ("F_SETOWN, above 32 bits", (72, 25), (3, 1 << 32 | 8, 1), errno.EPERM),
    ("F_SETSIG", (72, 25), (3, 10, 9), errno.EPERM),
    ("F_SETOWN_EX", (72, 25), (3, 15, 1), errno.EPERM),
    ("F_SETLEASE", (72, 25), (3, 1024), errno.EPERM),
    ("F_NOTIFY", (72, 25), (3, 1026), errno.EPERM),
    ("F_SETPIPE_SZ", (72, 25), (3, 1031, 1 << 20), errno.EPERM),
    ("FIONREAD", (16, 29), (3, 0x541B), ALLOW),
    ("TIOCSTI", (16, 29), (0, 0x5412), errno.EPERM),
    ("TIOCLINUX", (16, 29), (0, 0x541C), errno.EPERM),
    ("FIOSETOWN", (16, 29), (3, 0x8901), errno.EPERM),
    ("own limits", (302, 261), (0, 7, 0, 1 << 40), ALLOW),
    ("own stack", (302, 261), (0, 3, 1 << 40, 0), ALLOW),
    ("own memory limit", (302, 261), (0, 9, 1 << 40, 0), errno.EPERM),
    ("another's limits", (302, 261), (1, 7, 0, 1 << 40), errno.EPERM),
    ("another's stack", (302, 261), (1, 3, 1 << 40, 0), errno.EPERM),
    ("a limit at an address of 32 bits", (302, 261), (0, 9, 1 << 20, 0), errno.EPERM),
    ("a pair of streams", (53, 199), (1, 1 | 0o2000000), ALLOW),
    ("a pair of datagrams", (53, 199), (1, 2), errno.EPERM),
    ("a pair over the network", (53, 199), (2, 1), errno.EPERM),
    ("to the other end", (44, 206), (3, 1 << 40, 1), ALLOW),
    ("to an address", (44, 206), (3, 1 << 40, 1, 0, 1 << 40), errno.EPERM),
    ("to an address of 32 bits", (44, 206), (3, 1 << 40, 1, 0, 1 << 20), errno.EPERM),
    ("socket", (41, 198), (1, 1), errno.EPERM),
    ("connect", (42, 203), (3,), errno.EPERM),
    ("sendmsg", (46, 211), (3,), errno.EPERM),
    ("sendmmsg", (307, 269), (3,), errno.EPERM),
    ("kill", (62, 129), (1, 9), errno.EPERM),
    ("execve", (59, 221), (), errno.EPERM),
    ("prctl", (157, 167), (4, 1), errno.EPERM),
    ("openat", (257, 56), (), ALLOW),
    ("exit_group", (231, 94), (), ALLOW),
]


def decide(filter: bytes, machine: str, number: int, arguments: tuple[int, ...] = ()) -> str | int:
    """What the kernel would do."""
    verdict = bpf.verdict(filter, AUDIT[machine], number, *arguments)
    if verdict >> 16 == 0x0005:
        return verdict & 0xFFFF
    return {0x7FFF0000: ALLOW, 0x80000000: KILL}[verdict]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("name", "numbers", "arguments", "expected"), CALLS)
def test_calls(
    machine: str, name: str, numbers: tuple[int, int], arguments: tuple[int, ...], expected: str | int
) -> None:
    number = numbers[MACHINES.index(machine)]
    assert decide(seccomp.program(machine), machine, number, arguments) == expected, name


@pytest.mark.parametrize("machine", MACHINES)
def test_whatever_is_not_named_is_refused(machine: str) -> None:
    filter, column = seccomp.program(machine), MACHINES.index(machine)
    named = {numbers[column] for numbers in seccomp.FREE.values()}
    allowed = {number for number in range(1024) if decide(filter, machine, number) == ALLOW}
    with_arguments = {numbers[column] for numbers in seccomp.CHECKED.values()}
    assert allowed - with_arguments == named - {None}
    attacks = {numbers[column] for name, numbers in NUMBERS.items() if numbers != (154, 0)}
    assert attacks & allowed == set()


def test_other_architectures_end_the_program() -> None:
    amd, arm = seccomp.program("x86_64"), seccomp.program("aarch64")
    assert decide(amd, "i386", 4) == decide(amd, "aarch64", 64) == decide(arm, "x86_64", 1) == KILL
    assert decide(arm, "arm", 4) == KILL
    for number in (0, 2, 39, 520, 545):  # x32
        assert decide(amd, "x86_64", 0x40000000 + number) == KILL
    assert decide(amd, "x86_64", 0xFFFFFFFF) == KILL  # -1
    with pytest.raises(SandboxError, match="riscv64"):
        seccomp.program("riscv64")
