"""Landlock: limits which files a program can access, with three raw system calls. Imports only the standard
library.

See the kernel's Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os

from atoll.reward.sandbox.kernel import system_call

# the same numbers on every architecture
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1

WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
_REMOVE, _MAKE_DIR, _MAKE_FILE, _MAKE_SYMLINK, _REFER = 3 << 4, 1 << 7, 1 << 8, 1 << 12, 1 << 13
READ = READ_FILE | READ_DIR
WRITE = READ | WRITE_FILE | TRUNCATE | _REMOVE | _MAKE_DIR | _MAKE_FILE | _MAKE_SYMLINK | _REFER
# Number of file rights of each ABI, the lowest bits. ABI 1 came with Linux 5.13.
_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
_BITS_NOW = 16  # ABI 5
_TCP = 3  # bind and connect, ABI 4
_SCOPED = 3  # abstract unix sockets of other processes and signals to them, ABI 6


class _RulesetAttributes(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("tcp", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


class Ruleset:
    """Refuses everything that the kernel's ABI covers, except what `allow` names."""

    def __init__(self) -> None:
        """Raises OSError if the kernel has no Landlock."""
        try:
            abi = system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no Landlock ({error.strerror}): it needs Linux 5.13 or later, `landlock` among the "
                "names in /sys/kernel/security/lsm, and a container runtime that allows its system calls",
            ) from None
        self._files = (1 << _BITS.get(abi, _BITS_NOW)) - 1
        handled = _RulesetAttributes(self._files, _TCP if abi >= 4 else 0, _SCOPED if abi >= 6 else 0)
        self._descriptor = system_call(
            _CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(ctypes.sizeof(handled)), 0
        )

    def allow(self, path: str, rights: int) -> None:
        """For a file, or for everything below a directory."""
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = _PathBeneath(rights & self._files, parent)
        try:
            system_call(_ADD_RULE, self._descriptor, _PATH_BENEATH, ctypes.byref(rule), 0)
        finally:
            os.close(parent)

    def restrict_self(self) -> None:
        """Restricts this thread, permanently. It must have set no_new_privs."""
        system_call(_RESTRICT_SELF, self._descriptor, 0)
