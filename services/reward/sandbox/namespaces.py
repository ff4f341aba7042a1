"""The second tier: namespaces of a zygote and of each program. Imports only the standard library.

A zygote has its own user, network, IPC, host name and mount namespaces, whose file system holds only the
standard library, /dev/null and an empty directory. It is the first process of its own process namespace, so
the kernel kills everything in it when the zygote ends. A program is the first process of a nested one, and
mounts its working directory where no other program sees it.
"""

import os
from collections.abc import Sequence

from atoll.reward.sandbox.kernel import libc, system_call

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_MAX_FILES = 4096
# Landlock's rule is on the outer directory: mounting over a directory would make a rule on it ineffective
WORK = "/work"
_MOUNTED = f"{WORK}/here"


def enter(readable: Sequence[str]) -> None:
    """Moves this process into new namespaces; its next child is the first process in there. `readable`: the
    host's directories and files that stay visible. Raises OSError if the kernel or a container runtime
    forbids it."""
    uid, gid = os.getuid(), os.getgid()
    libc("unshare", _NEWUSER | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWNS)
    for name, line in ("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    _mount(None, "/", None, _REC | _PRIVATE)
    kept = {path: os.open(path, os.O_PATH) for path in readable}
    root = "/dev"  # a directory that every system has
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    for path, descriptor in kept.items():
        if not os.path.exists(root + path):  # inside another one
            _keep(descriptor, root + path)
        os.close(descriptor)
    os.makedirs(root + _MOUNTED)
    os.chdir(root)
    system_call(_PIVOT_ROOT[os.uname().machine], b".", b".")
    libc("umount2", b".", _DETACH)
    os.chdir("/")
    _mount(None, "/", None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)


def next_child_is_first(own: int) -> None:
    """Puts the next child into its own process namespace. `own` is a pidfd of this process."""
    libc("setns", own, _NEWPID)
    libc("unshare", _NEWPID)


def work_in(disk_bytes: int) -> None:
    """Changes to an empty directory of that size which only this process sees, and to a new user namespace,
    so that its threads are counted separately."""
    libc("unshare", _NEWNS)
    if disk_bytes:
        options = f"size={disk_bytes},nr_inodes={_MAX_FILES},mode=700"
        _mount("tmpfs", _MOUNTED, "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    os.chdir(_MOUNTED)
    libc("unshare", _NEWUSER)


def _keep(descriptor: int, target: str) -> None:
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(target)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT, 0o644))
    _mount(source, target, None, _BIND)
    if os.path.isdir(source):
        # a user namespace cannot clear flags that the host has set
        kept = os.statvfs(target).f_flag & (_NOSUID | _NODEV | _NOEXEC)
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | kept)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    arguments = [None if text is None else text.encode() for text in (source, target, kind, options)]
    libc("mount", *arguments[:3], flags, arguments[3])
