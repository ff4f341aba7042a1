"""Attacks on files: read or write what is the host's, leave something behind, fill a disk.

`host.secret` and its folder are world-writable: only the sandbox protects them.
"""

import ctypes
import mmap
import os
import socket
import sys
from pathlib import Path

from atoll.wire.types import ProgramStatus
from tests.sandbox.preamble import attempts, call, libc, read, seen

ENDS: dict[str, set[ProgramStatus]] = {}


def read_secret(host):
    return attempts((read, host["secret"]))


def read_secret_by_relative_path(host):
    return attempts((read, "../" * 24 + host["secret"].lstrip("/")))


def read_secret_through_a_symlink(host):
    os.symlink(host["secret"], "link")
    return attempts((read, "link"), (os.readlink, "nowhere"))


def read_secret_through_a_hard_link(host):
    os.link(host["secret"], "link")
    return attempts((read, "link")) or "a hard link"


def read_secret_through_a_moved_folder(host):
    os.makedirs("a/b/c")
    inside = os.open("a/b/c", os.O_RDONLY)
    os.rename("a/b", "b")
    for _ in range(24):
        os.chdir("..")
    return attempts((os.open, host["secret"].lstrip("/"), os.O_RDONLY, 0o600)) or attempts(
        (lambda: os.open("../" * 24 + host["secret"], os.O_RDONLY, dir_fd=inside),)
    )


def read_secret_by_a_path_descriptor(host):
    fd = os.open(host["secret"], os.O_PATH)
    return attempts((read, f"/proc/self/fd/{fd}"), (os.read, fd, 10))


def read_secret_by_openat2(host):
    name = ctypes.create_string_buffer(host["secret"].encode())
    how = (ctypes.c_uint64 * 3)(0, 0, 0)
    return seen("openat2", -100, ctypes.addressof(name), ctypes.addressof(how), 24)


def read_secret_by_handle(host):
    return seen("name_to_handle_at", -100) or seen("open_by_handle_at", -100)


def read_secret_by_chroot(host):
    os.mkdir("new")
    return attempts((os.chroot, "new"), (os.chroot, "."))


def read_secret_by_descriptor_walk(host):
    def climb(fd):
        for _ in range(24):
            fd = os.open("..", os.O_RDONLY, dir_fd=fd)
        return os.listdir(fd)

    return attempts((climb, os.open(".", os.O_RDONLY)))


def map_secret(host):
    fd = os.open(host["secret"], os.O_RDWR)
    return bytes(mmap.mmap(fd, 0)[:10])


def list_folders(host):
    return attempts(*((os.listdir, path) for path in (host["folder"], "/", "/etc", "/root", "/home", "/tmp")))


def watch_folders(host):
    def watch(path):
        if libc.inotify_add_watch(call("inotify_init1"), path, 0xFFF) == -1:
            raise OSError

    return seen("fanotify_init") or attempts(
        (watch, b"/"), (watch, b"/tmp"), (watch, host["folder"].encode())
    )


def accounts(host):
    return attempts((read, "/etc/passwd"), (read, "/etc/shadow"), (read, "/etc/group"), (read, "/etc/hosts"))


def source_of_the_service(host):
    return attempts((read, host["source"]), (os.listdir, os.path.dirname(host["source"])))


def site_packages(host):
    return attempts(*((read, path) for path in host["installed"]))


def write_secret(host):
    return attempts(*((os.open, host["secret"], flags) for flags in (os.O_WRONLY, os.O_RDWR | os.O_APPEND)))


def truncate_secret(host):
    return attempts((os.truncate, host["secret"], 0), (os.open, host["secret"], os.O_TRUNC))


def remove_secret(host):
    return attempts(
        (os.unlink, host["secret"]), (os.rename, host["secret"], host["secret"] + ".atoll-attack")
    )


def replace_secret(host):
    Path("new").write_text("forged")
    return attempts((os.rename, "new", host["secret"]), (os.replace, "new", host["secret"]))


def exchange_secret(host):
    Path("new").write_text("forged")
    return libc.renameat2(-100, b"new", -100, host["secret"].encode(), 2) == 0  # RENAME_EXCHANGE


def change_mode_of_secret(host):
    return attempts(
        (os.chmod, host["secret"], 0o777),
        (os.chown, host["secret"], 0, 0),
        (os.utime, host["secret"], (0, 0)),
        (os.setxattr, host["secret"], "user.attack", b"1"),
    )


def create_beside_secret(host):
    new = host["folder"] + "/atoll-attack"
    return attempts(
        (os.open, new, os.O_CREAT | os.O_WRONLY),
        (os.mkdir, new),
        (os.mkfifo, new),
        (os.symlink, "/etc", new),
        (os.mknod, new, 0o060666, os.makedev(8, 0)),
        (os.open, host["folder"], os.O_TMPFILE | os.O_RDWR),
    )


def write_to_shared_folders(host):
    folders = "/tmp", "/var/tmp", "/dev/shm", "/run", "/dev/mqueue", "/root", "/usr/local/bin", "/etc"
    flags = os.O_CREAT | os.O_WRONLY
    return attempts(*((os.open, f"{folder}/atoll-attack", flags) for folder in folders))


def write_through_a_symlink(host):
    os.symlink(host["folder"], "out")
    return attempts((os.open, "out/atoll-attack", os.O_CREAT | os.O_WRONLY), (os.truncate, "out/secret", 0))


def shared_memory(host):
    def segment():
        from multiprocessing.shared_memory import SharedMemory

        return SharedMemory("atoll-attack", create=True, size=4096)

    return attempts((segment,)) or (libc.shm_open(b"/atoll-attack", os.O_CREAT | os.O_RDWR, 0o600) >= 0)


def change_the_standard_library(host):
    import json

    flags = os.O_WRONLY | os.O_APPEND
    cache = os.path.join(os.path.dirname(json.__file__), "__pycache__")
    return attempts(
        (os.open, json.__file__, flags),
        (os.open, cache + "/atoll-attack.pyc", os.O_CREAT | flags),
        (os.open, os.path.dirname(os.__file__) + "/atoll_attack.py", os.O_CREAT | flags),
        (os.open, sys.executable or "/usr/bin/python3", flags),
    )


def devices(host):
    names = (
        "mem",
        "kmsg",
        "vda",
        "sda",
        "tty",
        "ptmx",
        "fuse",
        "kvm",
        "net/tun",
        "vsock",
        "console",
        "loop-control",
    )
    return attempts(*((os.open, f"/dev/{name}", os.O_RDWR) for name in names))


def make_devices(host):
    return attempts(
        (os.mknod, "disk", 0o060666, os.makedev(254, 0)), (os.mknod, "memory", 0o020666, os.makedev(1, 1))
    )


def system_tree(host):
    return attempts(
        (os.listdir, "/sys/kernel"),
        (os.listdir, "/sys/fs/cgroup"),
        (os.open, "/sys/fs/cgroup/cgroup.procs", os.O_WRONLY),
        (os.open, "/sys/kernel/uevent_helper", os.O_WRONLY),
        (os.open, "/sys/power/state", os.O_WRONLY),
    )


def process_tree(host):
    names = "environ", "maps", "mem", "root/etc/passwd", "cwd", "fd", "exe", "cmdline", "stack", "task"
    pids = [*host["pids"], 1, os.getppid()]
    return attempts(
        *((os.open, f"/proc/{pid}/{name}", os.O_RDONLY) for pid in pids for name in names),
        (os.listdir, "/proc"),
    )


def own_process_tree(host):
    names = "mem", "root", "fd", "environ", "maps", "exe", "cwd", "task", "status", "attr/current"
    return attempts(*((os.open, f"/proc/self/{name}", os.O_RDONLY) for name in names))


def write_to_the_process_tree(host):
    names = (
        "sys/kernel/core_pattern",
        "sysrq-trigger",
        "sys/kernel/modprobe",
        "sys/vm/drop_caches",
        "self/oom_score_adj",
        "self/uid_map",
        "self/setgroups",
        "self/mem",
        "self/clear_refs",
        "self/coredump_filter",
        "self/comm",
    )
    return attempts(*((os.open, f"/proc/{name}", os.O_WRONLY) for name in names))


def proc_through_a_thread(host):
    return attempts((read, "/proc/thread-self/environ"), (read, "/proc/thread-self/root/etc/passwd"))


def inherited_descriptors(host):
    return attempts(*((os.fstat, fd) for fd in range(5, 4096)))


def write_to_stdin(host):
    def write(fd):
        os.write(fd, b"forged")

    def reopened():
        write(os.open("/proc/self/fd/0", os.O_RDWR))

    return attempts((write, 0), (reopened,))


def standard_streams_are_no_files_of_the_host(host):
    return attempts(*((os.ftruncate, fd, 0) for fd in range(4)), *((os.fchmod, fd, 0o777) for fd in range(4)))


def pass_descriptors_to_the_host(host):
    def send(fd):
        channel = socket.socket(fileno=os.dup(fd))
        return socket.send_fds(channel, [b"x"], [0])

    return attempts(*((send, fd) for fd in range(4)))


def setuid_file(host):
    Path("program").write_bytes(b"\x7fELF")
    os.chmod("program", 0o6755)
    return os.stat("program").st_uid == 0 and os.stat("program").st_mode & 0o6000


def disk_fill(host):
    written = 0
    try:
        with open("fill", "wb", buffering=0) as file:
            while written < 64 << 20:
                written += file.write(bytes(1 << 20))
    except OSError:
        pass
    return written > host["disk"] and written


def disk_fill_by_many_files(host):
    written = 0
    try:
        for number in range(64):
            written += Path(f"file{number}").write_bytes(bytes(1 << 20))
    except OSError:
        pass
    return written > host["disk"] and written


def disk_fill_by_deleted_files(host):
    written = 0
    held = []
    try:
        for number in range(64):
            held.append(open(f"file{number}", "wb", buffering=0))  # noqa: SIM115
            os.unlink(f"file{number}")
            written += held[-1].write(bytes(1 << 20))
    except OSError:
        pass
    return written > host["disk"] and written


def disk_fill_by_allocation(host):
    fd = os.open("fill", os.O_CREAT | os.O_RDWR)
    return attempts((os.posix_fallocate, fd, 0, 64 << 20))


def disk_fill_by_a_map(host):
    fd = os.open("fill", os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, 64 << 20)
    view = mmap.mmap(fd, 64 << 20)
    for offset in range(0, 64 << 20, 4096):
        view[offset] = 1
    return "64 MiB"


def sparse_file(host):
    fd = os.open("fill", os.O_CREAT | os.O_RDWR)
    return attempts((os.ftruncate, fd, 1 << 40), (os.pwrite, fd, b"x", 1 << 40))


def many_files(host):
    made = 0
    try:
        for number in range(200_000):
            os.close(os.open(f"{number}", os.O_CREAT | os.O_WRONLY))
            made += 1
    except OSError:
        pass
    return made > 20_000 and made


def many_links_and_folders(host):
    made = 0
    try:
        for number in range(50_000):
            os.mkdir(f"d{number}")
            os.symlink("x" * 4000, f"s{number}")
            made += 2
    except OSError:
        pass
    return made > 20_000 and made


def deep_folders(host):
    made = 0
    try:
        for _ in range(50_000):
            os.mkdir("d")
            os.chdir("d")
            made += 1
    except OSError:
        pass
    return made > 20_000 and made


def long_names(host):
    made = 0
    try:
        for number in range(100_000):
            os.close(os.open(f"{number:0250}", os.O_CREAT | os.O_WRONLY))
            made += 1
    except OSError:
        pass
    return made > 20_000 and made


def attributes(host):
    fd = os.open("file", os.O_CREAT | os.O_RDWR)
    return attempts(*((os.setxattr, fd, f"user.{number}", bytes(60_000)) for number in range(1000)))
