"""The set-ups in which the sandbox must hold, and how a root process enters each.

`python -m tests.sandbox.setups SETUP COMMAND...` enters it and executes the command.
"""

import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

USER = 12345  # an ordinary one: of no account, in no group
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x00020000, 4096, 16384, 1 << 18
_PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 24, 22, 38
_LOAD, _EQUAL, _ANY_OF, _RETURN = 0x20, 0x15, 0x45, 0x06  # linux/filter.h
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # linux/seccomp.h
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Setup:
    user: int  # 0: root
    tier: str  # that the sandbox should reach
    asks_namespaces: bool = True
    container: bool = False


_BOTH, _FIRST = "landlock, seccomp, namespaces", "landlock, seccomp"
SETUPS = {
    "root": Setup(0, _BOTH),
    "root-without-namespaces": Setup(0, _FIRST, asks_namespaces=False),
    "user": Setup(USER, _BOTH),
    "user-without-namespaces": Setup(USER, _FIRST, asks_namespaces=False),
    "container": Setup(0, _FIRST, container=True),
}


def enter(setup: Setup) -> None:
    """Whoever is not root is an ordinary user already."""
    if setup.user and os.getuid() == 0:
        _open_interpreter()
        os.setgroups([])
        os.setgid(setup.user)
        os.setuid(setup.user)
    if setup.container:
        _drop_capabilities()
        _refuse_namespaces()


def _check(result: int) -> None:
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _open_interpreter() -> None:
    """In a mount namespace of this process, makes an interpreter inside a folder that only root may enter
    accessible to everyone at the same path."""
    prefix = Path(sys.base_prefix)
    closed = next((folder for folder in reversed(prefix.parents) if not folder.stat().st_mode & 1), None)
    if closed is None:
        return
    _check(_libc.unshare(_CLONE_NEWNS))
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    inside = os.open(prefix, os.O_PATH)
    _check(_libc.mount(b"tmpfs", bytes(closed), b"tmpfs", 0, b"mode=755"))
    prefix.mkdir(parents=True)
    _check(_libc.mount(f"/proc/self/fd/{inside}".encode(), bytes(prefix), None, _MS_BIND | _MS_REC, None))
    os.close(inside)


def _drop_capabilities() -> None:
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def _refuse_namespaces() -> None:
    """As docker's default profile: no unshare, setns, mount, and no clone with a namespace's flag."""
    arm = platform.machine() == "aarch64"
    refuse((97, 268, 40, 41, 39, 428, 430) if arm else (272, 308, 165, 155, 166, 428, 430), errno.EPERM)
    refuse((435,), errno.ENOSYS)  # clone3: its flags lie in memory
    _filter(
        *((_EQUAL, 0, 3, 220 if arm else 56), (_LOAD, 0, 0, 16)),
        *((_ANY_OF, 0, 1, 0x7E020080), (_RETURN, 0, 0, _ERRNO | errno.EPERM)),
    )


def refuse(numbers: Sequence[int], error: int) -> None:
    """These system calls fail from now on, in this process and its children."""
    for number in numbers:
        _filter((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error))


def _filter(*lines: tuple[int, int, int, int]) -> None:
    """They begin with the call's number; whatever they do not return for is allowed."""
    whole = ((_LOAD, 0, 0, 0), *lines, (_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in whole))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(whole), ctypes.addressof(code)))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0))


if __name__ == "__main__":
    enter(SETUPS[sys.argv[1]])
    os.execvpe(sys.argv[2], sys.argv[2:], os.environ | {"HOME": "/nonexistent"})
