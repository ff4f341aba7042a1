"""System calls that the standard library lacks. Imports only the standard library."""

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
_SECCOMP_MODE_FILTER = 2
_CAPABILITIES_V3 = 0x20080522  # linux/capability.h


def libc(name: str, *arguments: object) -> int:
    """Calls a C library function that returns -1 and sets errno if it fails, which raises OSError here."""
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def system_call(number: int, *arguments: object) -> int:
    """A system call without a C library function. Integers must fit 32 bits."""
    return libc("syscall", ctypes.c_long(number), *arguments)


def prctl(option: int, value: int) -> None:
    libc("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def drop_capabilities() -> None:
    """Drops all capabilities of this process in its user namespace; permanently if it cannot exec."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    none = (ctypes.c_uint32 * 6)()
    libc("capset", header, none)


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("lines", ctypes.c_char_p)]


def filter_system_calls(program: bytes) -> None:
    """Filters this thread's system calls, permanently. `program` is an array of struct sock_filter, 8 bytes
    each."""
    filter = _Filter(len(program) // 8, program)
    libc("prctl", PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), ctypes.byref(filter), 0, 0)
