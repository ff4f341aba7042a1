"""Attacks on the kernel: system calls that no program of a model needs, and ways around the filter."""

import ctypes
import errno
import os
import signal

from atoll.wire.types import ProgramStatus
from tests.sandbox.preamble import ARM, NUMBERS, attempts, call, libc, machine_code, seen

ENDS: dict[str, set[ProgramStatus]] = {}


def io_uring(host):
    return seen("io_uring_setup", 1)


def asynchronous_io(host):
    return seen("io_setup", 1)


def bpf(host):
    return seen("bpf", 5)


def keys(host):
    return seen("keyctl", 0, -3) or seen("add_key")


def memory_file(host):
    return seen("memfd_create") or seen("memfd_secret", 1)


def performance_events(host):
    return seen("perf_event_open")


def user_page_faults(host):
    return seen("userfaultfd", 1)


def mount(host):
    calls = "mount", "umount2", "fsopen", "open_tree", "move_mount", "mount_setattr", "pivot_root", "chroot"
    return "".join(seen(name) for name in calls)


def mount_tmpfs(host):
    names = [ctypes.create_string_buffer(name) for name in (b"tmpfs", b"/tmp")]
    return attempts((call, "mount", ctypes.addressof(names[0]), ctypes.addressof(names[1]), 0))


def namespaces(host):
    flags = (
        0x10000000,
        0x00020000,
        0x40000000,
        0x20000000,
        0x02000000,
        0x04000000,
    )  # user mnt net pid cgroup uts
    return "".join(seen("unshare", flag) for flag in flags)


def join_a_namespace(host):
    return seen("setns", 0)


def handles(host):
    return seen("open_by_handle_at") or seen("name_to_handle_at")


def another_kernel(host):
    return "".join(seen(name) for name in ("kexec_load", "init_module", "finit_module", "reboot", "swapon"))


def clock_and_names(host):
    calls = "settimeofday", "clock_settime", "sethostname", "setdomainname", "adjtimex"
    return "".join(seen(name) for name in calls)


def log_and_accounting(host):
    return "".join(seen(name) for name in ("syslog", "acct", "quotactl", "vhangup"))


def descriptor_tables(host):
    return "" if ARM else seen("modify_ldt", 0)


def privileges_of_the_processor(host):
    if ARM:
        return ""
    return libc.iopl(3) == 0 or libc.ioperm(0, 1, 1) == 0


def user_and_group(host):
    ids = {*os.getresuid(), *os.getresgid()} - {host["user"], 65534}
    raised = attempts((os.setuid, 0), (os.setgid, 0), (os.setgroups, [0]), (os.setresuid, 0, 0, 0))
    return ids or raised


def capabilities(host):
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    libc.capget(header, data)
    held = [data[i] for i in (0, 1, 3, 4)]  # effective, permitted, of both halves
    data = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
    raised = libc.capset(header, data) == 0
    return (any(held) and held != [0xFFFFFFFF] * 4 and f"capabilities {held}") or raised


def own_filter(host):
    return seen("seccomp", 1, 8) or (libc.prctl(22, 0, 0) == 0 and "strict mode")  # NEW_LISTENER


def no_new_privileges(host):
    return libc.prctl(39, 0, 0, 0, 0) == 0 and "a set-user-id program would count"  # PR_GET_NO_NEW_PRIVS


def process_controls(host):
    # PR_SET_DUMPABLE, PR_SET_PTRACER, PR_SET_KEEPCAPS, PR_SET_SECUREBITS, PR_CAP_AMBIENT
    controls = (4, 1), (0x59616D61, -1), (8, 1), (28, 0), (47, 2, 7)
    return [control for control in controls if libc.prctl(*map(ctypes.c_long, control)) == 0]


def own_map(host):
    return [
        kind for kind in (1, 6, 8, 13, 14) if libc.prctl(35, kind, ctypes.c_long(4096), 0, 0) == 0
    ]  # PR_SET_MM


def address_zero(host):
    page = libc.mmap
    page.restype = ctypes.c_long
    return page(ctypes.c_void_p(0), 4096, 3, 0x32, -1, 0) == 0  # MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS


def personality(host):
    return libc.personality(0x0040000) != -1 and libc.personality(0xFFFFFFFF) == 0x0040000  # no random layout


def x32(host):
    return "" if ARM else libc.syscall(0x40000000 + 39) > 0


def x32_open(host):
    number = ctypes.c_long(0x40000000 + 2)
    return "" if ARM else libc.syscall(number, host["secret"].encode(), 0) >= 0


def x32_ptrace(host):
    return "" if ARM else libc.syscall(0x40000000 + 521, 0, 0, 0, 0) >= 0


def wide_numbers(host):
    # a number is 32 bits: what stands above them must not make it another one
    for name in ("unshare", "ptrace", "memfd_create"):
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(NUMBERS[name][ARM] | (1 << 32)), 0, 0, 0, 0)
        if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
            return name
    return ""


def negative_number(host):
    return libc.syscall(ctypes.c_long(-1)) != -1


def entry_of_32_bits(host):
    if ARM:
        return ""
    # mov eax, 20 (getpid); int 0x80; ret
    return machine_code(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")() > 0


def execve_of_32_bits(host):
    if ARM:
        return ""
    # mov eax, 2 (fork); int 0x80; ret
    child = machine_code(b"\xb8\x02\x00\x00\x00\xcd\x80\xc3")()
    if child == 0:
        os._exit(0)
    return child > 0


def vfork(host):
    if ARM:
        return ""
    # mov eax, 58; syscall; test eax, eax; jnz end; mov edi, 0; mov eax, 60; syscall; end: ret
    code = b"\xb8\x3a\x00\x00\x00\x0f\x05\x85\xc0\x75\x0c\xbf\x00\x00\x00\x00\xb8\x3c\x00\x00\x00\x0f\x05\xc3"
    return machine_code(code)() > 0


def clone_by_machine_code(host):
    if ARM:
        return ""
    # xor edx.. : mov eax, 56; mov edi, 17; xor esi, esi; xor edx, edx; xor r10, r10; syscall; test; jnz; exit
    code = b"\xb8\x38\x00\x00\x00\xbf\x11\x00\x00\x00\x31\xf6\x31\xd2\x4d\x31\xd2\x0f\x05\x85\xc0\x75\x0c"
    return machine_code(code + b"\xbf\x00\x00\x00\x00\xb8\x3c\x00\x00\x00\x0f\x05\xc3")() > 0


def calls_from_a_new_thread(host):
    import threading

    found = []

    def attempt():
        found.append(attempts((os.fork,), (os.open, host["secret"], os.O_RDONLY)))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return found[0]


def calls_from_a_signal_handler(host):
    found = []
    signal.signal(signal.SIGALRM, lambda *_: found.append(attempts((os.open, host["secret"], os.O_RDONLY))))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    signal.pause()
    return found[0]


def landlock_of_its_own(host):
    ruleset = call("landlock_create_ruleset", 0, 0, 1)
    return attempts((os.open, host["secret"], os.O_RDONLY)) and ruleset


def security_attributes(host):
    return seen("lsm_set_self_attr")
