"""Why programs of the sandbox get no namespaces here: a seccomp profile, AppArmor or a sysctl."""

import errno
from collections.abc import Iterator
from pathlib import Path

from atoll.reward.sandbox.kernel import libc

# Calls of sandbox/namespaces.py with arguments for which the kernel does nothing, whatever one may do
HARMLESS: dict[str, tuple[int | None, ...]] = {
    "unshare": (0,),
    "setns": (-1, 0),
    "mount": (None, None, None, 0, None),
    "umount2": (None, -1),
}
REFUSALS = (errno.EPERM, errno.ENOSYS)
# The value that forbids user namespaces, and the one that allows them
SYSCTLS = {
    "user.max_user_namespaces": ("0", "65536"),
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
}


def refused_calls() -> list[str]:
    """Those that a seccomp filter refuses: the kernel does nothing, or reports the arguments."""
    return [name for name, arguments in HARMLESS.items() if _error(name, arguments) in REFUSALS]


def remedies(refused: list[str], proc: Path = Path("/proc")) -> Iterator[str]:
    """A sentence for each thing that forbids namespaces, with what to do. `refused`: of `refused_calls`."""
    if refused:
        yield (
            f"a seccomp profile forbids {', '.join(refused)}: for containers of reward services, set "
            'security_opt: ["seccomp=deploy/compose/reward-seccomp.json"]'
        )
    label = _read(proc / "self/attr/current")
    if label and not label.startswith("unconfined"):
        yield (
            f"the AppArmor profile {label.partition(' ')[0]} may forbid mounts: set "
            'security_opt: ["apparmor=PROFILE"] to one with the rules userns, mount, umount and pivot_root, '
            "or to unconfined"
        )
    for name, (forbids, allows) in SYSCTLS.items():
        if _read(proc / "sys" / name.replace(".", "/")) == forbids:
            own = ", or give reward services an AppArmor profile with userns" if "apparmor" in name else ""
            yield f"{name} = {forbids}: on the host, run sysctl -w {name}={allows}{own}"


def _error(name: str, arguments: tuple[int | None, ...]) -> int:
    try:
        libc(name, *arguments)
    except OSError as error:
        return error.errno or 0
    return 0


def _read(path: Path) -> str:
    """ "" if this kernel does not have it."""
    try:
        return path.read_text().strip("\0\n ")
    except OSError:
        return ""
