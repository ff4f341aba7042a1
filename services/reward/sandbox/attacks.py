"""Self-test: attacks that a sandbox runs on itself at start; it serves only if all are blocked.

Each attack is a program that tries one thing in several ways and prints `stopped` if all were refused. Its
targets on the host are real: a listener, a world-writable file, this process. Judging fails closed: an attack
that ends in any unexpected way counts as successful, so broken attacks are noticed. The whole suite is in
tests/sandbox/.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server

from atoll.reward.sandbox.base import Sandbox
from atoll.runtime.errors import SandboxError
from atoll.wire.types import Execution, ProgramLimits, ProgramStatus

_LIMITS = ProgramLimits(timeout_s=10.0, memory_bytes=512 << 20, output_bytes=1 << 16, disk_bytes=1 << 20)

# `host` has pid, user, group, file, folder and port. `refused` is for Python's functions; `forbidden` is for
# raw system calls, for which any error but EPERM and ENOSYS means that the kernel looked at the arguments.
_HEAD = """
import ctypes, json, os, resource, socket, sys
host = json.load(sys.stdin)
libc = ctypes.CDLL(None, use_errno=True)
arm = os.uname().machine == "aarch64"

def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except (OSError, MemoryError):
        return True
    return False

def forbidden(call, *arguments):
    ctypes.set_errno(0)
    return call(*arguments) == -1 and ctypes.get_errno() in (1, 38)
"""
_TAIL = """
print("stopped" if all(outcomes) else f"got through: {outcomes}")
"""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    source: str
    ends: ProgramStatus | None = (
        None  # how the sandbox must end it; None: it refuses the attempt or kills the program
    )
    limits: ProgramLimits = _LIMITS

    def got_through(self, execution: Execution) -> bool:
        if self.ends is not None:
            return execution.status is not self.ends
        refused = execution.status is ProgramStatus.OK and execution.stdout == b"stopped\n"
        killed = execution.status is ProgramStatus.SIGNAL and execution.detail == "SIGSYS"
        return not refused and not killed


def _attack(name: str, outcomes: str) -> Attack:
    return Attack(name, f"{_HEAD}{outcomes.strip()}{_TAIL}")


ATTACKS = (
    _attack(
        "fork",
        """
def fork(start, *arguments):
    child = start(*arguments)
    if child == 0:
        os._exit(0)
    if child == -1:
        raise OSError

clone, as_sibling, sigchld = 220 if arm else 56, 0x8000, 17
outcomes = [refused(fork, os.fork), refused(fork, libc.syscall, clone, as_sibling | sigchld, 0, 0, 0, 0)]
""",
    ),
    _attack("execute", "outcomes = [refused(os.execv, '/bin/sh', ['sh', '-c', 'echo got through'])]"),
    _attack(
        "read the host's files",
        """
process = f"/proc/{host['pid']}/"
files = host["file"], "/etc/passwd", "/sys/kernel", process + "environ", process + "maps", process + "mem"
outcomes = [refused(os.open, file, os.O_RDONLY) for file in files]
""",
    ),
    _attack(
        "write the host's files",
        """
flags = os.O_WRONLY | os.O_CREAT
files = host["file"], host["folder"] + "/new", "/dev/shm/atoll-attack", "/proc/self/oom_score_adj"
outcomes = [refused(os.open, file, flags) for file in files]
outcomes += [refused(os.truncate, host["file"], 0), refused(os.unlink, host["file"])]
outcomes += [refused(os.link, host["file"], "inside"), refused(os.rename, host["file"], "inside")]
if not refused(os.symlink, host["file"], "link"):
    outcomes += [refused(os.open, "link", flags)]
""",
    ),
    _attack(
        "sockets",
        """
families = socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 38, 40  # netlink, packet, alg, vsock
def reach(family):
    channel = socket.socket(family, socket.SOCK_DGRAM if family == 17 else socket.SOCK_STREAM)
    if family == socket.AF_INET:
        channel.connect(("127.0.0.1", host["port"]))

outcomes = [refused(reach, family) for family in families]
""",
    ),
    _attack(
        "signals",
        """
outcomes = [refused(os.kill, pid, 0) for pid in (host["pid"], os.getppid() or host["pid"], -1)]
outcomes += [forbidden(libc.syscall, 131 if arm else 234, host["pid"], host["pid"], 0)]  # tgkill
""",
    ),
    _attack(
        "another process's memory and descriptors",
        """
span = (ctypes.c_void_p * 2)()
outcomes = [
    forbidden(libc.ptrace, 0x4206, host["pid"], None, None),  # PTRACE_SEIZE
    forbidden(libc.process_vm_readv, host["pid"], span, 0, span, 0, 0),
    forbidden(libc.process_vm_writev, host["pid"], span, 0, span, 0, 0),
    forbidden(libc.syscall, 434, host["pid"], 0),  # pidfd_open
    forbidden(libc.syscall, 272 if arm else 312, os.getpid(), host["pid"], 0, 0, 0),  # kcmp
]
""",
    ),
    _attack(
        "limits and priorities of others",
        """
outcomes = [
    refused(resource.prlimit, host["pid"], resource.RLIMIT_NOFILE),
    refused(os.sched_setaffinity, host["pid"], os.sched_getaffinity(0)),
    refused(os.setpriority, os.PRIO_PROCESS, host["pid"], 0),
]
""",
    ),
    _attack(
        "signals by a descriptor's owner",
        """
import fcntl
reader, writer = os.pipe()
owner = bytes((ctypes.c_int * 2)(1, host["pid"]))  # F_OWNER_PID
setting = (8, host["pid"]), (10, 0), (15, owner)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
outcomes = [refused(fcntl.fcntl, reader, command, argument) for command, argument in setting]
""",
    ),
    _attack(
        "the kernel's doors",
        """
doors = {  # x86_64, aarch64
    "io_uring_setup": (425, 425), "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217),
    "memfd_create": (319, 279), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "mount": (165, 40),
    "unshare": (272, 97), "setns": (308, 268), "chroot": (161, 51), "pivot_root": (155, 41),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "kexec_load": (246, 104),
    "init_module": (175, 105), "finit_module": (313, 273), "open_tree": (428, 428), "fsopen": (430, 430),
    "clone3": (435, 435), "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "shmget": (29, 194),
    "msgget": (68, 186), "mq_open": (240, 180), "fanotify_init": (300, 262),
}
outcomes = [forbidden(libc.syscall, numbers[arm], 1, 0, 0, 0, 0, 0) for numbers in doors.values()]
""",
    ),
    _attack(
        "system calls of another architecture",
        "outcomes = [forbidden(libc.syscall, 0x40000000 + 39)]  # getpid, as x32 counts",
    ),
    _attack(
        "privileges",
        """
outcomes = [
    # in a user namespace that maps nobody, everybody is nobody
    {*os.getresuid(), *os.getresgid()} <= {host["user"], host["group"], 65534},
    refused(os.setuid, 0), refused(os.setgid, 0), refused(os.setgroups, [0]),
]
""",
    ),
    _attack("inherited descriptors", "outcomes = [refused(os.fstat, fd) for fd in range(5, 4096)]"),
    # mapped but never touched, so that it costs nothing if it succeeds
    _attack("memory", "import mmap\noutcomes = [refused(mmap.mmap, -1, 4 << 30)]"),
    _attack(
        "disk",
        """
def fill():
    with open("fill", "wb", buffering=0) as file:
        for _ in range(64):
            if file.write(bytes(1 << 20)) < 1 << 20:
                raise OSError("full")

outcomes = [refused(fill)]
""",
    ),
    Attack("output", "while True:\n    print('x' * 65536)", ProgramStatus.OUTPUT_LIMIT),
    Attack(
        "outlive the deadline",
        """
import signal
for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    pass
""",
        ProgramStatus.TIMEOUT,
        ProgramLimits(timeout_s=0.3),
    ),
)


async def run_attacks(sandbox: Sandbox, user: int | None) -> None:
    """Raises SandboxError with the names of the successful attacks. Takes about a second.

    `user`: the user and group id that programs should run as; None: those of this process.
    """

    async def one(attack: Attack, host: bytes) -> str | None:
        execution = await sandbox.run(attack.source, host, attack.limits)
        if not attack.got_through(execution):
            return None
        said = (execution.stdout + execution.stderr)[:300].decode(errors="replace").strip()
        return f"{attack.name} ({execution.status.value} {execution.detail}: {said})"

    with _host(user) as host:
        found = await asyncio.gather(*(one(attack, host) for attack in ATTACKS))
    through = [name for name in found if name is not None]
    if through:
        raise SandboxError(
            f"The sandbox is not secure on this machine ({sandbox.tier}). Attacks that succeeded: "
            f"{'; '.join(through)}. No model-written program will be run: see docs/rewards.md, the threat "
            "model."
        )


@contextmanager
def _host(user: int | None) -> Iterator[bytes]:
    """The attacks' targets, as JSON for their standard input."""
    with tempfile.TemporaryDirectory() as folder, create_server(("127.0.0.1", 0)) as listener:
        os.chmod(folder, 0o777)  # world-writable, so that only the sandbox protects it
        file = Path(folder, "secret")
        file.write_text("secret")
        file.chmod(0o666)
        described = {
            "pid": os.getpid(),
            "user": os.getuid() if user is None else user,
            "group": os.getgid() if user is None else user,
            "file": str(file),
            "folder": folder,
            "port": listener.getsockname()[1],
        }
        yield json.dumps(described).encode()
